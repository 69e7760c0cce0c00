"""Dropout: one bit per element."""

from __future__ import annotations

import torch
from torch import Tensor

from brim.nn import functional

__all__ = ["Dropout"]


class Dropout(torch.nn.Dropout):
    """`torch.nn.Dropout` that keeps one bit per element; the same result under the same seed.

    Example:
        >>> import torch, brim
        >>> brim.nn.Dropout(p=0.1)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        """The input with some of its elements zeroed and the others scaled up."""
        return functional.dropout(input, self.p, self.training, self.inplace)
