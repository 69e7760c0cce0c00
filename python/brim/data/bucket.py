"""Batches of samples of like size."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, Sampler

from brim import _C
from brim._arguments import flag, whole
from brim.data.base import (
    Batch,
    BatchSamplerBase,
    Plan,
    Start,
    warn_of_left_out,
)
from brim.data.ordered import SizeAwareBatchSampler
from brim.data.sizes import (
    Budget,
    Cost,
    Limits,
    Sizes,
    is_array,
    one_column,
    oversize_is_error,
    size_column,
    size_function,
    sizes_of,
)


class Buckets(NamedTuple):
    """Ranges of sizes: bucket b holds sizes from boundary b up to, but without, boundary b + 1."""

    bucket_boundaries: torch.Tensor
    bucket_sizes: torch.Tensor


def create_buckets(sizes: Sizes, max_width: int, min_bucket_count: int) -> Buckets:
    """Divide whole sizes into buckets that are not too wide and hold enough samples.

    Args:
        sizes: the size of each sample.
        max_width: no bucket is wider.
        min_bucket_count: a bucket grows until it holds so many samples or is `max_width` wide.

    Returns:
        the boundaries, ascending, and the number of samples in each bucket.

    Example:
        >>> create_buckets([1, 1, 2, 3, 22, 22], max_width=5, min_bucket_count=10).bucket_sizes
        tensor([4, 0, 0, 0, 2])
    """
    column = one_column("sizes", sizes)
    if column.is_floating_point():
        raise ValueError("sizes must be ints for create_buckets, got floats")
    return Buckets(*_C.create_buckets(column, max_width, min_bucket_count))


def least_padding_boundaries(sizes: Sizes, buckets: int) -> torch.Tensor:
    """Bucket boundaries that make padding least, for at most so many buckets.

    Padding is counted as if every sample were as long as the longest in its bucket. Exact for up to
    20 000 different sizes; of more, only some are considered as boundaries.

    Example:
        >>> least_padding_boundaries([1, 2, 2, 9, 10, 30], 3)
        tensor([ 1,  9, 30, 31])
    """
    return _C.least_padding_boundaries(one_column("sizes", sizes), whole("buckets", buckets, 1))


class BucketBatchSampler(BatchSamplerBase):
    """Batches whose samples are all from one bucket, so that little is padding.

    How much goes into a batch is said in one of three ways: `batch_size`, `max_total_size`, or
    a batch sampler class that is given each bucket's indices.

    Args:
        sizes: the size of each sample, which decides its bucket.
        bucket_boundaries: bucket b holds sizes from boundary b up to, but without, boundary b + 1;
            sorted where they are not. The last may be infinite. Samples outside are left out, with
            a warning.
        base_batch_sampler_class: makes batches of the indices of one bucket. `BatchSampler` of
            torch and `SizeAwareBatchSampler` run in C++; any other is called as it is, on one rank
            only.
        base_batch_sampler_shared_kwargs: its arguments that are the same for all buckets.
        base_batch_sampler_individual_kwargs: its arguments that differ: a value for each bucket.
        shuffle: samples in random order, and each batch from a random bucket, the fuller ones more
            often; else bucket after bucket, in order.
        generator: draws a seed for each epoch; torch's default where None.
        batch_size: samples in a batch; one number for all buckets, or one for each.
        max_total_size: the budget of a batch, as in `SizeAwareBatchSampler`.
        cost: what a batch costs, as in `SizeAwareBatchSampler`.
        drop_last: leave out a bucket's last batch where it has fewer than `batch_size` samples.
        seed: decides the order together with the epoch, in place of `generator`.
        rank: which of the ranks this is.
        world_size: how many ranks share the samples. All get the same number of batches.
        oversize: what to do with a sample that exceeds the budget by itself: `"leave_out"` (with
            a warning, and counted in `report()`) or `"error"`.
        as_tensors: give batches as int64 tensors, which is faster than lists.

    Example:
        >>> sampler = BucketBatchSampler(
        ...     range(10), [0, 4, 10], batch_size=[2, 3], shuffle=False
        ... )
        >>> list(sampler)
        [[0, 1], [2, 3], [4, 5, 6], [7, 8, 9]]
    """

    def __init__(
        self,
        sizes: Sizes,
        bucket_boundaries: Sizes,
        base_batch_sampler_class: type[Sampler[Batch]] | None = None,
        base_batch_sampler_shared_kwargs: Mapping[str, Any] | None = None,
        base_batch_sampler_individual_kwargs: Mapping[str, Sequence[Any]] | None = None,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
        *,
        batch_size: int | Sequence[int] | None = None,
        max_total_size: Budget | None = None,
        cost: Cost | Sequence[Cost] = "padded",
        drop_last: bool = False,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        oversize: str = "leave_out",
        as_tensors: bool = False,
    ) -> None:
        self._set_up(
            shuffle=shuffle,
            seed=seed,
            generator=generator,
            rank=rank,
            world_size=world_size,
            as_tensors=as_tensors,
        )
        self.sizes = size_column("sizes", sizes)
        self.bucket_boundaries = _sorted_boundaries(bucket_boundaries)
        self.num_buckets = len(self.bucket_boundaries) - 1
        shared, individual = _keyword_arguments(
            base_batch_sampler_shared_kwargs, base_batch_sampler_individual_kwargs, self.num_buckets
        )
        self._base: type[Sampler[Batch]] | None = None
        self._base_kwargs: list[dict[str, Any]] = []
        limits, columns = None, []
        oversize_is_error(oversize)
        if base_batch_sampler_class is not None:
            given = [batch_size is not None, max_total_size is not None, drop_last]
            if any([*given, cost != "padded", oversize != "leave_out"]):
                raise ValueError(
                    "batch_size, max_total_size, cost, drop_last and oversize are for buckets "
                    "without a base_batch_sampler_class; give them in its keyword arguments"
                )
            if not (
                isinstance(base_batch_sampler_class, type)
                and issubclass(base_batch_sampler_class, Sampler)
            ):
                raise ValueError(
                    "base_batch_sampler_class must be a class derived from "
                    f"torch.utils.data.Sampler, got {base_batch_sampler_class!r:.100}"
                )
            self._base_kwargs = [
                {**shared, **{key: values[b] for key, values in individual.items()}}
                for b in range(self.num_buckets)
            ]
            native = _batch_sampler_arguments(base_batch_sampler_class, self._base_kwargs)
            budgeted = _size_aware_arguments(base_batch_sampler_class, shared, individual)
            if native is not None:
                batch_size, drop_last = native
            elif budgeted is not None:
                max_total_size, cost, costs_given, oversize = budgeted
                oversize_is_error(oversize)
                limits = Limits(cost, max_total_size)
                columns = limits.columns(_table(costs_given, len(self.sizes)))
            else:
                self._base = base_batch_sampler_class
        elif shared or individual:
            raise ValueError(
                "base_batch_sampler_shared_kwargs and base_batch_sampler_individual_kwargs need "
                "a base_batch_sampler_class"
            )
        if self._base is not None:
            self._set_up_foreign()
            return
        if max_total_size is not None and limits is None:
            limits = Limits(cost, max_total_size)
            columns = [self.sizes] * len(limits.costs)  # each budget with a cost of its own
        self._limits = limits
        sizes_for_buckets = self.sizes
        if any(column.is_floating_point() for column in [self.sizes, *columns]):
            sizes_for_buckets = self.sizes.double()
            columns = [column.double() for column in columns]
        self._recipe = (
            sizes_for_buckets,
            self.bucket_boundaries.tolist(),
            _batch_sizes(batch_size, self.num_buckets),
            columns,
            [] if limits is None else limits.costs,
            [] if limits is None else limits.maxima,
            flag("drop_last", drop_last),
            self.shuffle,
            oversize,
        )
        self._tell_of_left_out(self._ready().left_out)

    def _make(self) -> _C.SampleBatching:
        return _C.bucket_batching(*self._recipe)

    def _settings(self) -> dict[str, Any]:
        settings = {**super()._settings(), "bucket_boundaries": self.bucket_boundaries.tolist()}
        if self._base is not None:
            return {**settings, "base_batch_sampler_class": self._base.__name__}
        limits = {} if self._limits is None else self._limits.settings()
        return {**settings, **limits, "batch_size": self._recipe[2], "drop_last": self._recipe[6]}

    def _tell_of_left_out(self, left_out: Mapping[str, torch.Tensor]) -> None:
        missing = sum(len(indices) for indices in left_out.values())
        if missing == len(self.sizes):
            raise RuntimeError(
                "no sample is in any bucket: all sizes are outside bucket_boundaries, or over "
                "the budget"
            )
        warn_of_left_out(left_out, len(self.sizes))

    # ---- a batch sampler class that only Python can run ------------------------------------

    def _set_up_foreign(self) -> None:
        if self.world_size > 1 or self.as_tensors:
            raise ValueError(
                f"{self._base.__name__ if self._base else ''} runs in Python: several ranks and "
                "as_tensors need batch_size or max_total_size"
            )
        sizes = one_column("sizes", self.sizes)
        boundaries = self.bucket_boundaries.to(sizes.dtype)
        if not torch.equal(boundaries.double(), self.bucket_boundaries.double()):
            sizes, boundaries = sizes.double(), self.bucket_boundaries
        indices, offsets = _C.group_by_bucket(sizes, boundaries)
        self._groups = [indices[offsets[b] : offsets[b + 1]] for b in range(self.num_buckets)]
        inside = torch.cat(self._groups)
        outside = torch.ones(len(self.sizes), dtype=torch.bool)
        outside[inside] = False
        self._tell_of_left_out(
            {"outside buckets": outside.nonzero()[:, 0]} if outside.any() else {}
        )
        self._samplers(self._groups)  # wrong arguments are an error at once

    def _samplers(self, groups: list[torch.Tensor]) -> list[Any]:
        assert self._base is not None
        base: Any = self._base
        return [
            base(group.tolist(), **kwargs)
            for group, kwargs in zip(groups, self._base_kwargs, strict=True)
        ]

    def _shuffled_groups(self, generator: torch.Generator) -> list[torch.Tensor]:
        if not self.shuffle:
            return self._groups
        return [g[torch.randperm(len(g), generator=generator)] for g in self._groups]

    def _open(self, start: Start) -> Iterator[Batch]:
        if self._base is None:
            return super()._open(start)
        done = start.cursor[0] if start.cursor else 0
        return _ForeignBatches(self, start.seed, done, self._description(start.seed))

    def __len__(self) -> int:
        """The exact number of batches on this rank: of the iteration that runs, else of the next.

        A base sampler class of other people's must have a length.
        """
        if self._base is None:
            return super().__len__()
        self._settle()
        running = self._in_use()
        start = self._coming() if running is None else running.start
        done = start.cursor[0] if start.cursor else 0
        # In the order of the coming epoch: where a budget decides, the number depends on it.
        groups = self._shuffled_groups(torch.Generator().manual_seed(start.seed))
        return sum(len(sampler) for sampler in self._samplers(groups)) - done

    def plan(self) -> Plan:
        """All batches of the next iteration on this rank, as two tensors."""
        self._native_only("plan")
        return super().plan()

    def report(self) -> _C.PlanReport:
        """What becomes of the samples in the coming epoch, over all ranks. Print it."""
        self._native_only("report")
        return super().report()

    def _native_only(self, what: str) -> None:
        if self._base is not None:
            raise TypeError(f"{self._base.__name__} runs in Python: there is no {what}")

    def _sample_count(self) -> int:
        return len(self.sizes)


class _ForeignBatches:
    """Batches of base samplers that only Python can run; resumed by running them again."""

    def __init__(
        self, owner: BucketBatchSampler, seed: int, skip: int, description: dict[str, Any]
    ) -> None:
        self._lock = threading.RLock()
        self._generator = torch.Generator().manual_seed(seed)
        self._shuffle = owner.shuffle
        groups = owner._shuffled_groups(self._generator)
        self._iterators = [iter(sampler) for sampler in owner._samplers(groups)]
        self._left = torch.tensor([len(group) for group in groups], dtype=torch.float64)
        self._description = description
        self._finished = False
        self._given = 0
        for done in range(skip):
            if next(self, None) is None:
                raise ValueError(f"the state stands after {skip} batches, there are only {done}")
        self._skipped, self._given = skip, 0

    def __iter__(self) -> _ForeignBatches:
        return self

    def __next__(self) -> Batch:
        with self._lock:  # several threads may read one iterator
            while bool((self._left > 0).any()):
                if self._shuffle:
                    bucket = int(torch.multinomial(self._left, 1, generator=self._generator))
                else:
                    bucket = int((self._left > 0).nonzero()[0])
                batch: Batch | None = next(self._iterators[bucket], None)
                if batch is None:
                    self._left[bucket] = 0
                    continue
                # Not 0 before its sampler says that it has ended: it may give a sample twice.
                self._left[bucket] = max(float(self._left[bucket]) - len(batch), 1.0)
                self._given += 1
                return batch
            self._finished = True
            raise StopIteration

    def begun(self) -> bool:
        return self._finished or self._given > 0

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        done = self._given if batches is None else whole("batches", batches, 0)
        if done > self._given:
            raise ValueError(
                f"batches must be from 0 to the {self._given} that were given, got {done}"
            )
        return {
            **self._description,
            "finished": self._finished and done == self._given,
            "cursor": [self._skipped + done],
            "segments": [],
        }


# ---- arguments -------------------------------------------------------------------------------


def _sorted_boundaries(given: object) -> torch.Tensor:
    boundaries = one_column("bucket_boundaries", given)
    if len(boundaries) < 2:
        raise ValueError(f"bucket_boundaries must be at least two, got {boundaries.tolist()}")
    ascending = boundaries.double().sort().values  # NaN comes last
    if not bool(ascending[:-1].isfinite().all()) or not ascending[-1] > -torch.inf:
        raise ValueError(
            "bucket_boundaries must be finite (the last may be infinite), got "
            f"{boundaries.tolist()}"
        )
    if not torch.equal(boundaries.double().to(boundaries.dtype), boundaries):
        raise ValueError("bucket_boundaries must not exceed 2**53")
    if bool((ascending.diff() == 0).any()):
        double = float(ascending[:-1][ascending.diff() == 0][0])
        raise ValueError(f"bucket_boundaries must differ from each other, got {double} twice")
    return ascending


def _keyword_arguments(
    shared: Mapping[str, Any] | None, individual: Mapping[str, Sequence[Any]] | None, buckets: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    for name, given in (
        ("base_batch_sampler_shared_kwargs", shared),
        ("base_batch_sampler_individual_kwargs", individual),
    ):
        if given is not None and not (
            isinstance(given, Mapping) and all(isinstance(key, str) for key in given)
        ):
            raise ValueError(
                f"{name} must be a dictionary of keyword arguments, got {given!r:.100}"
            )
    values = {}
    for key, entries in (individual or {}).items():
        values[key] = list(entries) if isinstance(entries, Iterable) else [entries]
        if not isinstance(entries, Iterable) or len(values[key]) != buckets:
            raise ValueError(
                f"base_batch_sampler_individual_kwargs[{key!r}] must have a value for each of the "
                f"{buckets} buckets, got {entries!r:.100}"
            )
    return dict(shared or {}), values


def _batch_sampler_arguments(
    base: type[Sampler[Batch]], kwargs: list[dict[str, Any]]
) -> tuple[list[int], bool] | None:
    """Batch sizes and drop_last of torch's own BatchSampler, where they are the same as ours."""
    if base is not BatchSampler or any(set(k) != {"batch_size", "drop_last"} for k in kwargs):
        return None
    for arguments in kwargs:  # its own checks, and its own errors
        BatchSampler([], **arguments)
    drop_last = {arguments["drop_last"] for arguments in kwargs}
    if len(drop_last) != 1:
        return None
    return [arguments["batch_size"] for arguments in kwargs], drop_last.pop()


def _size_aware_arguments(
    base: type[Sampler[Batch]], shared: dict[str, Any], individual: dict[str, list[Any]]
) -> tuple[Any, Any, Any, str] | None:
    """Budget, cost, sizes and oversize of SizeAwareBatchSampler, where all buckets agree."""
    understood = {"sizeof", "max_total_size", "cost", "oversize"}
    if base is not SizeAwareBatchSampler or individual or not set(shared) <= understood:
        return None
    if not {"sizeof", "max_total_size"} <= set(shared):
        return None
    return (
        shared["max_total_size"],
        shared.get("cost", "sum"),
        shared["sizeof"],
        shared.get("oversize", "leave_out"),
    )


def _table(sizeof: Any, samples: int) -> Any:
    function = size_function(sizeof)
    return sizeof if function is None else sizes_of(function, range(samples))


def _batch_sizes(batch_size: int | Sequence[int] | None, buckets: int) -> list[int]:
    if batch_size is None:
        return []
    if is_array(batch_size) and batch_size.ndim == 1:  # type: ignore[union-attr]
        batch_size = batch_size.tolist()  # type: ignore[union-attr]
    if isinstance(batch_size, (list, tuple)):
        return [whole("batch_size", size, 1) for size in batch_size]
    return [whole("batch_size", batch_size, 1)] * buckets
