"""The pooling of `brim.nn.functional`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from brim import _C
from brim.nn._elsewhere import elsewhere
from brim.nn._numbers import Numbers, each, how_many
from brim.nn._tensor_checks import refuse_others

__all__ = [
    "adaptive_average",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "average",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "maximum",
]

_ops = _C.ops
_torch: Any = torch.nn.functional


def maximum(
    input: Tensor,
    dimensions: int,
    kernel_size: Numbers,
    stride: Numbers | None,
    padding: Numbers,
    dilation: Numbers,
    ceil_mode: bool,
    return_indices: bool,
) -> Any:
    kernel = each("kernel_size", kernel_size, dimensions)
    steps = _steps(stride, kernel, dimensions)
    pads, gaps = each("padding", padding, dimensions), each("dilation", dilation, dimensions)
    if is_compiling():
        if return_indices:
            pool = getattr(_torch, f"max_pool{dimensions}d")
            return pool(input, kernel, steps, pads, gaps, ceil_mode, True)
        return elsewhere("max_pool", input, kernel, steps, pads, gaps, ceil_mode)
    run: Any = _ops.max_pool_with_indices if return_indices else _ops.max_pool
    try:
        return run(input, kernel, steps, pads, gaps, ceil_mode)
    except Exception:
        refuse_others(input=input)
        raise


def _steps(stride: Numbers | None, kernel: Sequence[int], dimensions: int) -> Sequence[int]:
    """The stride; the size of the window where none is given, or as torch passes that on."""
    if stride is None or (type(stride) in (list, tuple) and not stride):
        return kernel
    return each("stride", stride, dimensions)


def max_pool1d(
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As `torch.nn.functional.max_pool1d`; keeps one byte an output."""
    return maximum(input, 1, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool2d(
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As `torch.nn.functional.max_pool2d`; keeps one byte an output.

    Returns:
        The maxima; with `return_indices` a tuple of these and their indices.

    Example:
        >>> x = torch.arange(16.0).reshape(1, 4, 4)
        >>> max_pool2d(x, 2)
        tensor([[[ 5.,  7.],
                 [13., 15.]]])
    """
    return maximum(input, 2, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool3d(
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As `torch.nn.functional.max_pool3d`; keeps one byte an output."""
    return maximum(input, 3, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def average(
    input: Tensor,
    dimensions: int,
    kernel_size: Numbers,
    stride: Numbers | None,
    padding: Numbers,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    kernel = each("kernel_size", kernel_size, dimensions)
    steps = _steps(stride, kernel, dimensions)
    pads = each("padding", padding, dimensions)
    run: Any = partial(elsewhere, "avg_pool") if is_compiling() else _ops.avg_pool
    try:
        output: Tensor = run(
            input, kernel, steps, pads, ceil_mode, count_include_pad, divisor_override
        )
    except Exception:
        refuse_others(input=input)
        raise
    return output


def avg_pool1d(
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """As `torch.nn.functional.avg_pool1d`; keeps nothing."""
    return average(input, 1, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


def avg_pool2d(
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """As `torch.nn.functional.avg_pool2d`; keeps nothing."""
    return average(
        input, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def avg_pool3d(
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """As `torch.nn.functional.avg_pool3d`; keeps nothing."""
    return average(
        input, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def adaptive_average(input: Tensor, dimensions: int, output_size: Any) -> Tensor:
    sizes = (output_size,) * dimensions if type(output_size) is int else output_size
    if is_compiling():
        pool = getattr(_torch, f"adaptive_avg_pool{dimensions}d")
        output: Tensor = pool(input, sizes)
        return output
    try:
        if sizes is None or type(sizes) is not tuple or len(sizes) != dimensions or None in sizes:
            sizes = _sizes(input, dimensions, sizes)
        return _ops.adaptive_avg_pool(input, sizes)
    except Exception:
        refuse_others(input=input)
        raise


def _sizes(input: Tensor, dimensions: int, sizes: Any) -> tuple[int, ...]:
    """One size a dimension; None stands for the input's."""
    sizes = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    if len(sizes) == 1:
        sizes *= dimensions
    if len(sizes) != dimensions or input.dim() <= dimensions:
        raise ValueError(
            f"output_size must have {how_many(dimensions)} and input at least {dimensions + 1} "
            f"dimensions, got {sizes} and the shape {tuple(input.shape)}"
        )
    own = input.shape[-dimensions:]
    return tuple(there if size is None else size for size, there in zip(sizes, own, strict=True))


def adaptive_avg_pool1d(input: Tensor, output_size: Any) -> Tensor:
    """As `torch.nn.functional.adaptive_avg_pool1d`; keeps nothing."""
    return adaptive_average(input, 1, output_size)


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:
    """As `torch.nn.functional.adaptive_avg_pool2d`; keeps nothing.

    Args:
        input: of 3 or 4 dimensions.
        output_size: one number, or one a dimension; None stands for the input's size.
    """
    return adaptive_average(input, 2, output_size)


def adaptive_avg_pool3d(input: Tensor, output_size: Any) -> Tensor:
    """As `torch.nn.functional.adaptive_avg_pool3d`; keeps nothing."""
    return adaptive_average(input, 3, output_size)
