"""Pooling: one byte per output for the maximum, nothing for averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


# The forward functions of the classes below. `Any`: the options are those of torch.nn's classes.
def _max_forward(self: Any, input: Tensor) -> Any:
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


def _avg_forward(self: Any, input: Tensor) -> Tensor:
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


def _adaptive_forward(self: Any, input: Tensor) -> Tensor:
    """The means over as many parts as the output has elements."""
    return adaptive_avg_pool(self._dimensions, input, self.output_size)


class MaxPool1d(torch.nn.MaxPool1d):
    """`torch.nn.MaxPool1d` that keeps one byte per output: the place in the window.

    Example:
        >>> import torch, brim
        >>> brim.nn.MaxPool1d(2)(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 4])
    """

    _dimensions = 1
    forward = _max_forward


class MaxPool2d(torch.nn.MaxPool2d):
    """`torch.nn.MaxPool2d` that keeps one byte per output: the place in the window.

    Example:
        >>> import torch, brim
        >>> brim.nn.MaxPool2d(2)(torch.arange(16.0).reshape(1, 4, 4))
        tensor([[[ 5.,  7.],
                 [13., 15.]]])
    """

    _dimensions = 2
    forward = _max_forward


class MaxPool3d(torch.nn.MaxPool3d):
    """`torch.nn.MaxPool3d` that keeps one byte per output: the place in the window.

    Example:
        >>> import torch, brim
        >>> brim.nn.MaxPool3d(2)(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 2, 4, 4, 4])
    """

    _dimensions = 3
    forward = _max_forward


class AvgPool1d(torch.nn.AvgPool1d):
    """`torch.nn.AvgPool1d` that keeps nothing.

    Example:
        >>> import torch, brim
        >>> brim.nn.AvgPool1d(2)(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 4])
    """

    _dimensions = 1
    forward = _avg_forward


class AvgPool2d(torch.nn.AvgPool2d):
    """`torch.nn.AvgPool2d` that keeps nothing.

    Example:
        >>> import torch, brim
        >>> brim.nn.AvgPool2d(2)(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 4, 4])
    """

    _dimensions = 2
    forward = _avg_forward


class AvgPool3d(torch.nn.AvgPool3d):
    """`torch.nn.AvgPool3d` that keeps nothing.

    Example:
        >>> import torch, brim
        >>> brim.nn.AvgPool3d(2)(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 2, 4, 4, 4])
    """

    _dimensions = 3
    forward = _avg_forward


class AdaptiveAvgPool1d(torch.nn.AdaptiveAvgPool1d):
    """`torch.nn.AdaptiveAvgPool1d` that keeps nothing.

    Example:
        >>> import torch, brim
        >>> brim.nn.AdaptiveAvgPool1d(1)(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 1])
    """

    _dimensions = 1
    forward = _adaptive_forward


class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d):
    """`torch.nn.AdaptiveAvgPool2d` that keeps nothing.

    Example:
        >>> import torch, brim
        >>> brim.nn.AdaptiveAvgPool2d(1)(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 1, 1])
    """

    _dimensions = 2
    forward = _adaptive_forward


class AdaptiveAvgPool3d(torch.nn.AdaptiveAvgPool3d):
    """`torch.nn.AdaptiveAvgPool3d` that keeps nothing.

    Example:
        >>> import torch, brim
        >>> brim.nn.AdaptiveAvgPool3d(1)(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 2, 1, 1, 1])
    """

    _dimensions = 3
    forward = _adaptive_forward
