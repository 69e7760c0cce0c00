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
from brim.data.parts import Work, work_column
from brim.data.sizes import Budget, Sizes, index_tensor, size_function


class PackedBatchSampler(FittedBatchSampler):
    """Batches that are as full as possible, inside windows of samples.

    Padded samples (`cost="padded"`, the default) are put together with those of like size; under
    `cost="sum"` it is best fit decreasing.

    Without `seed` and `generator` the seed is 0, and each iteration is the next epoch. Shuffled,
    the samples are put into random order before packing, and the batches of a window after it. With
    `cost="sum"` most samples are then taken in that order, so a batch mixes all sizes.

    With several ranks, `work` evens out what the batches of a step have to do: by default that is
    taken to be the budget's cost, and long documents cost more per token.

    Args:
        sizes: the size of each sample, as a tensor, an array or a list, which is kept and not
            copied; with `indices` also a callable or mapping from index to size.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`.
        window: how many samples are packed together. A sample comes with its window or with the
            next. None packs all at once, which fills slightly better but delays the first batch and
            resuming.
        indices: the samples to batch; all if None. A function of the epoch gives other samples in
            each, such as draws with weights; it must give all ranks the same.
        work: what the batches of one step have equally much of, with `cost="sum"`: one number per
            sample, `"flops"` (that of a transformer: `flops(sizes)`), or a function of the sizes
            that returns such numbers.
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
        work: Work | None = None,
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
        if function is not None and self._index_given:
            raise TypeError("index needs the sizes as a tensor, an array or a list, not a function")
        if function is None:
            self._columns = self._limits.columns(sizes)
        elif self._order is None:
            raise ValueError(
                "sizes is a callable: indices must say which samples there are, as an iterable"
            )
        else:
            self._columns = self._limits.columns_of(function, self._order)
        self._place_index(sizes)
        self._work = None if work is None else work_column(work, self._columns[0])
        self._tell_of_left_out()

    def _make(self) -> _C.SampleBatching:
        order = self._order
        if self._draw is not None:
            order = index_tensor("indices", self._draw(self.epoch))
        sizes = (self._columns, self._limits.costs, self._limits.maxima)
        options = (self.window, self._oversize, self.batch_multiple)
        index = self._open_index(self._columns[0])
        return _C.packed_batching(*sizes, order, self.shuffle, *options, index, work=self._work)

    def _epochs_kept(self) -> tuple[_C.SampleIndex | None, str]:
        is_drawn = self._draw is not None or self._work is not None  # of what a file does not know
        return (None, "") if is_drawn else super()._epochs_kept()

    def _enter(self, epoch: int) -> None:
        super()._enter(epoch)
        self._batching = self._batching if self._draw is None else None

    def _forget(self) -> None:
        super()._forget()
        self._batching = self._batching if self._draw is None else None

    def _settings(self) -> dict[str, Any]:
        settings = {**super()._settings(), "window": self.window}
        # A state that was saved without work is as it was.
        return settings if self._work is None else settings | {"work": _C.fingerprint(self._work)}

    def _epoch_decides(self) -> bool:
        return super()._epoch_decides() or self._draw is not None

    def _data_tensors(self) -> list[torch.Tensor]:
        return [*self._columns, *([] if self._order is None else [self._order])]

    @classmethod
    def _of_sizes(
        cls, sizes: torch.Tensor, maximum: int, options: dict[str, Any], *, trial: bool
    ) -> Self:
        return cls(sizes, maximum, **options)
