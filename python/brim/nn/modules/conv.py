"""Convolutions: the input is kept only where the weight needs a gradient.

With the attribute `recompute`, not even there if the layer before can recompute it in backward.
With `runs_again`, a convolution whose output is larger than its input runs again in backward for
the next layer, which then does not keep the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.nn._conv import pad, padded
from brim.nn._elsewhere import ops
from brim.nn._numbers import layer

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

# `self: Any`: the options are those of torch.nn's classes.


class _Conv:
    recompute: bool = False
    runs_again: bool = False
    _example = "2, 4, kernel_size=3", "1, 2, 8…", "1, 4, 6…"

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        stride, padding, dilation = self.stride, self.padding, self.dilation
        zeros = (0,) * len(stride)
        if self.padding_mode != "zeros":
            input = pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
            padding = zeros
        elif isinstance(padding, str):
            input, padding = padded(input, self.kernel_size, stride, padding, dilation)
        groups, asks, again = self.groups, self.recompute, self.runs_again
        return ops().conv(
            input, weight, bias, stride, padding, dilation, False, zeros, groups, None, asks, again
        )


@layer
class Conv1d(_Conv, torch.nn.Conv1d):
    """`torch.nn.Conv1d` that keeps its input only where the weight needs a gradient."""


@layer
class Conv2d(_Conv, torch.nn.Conv2d):
    """`torch.nn.Conv2d` that keeps its input only where the weight needs a gradient."""


@layer
class Conv3d(_Conv, torch.nn.Conv3d):
    """`torch.nn.Conv3d` that keeps its input only where the weight needs a gradient."""


class _ConvTranspose:
    recompute: bool = False
    runs_again: bool = False
    _example = "2, 4, kernel_size=3", "1, 2, 8…", "1, 4, 10…"

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution; `output_size` chooses among the possible sizes."""
        stride, padding, dilation = self.stride, self.padding, self.dilation
        output_padding = self.output_padding
        if output_size is not None:
            sizes = (self.kernel_size, self._dimensions, dilation)
            output_padding = self._output_padding(input, output_size, stride, padding, *sizes)
        window = (stride, padding, dilation)
        options = (True, output_padding, self.groups, None, self.recompute, self.runs_again)
        return ops().conv(input, self.weight, self.bias, *window, *options)


@layer
class ConvTranspose1d(_ConvTranspose, torch.nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` that keeps its input only where the weight needs a gradient."""


@layer
class ConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` that keeps its input only where the weight needs a gradient."""


@layer
class ConvTranspose3d(_ConvTranspose, torch.nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` that keeps its input only where the weight needs a gradient."""
