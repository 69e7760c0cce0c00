"""Results whose shape depends on values: the largest that they may have stand for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.where(mask, x, x).numel())


def _unique(
    x: torch.Tensor, _: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[torch.Tensor, ...]:
    places = x.new_empty(x.shape if inverse or counts else 0, dtype=torch.int64)
    return x.new_empty(x.numel()), places, places.new_empty(x.numel() if counts else 0)


def _unique_consecutive(
    x: torch.Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[torch.Tensor, ...]:
    if dim is not None:
        return _unique_dim(x, dim, True, inverse, counts)
    return _unique(x, True, inverse, counts)


def _unique_dim(
    x: torch.Tensor, dim: int, _: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[torch.Tensor, ...]:
    size = x.size(dim)
    return (
        torch.empty_like(x),
        x.new_empty(size if inverse else 0, dtype=torch.int64),
        x.new_empty(size if counts else 0, dtype=torch.int64),
    )


def _ctc_loss(
    scores: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, ...]:
    steps, batch = (*scores.shape[:2],) if scores.dim() == 3 else (scores.size(0), 1)
    places = 2 * targets.size(-1) + 1
    return scores.new_empty(batch), scores.new_empty(batch, steps, places)


LARGEST: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: _ctc_loss,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_dim,
}


def by_numbers(x: object, indices: Sequence[Any]) -> Callable[..., Any] | None:
    """What torch's kernel makes of an index with masks: one with numbers. None without masks."""
    if not any(index is not None and index.dtype in _MASKS and index.dim() for index in indices):
        return None

    def run(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
        numbers: list[torch.Tensor | None] = []
        for index in indices:
            is_mask = index is not None and index.dtype in _MASKS
            numbers += index.nonzero().unbind(1) if index is not None and is_mask else [index]
        return aten.index.Tensor(x, numbers)

    return run


def grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of `aten._grouped_mm`: torch's fake kernel takes bfloat16 only, CUDA's takes all.

    Rows of a, or columns of b, belong to groups where that one has two dimensions.
    """
    shape = [*a.shape[-2:-1], *b.shape[-1:]]
    if a.dim() == b.dim():  # a matrix for each group
        groups = offsets.size(0) if offsets is not None and a.dim() == 2 else a.size(0)
        shape.insert(0, groups)
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
