"""The largest value of each window, as a function."""

from __future__ import annotations

from torch import Tensor

from brim.nn import functional
from brim.nn.functional import Numbers

__all__ = ["maxpool2dMemSave"]


def maxpool2dMemSave(
    input: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `torch.nn.functional.max_pool2d`; keeps one byte an output."""
    result: Tensor | tuple[Tensor, Tensor] = functional.max_pool2d(
        input, kernel_size, stride, padding, dilation, ceil_mode, return_indices
    )
    return result
