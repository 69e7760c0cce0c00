"""Batch normalisation of images."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import BatchNorm2d

__all__ = ["MemSaveBatchNorm2d"]


class MemSaveBatchNorm2d(BatchNorm2d):
    """`torch.nn.BatchNorm2d` that keeps nothing in eval() with a frozen weight."""

    @classmethod
    def from_nn_BatchNorm2d(cls, bn2d: torch.nn.BatchNorm2d) -> MemSaveBatchNorm2d:
        """Make one with the options and the tensors of `bn2d`."""
        return adopt(cls, "bn2d", bn2d, torch.nn.BatchNorm2d)
