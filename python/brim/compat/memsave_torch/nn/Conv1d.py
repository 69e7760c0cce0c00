"""The convolution over one dimension."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import Conv1d

__all__ = ["MemSaveConv1d"]


class MemSaveConv1d(Conv1d):
    """`torch.nn.Conv1d` that keeps its input only where the weight needs a gradient."""

    @classmethod
    def from_nn_Conv1d(cls, conv1d: torch.nn.Conv1d) -> MemSaveConv1d:
        """Make one that shares the parameters of `conv1d`."""
        return adopt(cls, "conv1d", conv1d, torch.nn.Conv1d)
