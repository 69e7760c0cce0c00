"""Activations by name, gated activations and functions that run again in backward.

They keep their inputs and nothing of what they compute inside.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from brim import _C
from brim.nn._elsewhere import is_foreign, is_traced, ops

__all__ = ["activation", "gated", "gated_packed", "rerun"]


def activation(input: Tensor, name: str, *, recompute: bool = False) -> Tensor:
    """An activation by name; keeps its input.

    Args:
        input: of any shape.
        name: torch's own (silu, gelu, gelu_tanh, relu, sigmoid, tanh, mish, hardswish), or one that
            models write out: new_gelu, fast_gelu, erf_gelu, quick_gelu, clipped_gelu (to -10 and
            10), swish, softplus_mish, sqrt_softplus, relu_squared, laplace. These run operator by
            operator as in the models, so values, gradients and types are the same, also under
            autocast.
        recompute: keep nothing where the layer before can recompute the input.

    Raises:
        ValueError: for another name.

    Example:
        >>> import torch
        >>> activation(torch.tensor([-1.0, 2.0]), "relu_squared")
        tensor([0., 4.])
    """
    return ops().activation(input, name, recompute)


def gated(gate: Tensor, up: Tensor, activation: str = "silu", *, recompute: bool = False) -> Tensor:
    """`act(gate) * up`, as in the MLPs of language models; keeps `gate` and `up`.

    Values and gradients are those of the two operators. torch would keep `act(gate)` too, and the
    linear layer after it the product; here that layer can ask for it again (`recompute="cheap"`).

    Args:
        gate: through the activation.
        up: the other factor.
        activation: a name, see `brim.nn.functional.activation`.
        recompute: keep neither where the layers before can recompute them.

    Raises:
        ValueError: for an activation that brim does not know.

    Example:
        >>> import torch
        >>> gate, up = torch.zeros(2, requires_grad=True), torch.ones(2)
        >>> gated(gate, up, "sigmoid")
        tensor([0.5000, 0.5000], grad_fn=<gated_backward>)
    """
    return ops().gated(gate, up, activation, recompute)


def gated_packed(
    packed: Tensor,
    activation: str = "silu",
    gate_first: bool = True,
    dim: int = -1,
    *,
    recompute: bool = False,
) -> Tensor:
    """`gated(*packed.chunk(2, dim))`; keeps `packed` and gives it one gradient.

    Args:
        packed: gate and up in one tensor, as one linear layer makes them.
        activation: a name, see `brim.nn.functional.activation`.
        gate_first: whether the first half is the gate.
        dim: the dimension that holds both.
        recompute: keep nothing where the layer before can recompute `packed`.

    Raises:
        ValueError: for an activation that brim does not know, or an odd size in `dim`.

    Example:
        >>> import torch
        >>> gated_packed(torch.tensor([-1.0, 3.0, 2.0, 4.0]), "relu")
        tensor([ 0., 12.])
    """
    return ops().gated_packed(packed, activation, gate_first, dim, recompute)


def rerun(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    recompute: bool = False,
    is_cheap: bool = True,
) -> Tensor:
    """`function(*inputs)`; keeps the inputs, and runs the function again in backward.

    For cheap elementwise functions that keep several tensors inside. Values and gradients are those
    of the function. It must draw no random numbers, write to none of its inputs, and get every
    tensor that needs a gradient as an argument.

    Args:
        function: of tensors, gives one tensor.
        *inputs: its arguments, at least one.
        recompute: keep no input that the layer before can recompute.
        is_cheap: whether later layers may have it run once more to get the value again.

    Raises:
        RuntimeError: in backward, if the function reads a tensor that needs a gradient and is no
            argument.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> rerun(lambda x: x * torch.tanh(torch.exp(x)), x).sum().backward()
        >>> x.grad.shape
        torch.Size([2])
    """
    if is_traced() or any(map(is_foreign, inputs)):
        return function(*inputs)
    return _C.rerun(lambda given: function(*given), inputs, recompute, is_cheap)
