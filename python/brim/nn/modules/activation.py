"""Activations: one bit an element, or nothing where the next layer keeps the output."""

from __future__ import annotations

import torch
from torch import Tensor

from brim.nn import functional

__all__ = ["GELU", "Hardtanh", "LeakyReLU", "ReLU", "ReLU6", "SiLU"]


class ReLU(torch.nn.ReLU):
    """`torch.nn.ReLU` that keeps one bit an element, or nothing where the next layer keeps it.

    Attributes:
        recompute: keep nothing where the layer before can give its output again in backward.
    """

    recompute: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """The rectified input."""
        return functional._gate(input, functional._RELU, 0.0, 0.0, self.inplace, self.recompute)


class Hardtanh(torch.nn.Hardtanh):
    """`torch.nn.Hardtanh` that keeps one bit an element, or nothing.

    Attributes:
        recompute: as of `ReLU`.
    """

    recompute: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """The input held between two bounds."""
        return functional._hardtanh(input, self.min_val, self.max_val, self.inplace, self.recompute)


class ReLU6(torch.nn.ReLU6):
    """`torch.nn.ReLU6` that keeps one bit an element, or nothing.

    Attributes:
        recompute: as of `ReLU`.
    """

    recompute: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """The input held between two bounds, 0 and 6."""
        return functional._hardtanh(input, self.min_val, self.max_val, self.inplace, self.recompute)


class LeakyReLU(torch.nn.LeakyReLU):
    """`torch.nn.LeakyReLU` that keeps one bit an element, or nothing.

    Attributes:
        recompute: as of `ReLU`.
    """

    recompute: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """The input, with another slope below zero."""
        return functional._gate(
            input,
            functional._LEAKY_RELU,
            self.negative_slope,
            0.0,
            self.inplace,
            self.recompute,
        )


class GELU(torch.nn.GELU):
    """`torch.nn.GELU`; keeps its input, and can give its output again for `recompute`."""

    def forward(self, input: Tensor) -> Tensor:
        """The input times the share of a normal distribution below it."""
        return functional.gelu(input, self.approximate)


class SiLU(torch.nn.SiLU):
    """`torch.nn.SiLU`; keeps its input, and can give its output again for `recompute`."""

    def forward(self, input: Tensor) -> Tensor:
        """The input times its sigmoid."""
        return functional.silu(input, self.inplace)
