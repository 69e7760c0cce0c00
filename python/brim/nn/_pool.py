"""The pooling of `brim.nn.functional`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from brim.nn._elsewhere import check_arguments, ops
from brim.nn._numbers import Numbers, each, how_many, over

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
]


def max_pool(
    dimensions: int,
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As `torch.nn.functional.max_pool`; keeps one byte per output.

    Returns:
        The maxima; with `return_indices` a tuple of these and their indices.
    """
    kernel = each("kernel_size", kernel_size, dimensions)
    steps = _steps(stride, kernel, dimensions)
    pads, gaps = each("padding", padding, dimensions), each("dilation", dilation, dimensions)
    run = ops().max_pool_with_indices if return_indices else ops().max_pool
    return run(input, kernel, steps, pads, gaps, ceil_mode)


_EXAMPLE = "torch.ones(1, 2, 8…), 2", "1, 2, 4…"
max_pool1d, max_pool2d, max_pool3d = over(max_pool, _EXAMPLE)


def avg_pool(
    dimensions: int,
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """As `torch.nn.functional.avg_pool`; keeps nothing."""
    kernel = each("kernel_size", kernel_size, dimensions)
    steps = _steps(stride, kernel, dimensions)
    pads = each("padding", padding, dimensions)
    return ops().avg_pool(
        input, kernel, steps, pads, ceil_mode, count_include_pad, divisor_override
    )


def avg_pool1d(
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """As `torch.nn.functional.avg_pool1d`; keeps nothing.

    Example:
        >>> import torch
        >>> avg_pool1d(torch.arange(4.0).reshape(1, 4), 2)
        tensor([[0.5000, 2.5000]])
    """
    return avg_pool(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad)


_, avg_pool2d, avg_pool3d = over(avg_pool, _EXAMPLE)


def _steps(stride: Numbers | None, kernel: Sequence[int], dimensions: int) -> Sequence[int]:
    """The stride; without one the size of the window, which torch's modules pass on as `[]`."""
    if stride is None or (type(stride) in (list, tuple) and not stride):
        return kernel
    return each("stride", stride, dimensions)


def adaptive_avg_pool(dimensions: int, input: Tensor, output_size: Any) -> Tensor:
    """As `torch.nn.functional.adaptive_avg_pool`; keeps nothing.

    `output_size` is one number, or one per dimension; None stands for the input's size.
    """
    sizes = (output_size,) * dimensions if type(output_size) is int else output_size
    if type(sizes) is not tuple or len(sizes) != dimensions or None in sizes:
        check_arguments("adaptive_avg_pool", input)
        sizes = _sizes(input, dimensions, sizes)
    return ops().adaptive_avg_pool(input, sizes)


_EXAMPLE = "torch.ones(1, 2, 8…), 1", "1, 2, 1…"
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = over(adaptive_avg_pool, _EXAMPLE)


def _sizes(input: Tensor, dimensions: int, sizes: Any) -> tuple[int, ...]:
    """One size per dimension; None stands for the input's."""
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
