"""The transposed convolution over two dimensions."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import ConvTranspose2d

__all__ = ["MemSaveConvTranspose2d"]


class MemSaveConvTranspose2d(ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` that keeps its input only where the weight needs a gradient."""

    @classmethod
    def from_nn_ConvTranspose2d(cls, convT2d: torch.nn.ConvTranspose2d) -> MemSaveConvTranspose2d:
        """Make one that shares the parameters of `convT2d`."""
        return adopt(cls, "convT2d", convT2d, torch.nn.ConvTranspose2d)
