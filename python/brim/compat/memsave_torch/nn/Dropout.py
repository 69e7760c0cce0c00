"""Dropout."""

from __future__ import annotations

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import Dropout

__all__ = ["MemSaveDropout"]


class MemSaveDropout(Dropout):
    """`torch.nn.Dropout` that keeps one bit an element."""

    @classmethod
    def from_nn_dropout(cls, dropout: torch.nn.Dropout) -> MemSaveDropout:
        """Make one with the options of `dropout`."""
        return adopt(cls, "dropout", dropout, torch.nn.Dropout)
