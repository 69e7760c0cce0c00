"""Batch normalisation as a function."""

from __future__ import annotations

from torch import Tensor

from brim.nn import functional

__all__ = ["batch_normMemSave"]


def batch_normMemSave(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-05,
) -> Tensor:
    """As `torch.nn.functional.batch_norm`."""
    return functional.batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )
