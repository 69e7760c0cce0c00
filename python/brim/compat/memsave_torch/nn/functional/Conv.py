"""Convolutions as functions."""

from __future__ import annotations

from torch import Tensor

from brim.nn import functional
from brim.nn.functional import Numbers

__all__ = ["conv1dMemSave", "conv2dMemSave", "conv3dMemSave", "convMemSave"]


def conv1dMemSave(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: str | Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    """As `torch.nn.functional.conv1d`; keeps the input only where the weight needs a gradient."""
    return functional.conv1d(input, weight, bias, stride, padding, dilation, groups)


def conv2dMemSave(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: str | Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    """As `torch.nn.functional.conv2d`; keeps the input only where the weight needs a gradient."""
    return functional.conv2d(input, weight, bias, stride, padding, dilation, groups)


def conv3dMemSave(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: str | Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    """As `torch.nn.functional.conv3d`; keeps the input only where the weight needs a gradient."""
    return functional.conv3d(input, weight, bias, stride, padding, dilation, groups)


def convMemSave(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    groups: int,
    transposed: bool,
    output_padding: Numbers,
) -> Tensor:
    """A convolution over as many dimensions as the weight has, transposed or not.

    Raises:
        ValueError: if the weight has neither one, two nor three dimensions to convolve over.

    Example:
        >>> import torch
        >>> x, weight = torch.ones(1, 2, 4), torch.ones(2, 3, 3)
        >>> convMemSave(x, weight, None, [2], [0], [1], 1, True, [1]).shape
        torch.Size([1, 3, 10])
    """
    dimensions = weight.dim() - 2
    if dimensions not in (1, 2, 3):
        raise ValueError(f"weight must have 3, 4 or 5 dimensions, got {weight.dim()}")
    if transposed:
        run = (
            functional.conv_transpose1d,
            functional.conv_transpose2d,
            functional.conv_transpose3d,
        )[dimensions - 1]
        return run(input, weight, bias, stride, padding, output_padding, groups, dilation)
    plain = (functional.conv1d, functional.conv2d, functional.conv3d)[dimensions - 1]
    return plain(input, weight, bias, stride, padding, dilation, groups)
