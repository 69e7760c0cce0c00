"""The transposed convolution over three dimensions."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import ConvTranspose3d

__all__ = ["MemSaveConvTranspose3d"]


class MemSaveConvTranspose3d(ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` that keeps its input only where the weight needs a gradient."""

    @classmethod
    def from_nn_ConvTranspose3d(cls, convT3d: torch.nn.ConvTranspose3d) -> MemSaveConvTranspose3d:
        """Make one that shares the parameters of `convT3d`."""
        return adopt(cls, "convT3d", convT3d, torch.nn.ConvTranspose3d)
