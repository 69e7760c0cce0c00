"""The convolution over two dimensions."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import Conv2d

__all__ = ["MemSaveConv2d"]


class MemSaveConv2d(Conv2d):
    """`torch.nn.Conv2d` that keeps its input only where the weight needs a gradient."""

    @classmethod
    def from_nn_Conv2d(cls, conv2d: torch.nn.Conv2d) -> MemSaveConv2d:
        """Make one that shares the parameters of `conv2d`."""
        return adopt(cls, "conv2d", conv2d, torch.nn.Conv2d)
