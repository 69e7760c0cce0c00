"""The linear layer as a function."""

from __future__ import annotations

from torch import Tensor

from brim.nn import functional

__all__ = ["linearMemSave"]


def linearMemSave(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`; keeps the input only where the weight needs a gradient."""
    return functional.linear(x, weight, bias)
