"""The activations of `brim.nn.functional`.

The first ones keep one bit per element, or nothing where the layer that takes the output keeps it
anyway. The others keep what torch keeps, the input or the output: nothing smaller is exact. With
`recompute`, all keep nothing where the layer before can recompute what they would keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from brim.nn._elsewhere import ops

__all__ = [
    "celu",
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "prelu",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softsign",
    "tanh",
    "threshold",
]


_Named = TypeVar("_Named", bound=Callable[..., Any])


def gives(result: str) -> Callable[[_Named], _Named]:
    """Adds an example to the docstring of an activation, a function or a layer.

    Args:
        result: what -1 and 2 become with the default options.
    """

    def with_example(activation: _Named) -> _Named:
        is_layer = isinstance(activation, type)
        call = f"{activation.__name__}()" if is_layer else f"functional.{activation.__name__}"
        activation.__doc__ = f"""{inspect.getdoc(activation) or ""}

Example:
    >>> import torch, brim
    >>> brim.nn.{call}(torch.tensor([-1.0, 2.0]))
    tensor([{result}])
"""
        return activation

    return with_example


def operator(name: str, inplace: bool) -> Callable[..., Tensor]:
    """The operator of an activation. It takes the input, the options, and `recompute`."""
    run: Callable[..., Tensor] = getattr(ops(), name + "_" if inplace else name)
    return run


# -- One bit per element --------------------------------------------------------------------------


def relu(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.relu`; keeps one bit per element, or nothing.

    Example:
        >>> import torch
        >>> x = torch.randn(1024, requires_grad=True)
        >>> kept = []
        >>> with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda t: t):
        ...     y = relu(x)
        >>> kept[0].nbytes
        128
    """
    return operator("relu", inplace)(input, recompute)


@gives("0., 2.")
def relu6(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.relu6`; keeps one bit per element, or nothing."""
    return hardtanh(input, 0.0, 6.0, inplace, recompute=recompute)


@gives("-1.,  1.")
def hardtanh(
    input: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
    *,
    recompute: bool = False,
) -> Tensor:
    """As `torch.nn.functional.hardtanh`; keeps one bit per element, or nothing.

    Raises:
        ValueError: if min_val > max_val.
    """
    return operator("hardtanh", inplace)(input, min_val, max_val, recompute)


@gives("-0.0100,  2.0000")
def leaky_relu(
    input: Tensor, negative_slope: float = 0.01, inplace: bool = False, *, recompute: bool = False
) -> Tensor:
    """As `torch.nn.functional.leaky_relu`; keeps one bit per element, or nothing."""
    return operator("leaky_relu", inplace)(input, negative_slope, recompute)


@gives("0.3333, 0.8333")
def hardsigmoid(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.hardsigmoid`; keeps one bit per element."""
    return operator("hardsigmoid", inplace)(input, recompute)


def threshold(
    input: Tensor,
    threshold: float,
    value: float,
    inplace: bool = False,
    *,
    recompute: bool = False,
) -> Tensor:
    """As `torch.nn.functional.threshold`; keeps one bit per element, or nothing.

    Example:
        >>> import torch, brim
        >>> brim.nn.functional.threshold(torch.tensor([-1.0, 2.0]), 0.5, 7.0)
        tensor([7., 2.])
    """
    return operator("threshold", inplace)(input, threshold, value, recompute)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """As `torch.nn.functional.prelu`; keeps one bit per element if the weight is frozen.

    Example:
        >>> import torch
        >>> prelu(torch.tensor([-1.0, 2.0]), torch.tensor([0.5]))
        tensor([-0.5000,  2.0000])
    """
    return ops().prelu(input, weight)


# -- The input ------------------------------------------------------------------------------------


@gives("-0.1587,  1.9545")
def gelu(input: Tensor, approximate: str = "none", *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.gelu`; keeps its input."""
    return ops().gelu(input, approximate, recompute)


@gives("-0.2689,  1.7616")
def silu(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.silu`; keeps its input."""
    return operator("silu", inplace)(input, recompute)


@gives("-0.3333,  1.6667")
def hardswish(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.hardswish`; keeps its input."""
    return operator("hardswish", inplace)(input, recompute)


@gives("-0.3034,  1.9440")
def mish(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.mish`; keeps its input."""
    return operator("mish", inplace)(input, recompute)


@gives("0.3133, 2.1269")
def softplus(
    input: Tensor, beta: float = 1.0, threshold: float = 20.0, *, recompute: bool = False
) -> Tensor:
    """As `torch.nn.functional.softplus`; keeps its input."""
    return ops().softplus(input, beta, threshold, recompute)


@gives("-0.6321,  2.0000")
def elu(
    input: Tensor, alpha: float = 1.0, inplace: bool = False, *, recompute: bool = False
) -> Tensor:
    """As `torch.nn.functional.elu`; keeps its input, or in place its output."""
    return operator("elu", inplace)(input, alpha, recompute)


@gives("-0.6321,  2.0000")
def celu(
    input: Tensor, alpha: float = 1.0, inplace: bool = False, *, recompute: bool = False
) -> Tensor:
    """As `torch.nn.functional.celu`; keeps its input, or in place its output."""
    return operator("celu", inplace)(input, alpha, recompute)


@gives("-1.1113,  2.1014")
def selu(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.selu`; keeps its input, or in place its output."""
    return operator("selu", inplace)(input, recompute)


@gives("-1.3133, -0.1269")
def logsigmoid(input: Tensor, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.logsigmoid`; keeps its input, where torch keeps two on the CPU."""
    return ops().logsigmoid(input, recompute)


@gives("-0.5000,  0.6667")
def softsign(input: Tensor, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.softsign`; keeps its input, where torch keeps two tensors."""
    return ops().softsign(input, recompute)


# -- The output -----------------------------------------------------------------------------------


@gives("0.2689, 0.8808")
def sigmoid(input: Tensor, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.sigmoid`; keeps its output."""
    return ops().sigmoid(input, recompute)


@gives("-0.7616,  0.9640")
def tanh(input: Tensor, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.tanh`; keeps its output."""
    return ops().tanh(input, recompute)
