"""The convolutions of `brim.nn.functional`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from brim.nn._elsewhere import check_arguments, ops, via_dispatcher
from brim.nn._numbers import Numbers, each, over

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]


def padded(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: str,
    dilation: Sequence[int],
) -> tuple[Tensor, Sequence[int]]:
    """The input and the numbers that the padding "same" or "valid" stands for.

    Example:
        >>> x, numbers = padded(torch.zeros(1, 1, 8), (4,), (1,), "same", (1,))
        >>> x.shape, numbers  # one more on the right side
        (torch.Size([1, 1, 9]), (1,))
    """
    if padding == "valid":
        return input, (0,) * len(stride)
    if padding != "same":
        raise ValueError(f"padding must be numbers, 'same' or 'valid', got {padding!r}")
    if any(step != 1 for step in stride):
        raise ValueError(f"padding='same' needs a stride of 1, got {tuple(stride)}")
    totals = [step * (size - 1) for step, size in zip(dilation, kernel_size, strict=True)]
    if any(total % 2 for total in totals):
        right = [number for total in reversed(totals) for number in (0, total % 2)]
        input = torch.nn.functional.pad(input, right)
    return input, tuple(total // 2 for total in totals)


def pad(input: Tensor, padding: Sequence[int], mode: str) -> Tensor:
    """As `torch.nn.functional.pad`, but keeps no input: backward needs only its shape.

    Example:
        >>> pad(torch.tensor([[1.0, 2.0]]), (1, 1), "replicate")
        tensor([[1., 1., 2., 2.]])
    """
    if type(input) is not Tensor or is_compiling() or not input.requires_grad:
        return torch.nn.functional.pad(input, padding, mode)
    return via_dispatcher("pad", input, padding, mode)  # type: ignore[no-any-return]


def conv(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    recompute: bool = False,
    runs_again: bool = False,
) -> Tensor:
    """As `torch.nn.functional.conv`; keeps the input only where the weight needs a gradient."""
    steps, gaps = each("stride", stride, dimensions), each("dilation", dilation, dimensions)
    if isinstance(padding, str):
        check_arguments("conv", input, weight)
        input, pads = padded(input, weight.shape[2:], steps, padding, gaps)
    else:
        pads = each("padding", padding, dimensions)
    window, more = (steps, pads, gaps), (0,) * dimensions
    options = (False, more, groups, None, recompute, runs_again)
    return ops().conv(input, weight, bias, *window, *options)


def conv_transpose(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    *,
    recompute: bool = False,
    runs_again: bool = False,
) -> Tensor:
    """As `torch.nn.functional.conv_transpose`; keeps the input only for the weight's gradient."""
    steps, gaps = each("stride", stride, dimensions), each("dilation", dilation, dimensions)
    pads = each("padding", padding, dimensions)
    window, more = (steps, pads, gaps), each("output_padding", output_padding, dimensions)
    options = (True, more, groups, None, recompute, runs_again)
    return ops().conv(input, weight, bias, *window, *options)


_EXAMPLE = "torch.ones(1, 2, 8…), torch.ones(4, 2, 3…)", "1, 4, 6…"
conv1d, conv2d, conv3d = over(conv, _EXAMPLE)
_EXAMPLE = "torch.ones(1, 2, 8…), torch.ones(2, 4, 2…), stride=2", "1, 4, 16…"
conv_transpose1d, conv_transpose2d, conv_transpose3d = over(conv_transpose, _EXAMPLE)
