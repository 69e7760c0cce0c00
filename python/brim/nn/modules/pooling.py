"""Pooling: one byte per output for the maximum, nothing for averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.nn._numbers import layer
from brim.nn._pool import adaptive_avg_pool, avg_pool, max_pool

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
]

# `self: Any`: the options are those of torch.nn's classes.


class _MaxPool:
    _example = "2", "1, 2, 8…", "1, 2, 4…"

    def forward(self: Any, input: Tensor) -> Any:
        """The maxima, with `return_indices` a tuple of these and their indices."""
        return max_pool(
            self._dimensions,
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
        )


@layer
class MaxPool1d(_MaxPool, torch.nn.MaxPool1d):
    """`torch.nn.MaxPool1d` that keeps one byte per output: the place in the window."""


@layer
class MaxPool2d(_MaxPool, torch.nn.MaxPool2d):
    """`torch.nn.MaxPool2d` that keeps one byte per output: the place in the window."""


@layer
class MaxPool3d(_MaxPool, torch.nn.MaxPool3d):
    """`torch.nn.MaxPool3d` that keeps one byte per output: the place in the window."""


class _AvgPool:
    _example = "2", "1, 2, 8…", "1, 2, 4…"

    def forward(self: Any, input: Tensor) -> Tensor:
        """The means."""
        return avg_pool(
            self._dimensions,
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            None if self._dimensions == 1 else self.divisor_override,
        )


@layer
class AvgPool1d(_AvgPool, torch.nn.AvgPool1d):
    """`torch.nn.AvgPool1d` that keeps nothing."""


@layer
class AvgPool2d(_AvgPool, torch.nn.AvgPool2d):
    """`torch.nn.AvgPool2d` that keeps nothing."""


@layer
class AvgPool3d(_AvgPool, torch.nn.AvgPool3d):
    """`torch.nn.AvgPool3d` that keeps nothing."""


class _AdaptiveAvgPool:
    _example = "1", "1, 2, 8…", "1, 2, 1…"

    def forward(self: Any, input: Tensor) -> Tensor:
        """The means over as many parts as the output has elements."""
        return adaptive_avg_pool(self._dimensions, input, self.output_size)


@layer
class AdaptiveAvgPool1d(_AdaptiveAvgPool, torch.nn.AdaptiveAvgPool1d):
    """`torch.nn.AdaptiveAvgPool1d` that keeps nothing."""


@layer
class AdaptiveAvgPool2d(_AdaptiveAvgPool, torch.nn.AdaptiveAvgPool2d):
    """`torch.nn.AdaptiveAvgPool2d` that keeps nothing."""


@layer
class AdaptiveAvgPool3d(_AdaptiveAvgPool, torch.nn.AdaptiveAvgPool3d):
    """`torch.nn.AdaptiveAvgPool3d` that keeps nothing."""
