"""The functions of `torch.nn.functional` that brim has, with the same names and signatures.

The same values and gradients; only what backward needs at this call is kept. Each is a thin face of
an operator of the C++ core (`include/brim/nn/functional.h`).

While torch.compile traces, the operators go into the graph. Normalisation, adaptive pooling and the
activations that keep their input or output are torch's own there: the compiler decides what is
kept. Tensor classes that brim does not know and exported programs get torch's own functions.

Example:
    >>> import torch
    >>> import brim.nn.functional as F
    >>> F.relu(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional
from torch import Tensor

from brim.nn import _activation, _conv, _gated, _loss, _pool
from brim.nn._activation import *  # noqa: F403
from brim.nn._conv import *  # noqa: F403
from brim.nn._elsewhere import check_arguments, ops
from brim.nn._gated import *  # noqa: F403
from brim.nn._loss import *  # noqa: F403
from brim.nn._numbers import Numbers as Numbers
from brim.nn._pool import *  # noqa: F403

__all__ = [
    "add",
    "batch_norm",
    "dropout",
    "float32_rms_norm",
    "group_norm",
    "layer_norm",
    "linear",
    "mul",
    "rms_norm",
]
__all__ += _activation.__all__
__all__ += _conv.__all__
__all__ += _gated.__all__
__all__ += _loss.__all__
__all__ += _pool.__all__

# -- Dropout ---------------------------------------------------------------------------------------


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As `torch.nn.functional.dropout`, with the same random numbers; keeps one bit per element.

    Raises:
        ValueError: if p is not from 0 to 1.

    Example:
        >>> import torch
        >>> dropout(torch.ones(3), p=0.0)
        tensor([1., 1., 1.])
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be from 0 to 1, got {p}")
    if training:
        return ops().dropout_(input, p) if inplace else ops().dropout(input, p)
    if type(input) is Tensor:
        return input  # as torch does, also in place
    check_arguments("dropout", input)
    return torch.nn.functional.dropout(input, p, False, inplace)


# -- Linear ----------------------------------------------------------------------------------------


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recompute: bool = False,
    runs_again: bool = False,
) -> Tensor:
    """As `torch.nn.functional.linear`; keeps the input only where the weight needs a gradient.

    With `recompute`, not even there if the layer before can recompute it in backward. With
    `runs_again`, the product runs again in backward for the next layer, which then does not keep
    the output, if that is larger than the input.

    Example:
        >>> x, weight = torch.randn(2, 3, requires_grad=True), torch.ones(4, 3)
        >>> linear(x, weight).shape
        torch.Size([2, 4])
    """
    return ops().linear(input, weight, bias, None, recompute, runs_again)


# -- Sums and products -----------------------------------------------------------------------------


def add(input: Tensor, other: Tensor, *, inplace: bool = False) -> Tensor:
    """As `torch.add` of two tensors; keeps nothing, and can be recomputed from its operands.

    Example:
        >>> add(torch.ones(2), torch.ones(2))
        tensor([2., 2.])
    """
    return ops().add_(input, other) if inplace else ops().add(input, other)


def mul(input: Tensor, other: Tensor, *, recompute: bool = False) -> Tensor:
    """As `torch.mul` of two tensors; keeps each only where the other one needs a gradient.

    Args:
        input: a factor.
        other: the other factor; the shapes are broadcast.
        recompute: keep no factor that the layer before can recompute in backward.

    Example:
        >>> x, scale = torch.randn(2, 3, requires_grad=True), torch.ones(3)
        >>> mul(x, scale).shape
        torch.Size([2, 3])
    """
    return ops().mul(input, other, recompute)


# -- Normalisation ---------------------------------------------------------------------------------


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `torch.nn.functional.batch_norm`.

    Keeps the input in training; with the running statistics only where the weight needs a gradient.

    Raises:
        ValueError: if eps is negative, or 0 in training.

    Example:
        >>> import torch
        >>> batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True)
        tensor([[-1.0000],
                [ 1.0000]])
    """
    if eps <= 0.0 and (training or eps < 0.0):
        raise ValueError(f"eps must be positive (0 is allowed outside training), got {eps}")
    return ops().batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As `torch.nn.functional.layer_norm`; keeps the input where more than the bias needs it.

    Example:
        >>> import torch
        >>> layer_norm(torch.tensor([1.0, 3.0]), [2])
        tensor([-1.0000,  1.0000])
    """
    return ops().layer_norm(input, normalized_shape, weight, bias, eps, False)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As `torch.nn.functional.group_norm`; keeps the input where more than the bias needs it.

    Example:
        >>> import torch
        >>> group_norm(torch.tensor([[1.0, 3.0]]), 1)
        tensor([[-1.0000,  1.0000]])
    """
    return ops().group_norm(input, num_groups, weight, bias, eps, False)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """As `torch.nn.functional.rms_norm`; keeps the input, once.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([3.0, 4.0]), [2])
        tensor([0.8485, 1.1314])
    """
    return ops().rms_norm(input, normalized_shape, weight, eps, False)


def float32_rms_norm(
    input: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_first: bool = True,
) -> Tensor:
    """The RMS norm of the last dimension that frameworks write by hand, calculated in float32.

    With `h = input.float()` and `h = h * rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)` the result
    is `(offset + weight) * h.to(input.dtype)` (Llama, Mistral, Qwen, T5), or without `cast_first`
    `(h * (offset + weight.float())).to(input.dtype)` (Gemma, whose offset is 1). Keeps the input in
    its own type and one number per row.

    Args:
        input: normalised over its last dimension.
        weight: one number for each of the last dimension's; None for no product.
        eps: added to the mean square.
        offset: added to the weight.
        cast_first: back to the input's type before the product with the weight, or after it.

    Raises:
        ValueError: if the weight has another shape, or eps is negative.

    Example:
        >>> float32_rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0)
        tensor([0.8485, 2.2627])
    """
    return ops().float32_rms_norm(input, weight, eps, offset, cast_first)
