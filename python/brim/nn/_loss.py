"""Losses of `brim.nn.functional`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional
from torch import Tensor

from brim.nn._elsewhere import ops

__all__ = ["cross_entropy"]

_reduction: Any = torch.nn.functional._Reduction  # type: ignore[attr-defined]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `torch.nn.functional.cross_entropy`; keeps the logits and not their log-softmax.

    Raises:
        ValueError: if reduction is unknown.

    Example:
        >>> import torch
        >>> logits = torch.zeros(3, 5, requires_grad=True)
        >>> cross_entropy(logits, torch.tensor([0, 4, -100])).grad_fn.name()
        'brim::cross_entropy_backward'
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return _cross_entropy(
        input, target, weight, ignore_index, reduction, label_smoothing, False, False
    )


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    in_float32: bool,
    recompute: bool,
) -> Tensor:
    """The same; as for `input.float()`, and with the layer that made the logits run again."""
    how = _reduction.get_enum(reduction)
    return ops().cross_entropy(
        input, target, weight, how, ignore_index, label_smoothing, in_float32, recompute
    )
