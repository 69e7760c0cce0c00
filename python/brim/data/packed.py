"""Samples packed into batches as tightly as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from typing_extensions import Self, Unpack

from brim import _C
from brim._arguments import whole
from brim.data.base import SamplerOptions
from brim.data.fit import FittedBatchSampler
from brim.data.sizes import Budget, Sizes, index_tensor, size_function


class PackedBatchSampler(FittedBatchSampler):
    """Batches that are as full as possible, inside windows of samples.

    Padded samples (`cost="padded"`, the default) are put together with those of like size; under
    `cost="sum"` it is best fit decreasing.

    Without `seed` and `generator` the seed is 0, and each iteration is the next epoch. Shuffled,
    the samples are put into random order before packing, and the batches of a window after it. With
    `cost="sum"` most samples are then taken in that order, so a batch mixes all sizes.

    Args:
        sizes: the size of each sample, as a tensor, an array or a list, which is kept and not
            copied; with `indices` also a callable or mapping from index to size.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`.
        window: how many samples are packed together. A sample comes with its window or with the
            next. None packs all at once, which fills slightly better but delays the first batch and
            resuming.
        indices: the samples to batch; all if None. A function of the epoch gives other samples in
            each, such as draws with weights; it must give all ranks the same.
        **options: the keywords of all samplers; see `BatchSamplerBase`.

    Example:
        >>> sampler = PackedBatchSampler([6, 4, 5, 5, 3, 7], max_total_size=10, cost="sum")
        >>> list(sampler)
        [[5, 4], [0, 1], [2, 3]]
    """

    _default_seed = 0
    _columns: list[torch.Tensor]

    def __init__(
        self,
        sizes: Sizes | Callable[[int], Any] | Mapping[int, Any],
        max_total_size: Budget,
        *,
        window: int | None = 10_000,
        indices: Iterable[int] | Callable[[int], Iterable[int]] | None = None,
        **options: Unpack[SamplerOptions],
    ) -> None:
        super().__init__(max_total_size, **options)
        self.sizes = sizes
        self.window = None if window is None else whole("window", window, 1)
        self._draw = indices if callable(indices) else None
        self._order = None
        if indices is not None and not callable(indices):
            self._order = index_tensor("indices", indices)
        function = size_function(sizes)
        if function is None:
            self._columns = self._limits.columns(sizes)
        elif self._order is None:
            raise ValueError(
                "sizes is a callable: indices must say which samples there are, as an iterable"
            )
        else:
            self._columns = self._limits.columns_of(function, self._order)
        self._tell_of_left_out()

    def _make(self) -> _C.SampleBatching:
        order = self._order
        if self._draw is not None:
            order = index_tensor("indices", self._draw(self.epoch))
        sizes = (self._columns, self._limits.costs, self._limits.maxima)
        options = (self.window, self._oversize, self.batch_multiple)
        return _C.packed_batching(*sizes, order, self.shuffle, *options)

    def _enter(self, epoch: int) -> None:
        super()._enter(epoch)
        self._batching = self._batching if self._draw is None else None

    def _forget(self) -> None:
        super()._forget()
        self._batching = self._batching if self._draw is None else None

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "window": self.window}

    def _epoch_decides(self) -> bool:
        return super()._epoch_decides() or self._draw is not None

    def _data_tensors(self) -> list[torch.Tensor]:
        return [*self._columns, *([] if self._order is None else [self._order])]

    @classmethod
    def _of_sizes(
        cls, sizes: torch.Tensor, maximum: int, options: dict[str, Any], *, trial: bool
    ) -> Self:
        return cls(sizes, maximum, **options)
