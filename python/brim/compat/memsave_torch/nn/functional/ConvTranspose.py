"""Transposed convolutions as functions."""

from __future__ import annotations

from torch import Tensor

from brim.nn import functional
from brim.nn.functional import Numbers

__all__ = ["conv_transpose1dMemSave", "conv_transpose2dMemSave", "conv_transpose3dMemSave"]


def conv_transpose1dMemSave(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    output_padding: Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    """As `torch.nn.functional.conv_transpose1d`, with the dilation before the groups."""
    return functional.conv_transpose1d(
        input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose2dMemSave(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    output_padding: Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    """As `torch.nn.functional.conv_transpose2d`, with the dilation before the groups."""
    return functional.conv_transpose2d(
        input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose3dMemSave(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    output_padding: Numbers,
    dilation: Numbers,
    groups: int,
) -> Tensor:
    """As `torch.nn.functional.conv_transpose3d`, with the dilation before the groups."""
    return functional.conv_transpose3d(
        input, weight, bias, stride, padding, output_padding, groups, dilation
    )
