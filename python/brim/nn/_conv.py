"""The convolutions of `brim.nn.functional`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from brim import _C
from brim.nn._elsewhere import elsewhere
from brim.nn._numbers import Numbers, each
from brim.nn._tensor_checks import refuse_others

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolve",
    "convolve_transposed",
    "pad",
    "padded",
]

_ops = _C.ops


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    recompute: bool,
) -> Tensor:
    """A convolution with one number a dimension."""
    zeros = (0,) * len(stride)
    run: Any = partial(elsewhere, "conv") if is_compiling() else _ops.conv
    try:
        output: Tensor = run(
            input, weight, bias, stride, padding, dilation, False, zeros, groups, False, recompute
        )
    except Exception:
        refuse_others(optional=("bias",), input=input, weight=weight, bias=bias)
        raise
    return output


def padded(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: str,
    dilation: Sequence[int],
) -> tuple[Tensor, Sequence[int]]:
    """The input and the numbers that torch's words for the padding stand for.

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
    """As `torch.nn.functional.pad`, but no input is kept where backward needs its form only.

    Example:
        >>> pad(torch.tensor([[1.0, 2.0]]), (1, 1), "replicate")
        tensor([[1., 1., 2., 2.]])
    """
    if type(input) is not Tensor or is_compiling() or not input.requires_grad:
        return torch.nn.functional.pad(input, padding, mode)
    output: Tensor = elsewhere("pad", input, padding, mode)
    return output


def _conv(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: str | Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    steps, gaps = each("stride", stride, dimensions), each("dilation", dilation, dimensions)
    if isinstance(padding, str):
        refuse_others(input=input, weight=weight)
        input, pads = padded(input, weight.shape[2:], steps, padding, gaps)
    else:
        pads = each("padding", padding, dimensions)
    return convolve(input, weight, bias, steps, pads, gaps, groups, False)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.nn.functional.conv1d`; keeps the input only where the weight needs a gradient."""
    return _conv(1, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.nn.functional.conv2d`; keeps the input only where the weight needs a gradient.

    Example:
        >>> x, weight = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
        >>> conv2d(x, weight, padding="same").shape
        torch.Size([1, 4, 8, 8])
    """
    return _conv(2, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.nn.functional.conv3d`; keeps the input only where the weight needs a gradient."""
    return _conv(3, input, weight, bias, stride, padding, dilation, groups)


def convolve_transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    recompute: bool,
) -> Tensor:
    run: Any = partial(elsewhere, "conv") if is_compiling() else _ops.conv
    try:
        output: Tensor = run(
            input,
            weight,
            bias,
            stride,
            padding,
            dilation,
            True,
            output_padding,
            groups,
            False,
            recompute,
        )
    except Exception:
        refuse_others(optional=("bias",), input=input, weight=weight, bias=bias)
        raise
    return output


def _conv_transposed(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    output_padding: Numbers,
    groups: int,
    dilation: Numbers,
) -> Tensor:
    return convolve_transposed(
        input,
        weight,
        bias,
        each("stride", stride, dimensions),
        each("padding", padding, dimensions),
        each("output_padding", output_padding, dimensions),
        groups,
        each("dilation", dilation, dimensions),
        False,
    )


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> Tensor:
    """As torch's own; keeps the input only where the weight needs a gradient."""
    return _conv_transposed(
        1, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> Tensor:
    """As torch's own; keeps the input only where the weight needs a gradient."""
    return _conv_transposed(
        2, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> Tensor:
    """As torch's own; keeps the input only where the weight needs a gradient."""
    return _conv_transposed(
        3, input, weight, bias, stride, padding, output_padding, groups, dilation
    )
