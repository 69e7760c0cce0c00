"""The activations of `brim.nn.functional`.

The first ones keep one bit per element, or nothing where the layer that takes the output keeps it
anyway. The others keep what torch keeps, the input or the output: nothing smaller is exact. With
`recompute`, all keep nothing where the layer before can recompute what they would keep.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from brim.nn._elsewhere import ops

__all__ = [
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "mish",
    "prelu",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "softplus",
    "tanh",
]


def operator(name: str, inplace: bool) -> Callable[..., Tensor]:
    """The operator of an activation. It takes the input, the options, and `recompute`.

    Example:
        >>> import torch
        >>> operator("relu", False)(torch.tensor([-1.0, 2.0]), False)
        tensor([0., 2.])
    """
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


def relu6(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.relu6`; keeps one bit per element, or nothing.

    Example:
        >>> import torch
        >>> relu6(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    return hardtanh(input, 0.0, 6.0, inplace, recompute=recompute)


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

    Example:
        >>> import torch
        >>> hardtanh(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  1.])
    """
    return operator("hardtanh", inplace)(input, min_val, max_val, recompute)


def leaky_relu(
    input: Tensor, negative_slope: float = 0.01, inplace: bool = False, *, recompute: bool = False
) -> Tensor:
    """As `torch.nn.functional.leaky_relu`; keeps one bit per element, or nothing.

    Example:
        >>> import torch
        >>> leaky_relu(torch.tensor([-1.0, 2.0]))
        tensor([-0.0100,  2.0000])
    """
    return operator("leaky_relu", inplace)(input, negative_slope, recompute)


def hardsigmoid(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.hardsigmoid`; keeps one bit per element.

    Example:
        >>> import torch
        >>> hardsigmoid(torch.tensor([-1.0, 2.0]))
        tensor([0.3333, 0.8333])
    """
    return operator("hardsigmoid", inplace)(input, recompute)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """As `torch.nn.functional.prelu`; keeps one bit per element if the weight is frozen.

    Example:
        >>> import torch
        >>> prelu(torch.tensor([-1.0, 2.0]), torch.tensor([0.5]))
        tensor([-0.5000,  2.0000])
    """
    return ops().prelu(input, weight)


# -- The input ------------------------------------------------------------------------------------


def gelu(input: Tensor, approximate: str = "none", *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.gelu`; keeps its input.

    Example:
        >>> import torch
        >>> gelu(torch.tensor([-1.0, 2.0]))
        tensor([-0.1587,  1.9545])
    """
    return ops().gelu(input, approximate, recompute)


def silu(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.silu`; keeps its input.

    Example:
        >>> import torch
        >>> silu(torch.tensor([-1.0, 2.0]))
        tensor([-0.2689,  1.7616])
    """
    return operator("silu", inplace)(input, recompute)


def hardswish(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.hardswish`; keeps its input.

    Example:
        >>> import torch
        >>> hardswish(torch.tensor([-1.0, 2.0]))
        tensor([-0.3333,  1.6667])
    """
    return operator("hardswish", inplace)(input, recompute)


def mish(input: Tensor, inplace: bool = False, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.mish`; keeps its input.

    Example:
        >>> import torch
        >>> mish(torch.tensor([-1.0, 2.0]))
        tensor([-0.3034,  1.9440])
    """
    return operator("mish", inplace)(input, recompute)


def softplus(
    input: Tensor, beta: float = 1.0, threshold: float = 20.0, *, recompute: bool = False
) -> Tensor:
    """As `torch.nn.functional.softplus`; keeps its input.

    Example:
        >>> import torch
        >>> softplus(torch.tensor([-1.0, 2.0]))
        tensor([0.3133, 2.1269])
    """
    return ops().softplus(input, beta, threshold, recompute)


def elu(
    input: Tensor, alpha: float = 1.0, inplace: bool = False, *, recompute: bool = False
) -> Tensor:
    """As `torch.nn.functional.elu`; keeps its input, or in place its output.

    Example:
        >>> import torch
        >>> elu(torch.tensor([-1.0, 2.0]))
        tensor([-0.6321,  2.0000])
    """
    return operator("elu", inplace)(input, alpha, recompute)


# -- The output -----------------------------------------------------------------------------------


def sigmoid(input: Tensor, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.sigmoid`; keeps its output.

    Example:
        >>> import torch
        >>> sigmoid(torch.tensor([-1.0, 2.0]))
        tensor([0.2689, 0.8808])
    """
    return ops().sigmoid(input, recompute)


def tanh(input: Tensor, *, recompute: bool = False) -> Tensor:
    """As `torch.nn.functional.tanh`; keeps its output.

    Example:
        >>> import torch
        >>> tanh(torch.tensor([-1.0, 2.0]))
        tensor([-0.7616,  0.9640])
    """
    return ops().tanh(input, recompute)
