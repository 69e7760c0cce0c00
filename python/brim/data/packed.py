"""Samples packed into batches as tightly as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from brim import _C
from brim._arguments import whole
from brim.data.base import BatchSamplerBase, warn_of_left_out
from brim.data.fit import fit_sampler
from brim.data.sizes import (
    Budget,
    Cost,
    Limits,
    Sizes,
    index_tensor,
    oversize_is_error,
    size_function,
    sizes_of,
)


class PackedBatchSampler(BatchSamplerBase):
    """Batches that are as full as possible: best fit decreasing, inside windows of samples.

    For `batch_sampler=` of a DataLoader. Each iteration is independent of others that are still
    running.

    Args:
        sizes: the size of each sample, as a tensor, an array or a list, kept and not copied; with
            `indices` also a callable or mapping that gives the size of an index.
        max_total_size: the budget of a batch. Several budgets at once as a list or tuple; sizes
            then have as many columns (or are tuples).
        cost: what a batch costs: `"sum"` of sizes, `"padded"` (n × longest), `"padded_squared"`
            (n × longest²), `"count"`, or a fitted `MemoryModel`, with a budget in bytes.
        window: how many samples are packed together; a sample comes with its window or with the
            next. None packs all at once, which fills a little better, but takes its time before the
            first batch and before resuming.
        shuffle: put the samples into a random order before, and the batches of a window after.
            With `cost="sum"` most samples then come as they are drawn, of all sizes.
        seed: decides the order, together with the epoch. Where None, and there is no `generator`,
            it is 0, and each iteration is the epoch after the one before.
        generator: draws a seed for each epoch, in place of `seed`.
        rank: which of the ranks this is.
        world_size: how many ranks share the samples. All get the same number of batches.
        oversize: what to do with a sample that exceeds the budget by itself: `"leave_out"` (with
            a warning, and counted in `report()`) or `"error"`.
        as_tensors: give batches as int64 tensors, which is faster than lists.
        indices: the samples to batch, where not all.

    Example:
        >>> sampler = PackedBatchSampler([6, 4, 5, 5, 3, 7], max_total_size=10)
        >>> list(sampler)
        [[5, 4], [0, 1], [2, 3]]
    """

    def __init__(
        self,
        sizes: Sizes | Callable[[int], Any] | Mapping[int, Any],
        max_total_size: Budget,
        *,
        cost: Cost | Sequence[Cost] = "sum",
        window: int | None = 10_000,
        shuffle: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        rank: int = 0,
        world_size: int = 1,
        oversize: str = "leave_out",
        as_tensors: bool = False,
        indices: Iterable[int] | None = None,
    ) -> None:
        self._set_up(
            shuffle=shuffle,
            seed=0 if seed is None and generator is None else seed,
            generator=generator,
            rank=rank,
            world_size=world_size,
            as_tensors=as_tensors,
            counts_epochs=seed is None and generator is None,
        )
        self.sizes = sizes
        self.max_total_size = max_total_size
        self.window = None if window is None else whole("window", window, 1)
        self._limits = limits = Limits(cost, max_total_size)
        oversize_is_error(oversize)
        self._oversize = oversize
        self._order = order = None if indices is None else index_tensor("indices", indices)
        function = size_function(sizes)
        if function is None:
            self._columns = limits.columns(sizes)
        elif order is None:
            raise ValueError("sizes is a callable: indices must say which samples there are")
        else:
            asked = set(order.tolist())
            empty: Any = (0,) * len(limits.costs) if limits.several else 0
            self._columns = limits.columns(
                [
                    sizes_of(function, [index])[0] if index in asked else empty
                    for index in range(max(asked, default=-1) + 1)
                ]
            )
        batching = self._ready()
        warn_of_left_out(batching.left_out, batching.samples)

    def _make(self) -> _C.SampleBatching:
        return _C.packed_batching(
            self._columns,
            self._limits.costs,
            self._limits.maxima,
            self._order,
            self.shuffle,
            self.window,
            self._oversize,
        )

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **self._limits.settings(), "window": self.window}

    model: _C.MemoryModel | None = None

    @classmethod
    def fit(
        cls,
        dataset: Any,
        work: Callable[[Any], object],
        sizeof: Callable[[Any], Any] | Mapping[int, Any] | Sizes,
        budget: int | str,
        device: str | torch.device | int | None = None,
        *,
        cost: str = "padded",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        probes: int = 7,
        **options: Any,
    ) -> PackedBatchSampler:
        """Measure how much memory the work needs, and make a sampler that stays under a budget.

        The arguments are those of `SizeAwareBatchSampler.fit`; samples of like size come together,
        so less is padding.
        """
        if options.get("indices") is not None:
            options["indices"] = index_tensor(
                "indices", options["indices"]
            )  # is read several times

        def make(
            sizes: torch.Tensor, maximum: int, cost: Any, **changes: Any
        ) -> PackedBatchSampler:
            return cls(sizes, maximum, cost=cost, **{**options, **changes})

        return fit_sampler(  # type: ignore[no-any-return]
            make,
            dataset,
            work,
            sizeof,
            budget,
            device,
            cost=cost,
            collate_fn=collate_fn,
            probes=probes,
        )
