"""Dropout as a function."""

from __future__ import annotations

from torch import Tensor

from brim.nn import functional

__all__ = ["dropoutMemSave"]


def dropoutMemSave(x: Tensor, p: float, training: bool) -> Tensor:
    """As `torch.nn.functional.dropout`; keeps one bit an element."""
    return functional.dropout(x, p, training)
