"""Pooling: one byte an output for the maximum, nothing for averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.nn._pool import adaptive_average, average, maximum

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


class MaxPool1d(torch.nn.MaxPool1d):
    """`torch.nn.MaxPool1d` that keeps one byte an output: the place in the window."""

    def forward(self, input: Tensor) -> Any:
        """The maxima, with `return_indices` a tuple of these and their indices."""
        return maximum(
            input,
            1,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
        )


class MaxPool2d(torch.nn.MaxPool2d):
    """`torch.nn.MaxPool2d` that keeps one byte an output: the place in the window.

    Example:
        >>> import torch, brim
        >>> brim.nn.MaxPool2d(2)(torch.arange(16.0).reshape(1, 4, 4))
        tensor([[[ 5.,  7.],
                 [13., 15.]]])
    """

    def forward(self, input: Tensor) -> Any:
        """The maxima, with `return_indices` a tuple of these and their indices."""
        return maximum(
            input,
            2,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
        )


class MaxPool3d(torch.nn.MaxPool3d):
    """`torch.nn.MaxPool3d` that keeps one byte an output: the place in the window."""

    def forward(self, input: Tensor) -> Any:
        """The maxima, with `return_indices` a tuple of these and their indices."""
        return maximum(
            input,
            3,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
        )


class AvgPool1d(torch.nn.AvgPool1d):
    """`torch.nn.AvgPool1d` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """The means."""
        return average(
            input,
            1,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            None,
        )


class AvgPool2d(torch.nn.AvgPool2d):
    """`torch.nn.AvgPool2d` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """The means."""
        return average(
            input,
            2,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class AvgPool3d(torch.nn.AvgPool3d):
    """`torch.nn.AvgPool3d` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """The means."""
        return average(
            input,
            3,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class AdaptiveAvgPool1d(torch.nn.AdaptiveAvgPool1d):
    """`torch.nn.AdaptiveAvgPool1d` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """The means over as many parts as the output has elements."""
        return adaptive_average(input, 1, self.output_size)


class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d):
    """`torch.nn.AdaptiveAvgPool2d` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """The means over as many parts as the output has elements."""
        return adaptive_average(input, 2, self.output_size)


class AdaptiveAvgPool3d(torch.nn.AdaptiveAvgPool3d):
    """`torch.nn.AdaptiveAvgPool3d` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """The means over as many parts as the output has elements."""
        return adaptive_average(input, 3, self.output_size)
