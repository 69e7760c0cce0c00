"""The convolution over three dimensions."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import Conv3d

__all__ = ["MemSaveConv3d"]


class MemSaveConv3d(Conv3d):
    """`torch.nn.Conv3d` that keeps its input only where the weight needs a gradient."""

    @classmethod
    def from_nn_Conv3d(cls, conv3d: torch.nn.Conv3d) -> MemSaveConv3d:
        """Make one that shares the parameters of `conv3d`."""
        return adopt(cls, "conv3d", conv3d, torch.nn.Conv3d)
