"""The largest value of each window."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import MaxPool2d

__all__ = ["MemSaveMaxPool2d"]


class MemSaveMaxPool2d(MaxPool2d):
    """`torch.nn.MaxPool2d` that keeps one byte an output."""

    @classmethod
    def from_nn_MaxPool2d(cls, maxpool2d: torch.nn.MaxPool2d) -> MemSaveMaxPool2d:
        """Make one with the options of `maxpool2d`."""
        return adopt(cls, "maxpool2d", maxpool2d, torch.nn.MaxPool2d)
