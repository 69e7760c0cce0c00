"""The transposed convolution over one dimension."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import ConvTranspose1d

__all__ = ["MemSaveConvTranspose1d"]


class MemSaveConvTranspose1d(ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` that keeps its input only where the weight needs a gradient."""

    @classmethod
    def from_nn_ConvTranspose1d(cls, convT1d: torch.nn.ConvTranspose1d) -> MemSaveConvTranspose1d:
        """Make one that shares the parameters of `convT1d`."""
        return adopt(cls, "convT1d", convT1d, torch.nn.ConvTranspose1d)
