"""The rectifier."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import ReLU

__all__ = ["MemSaveReLU"]


class MemSaveReLU(ReLU):
    """`torch.nn.ReLU` that keeps one bit an element, or nothing."""

    @classmethod
    def from_nn_ReLU(cls, relu: torch.nn.ReLU) -> MemSaveReLU:
        """Make one with the options of `relu`."""
        return adopt(cls, "relu", relu, torch.nn.ReLU)
