"""Batches of samples of similar size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import Unpack

from brim import _C
from brim._arguments import flag, whole
from brim.data.base import BatchSamplerBase, SamplerOptions
from brim.data.sizes import (
    Budget,
    Sizes,
    has_columns,
    is_array,
    one_column,
    size_column,
    sorted_boundaries,
)


class Buckets(NamedTuple):
    """Ranges of sizes: bucket b holds the sizes in [boundary b, boundary b + 1).

    Example:
        >>> create_buckets([1, 1, 2, 3, 22, 22], max_width=5, min_bucket_count=10).bucket_boundaries
        tensor([ 1,  6, 11, 16, 21, 23])
    """

    bucket_boundaries: torch.Tensor
    bucket_sizes: torch.Tensor


def create_buckets(sizes: Sizes, max_width: int, min_bucket_count: int) -> Buckets:
    """Divide integer sizes into buckets that are not too wide and hold enough samples.

    Args:
        sizes: the size of each sample.
        max_width: the largest width of a bucket.
        min_bucket_count: a bucket grows until it holds this many samples or is `max_width` wide.

    Returns:
        The boundaries, ascending, and the number of samples in each bucket.

    Example:
        >>> create_buckets([1, 1, 2, 3, 22, 22], max_width=5, min_bucket_count=10).bucket_sizes
        tensor([4, 0, 0, 0, 2])
    """
    column = one_column("sizes", sizes)
    if column.is_floating_point():
        raise ValueError("sizes must be ints for create_buckets, got floats")
    return Buckets(*_C.create_buckets(column, max_width, min_bucket_count))


def least_padding_boundaries(sizes: Sizes, buckets: int) -> torch.Tensor:
    """Bucket boundaries with the least padding, for at most this many buckets.

    Padding is counted as if every sample were as long as the longest in its bucket. Exact for up to
    20 000 distinct sizes; of more, only some are considered as boundaries.

    Example:
        >>> least_padding_boundaries([1, 2, 2, 9, 10, 30], 3)
        tensor([ 1,  9, 30, 31])
    """
    return _C.least_padding_boundaries(one_column("sizes", sizes), buckets)


class BucketBatchSampler(BatchSamplerBase):
    """Batches whose samples all come from one bucket, so that there is little padding.

    Either `batch_size` or `max_total_size` says how much goes into a batch. Shuffled, which is the
    default, the samples of a bucket are in random order and each batch is from a random bucket,
    fuller ones more often. Otherwise the buckets follow each other.

    Args:
        sizes: the size of each sample, which determines its bucket. There may be several, a column
            for each: for several budgets, or padded under one. The first determines the bucket.
        bucket_boundaries: bucket b holds the sizes in [boundary b, boundary b + 1). They are
            sorted. The last may be infinite. Samples outside are left out, with a warning.
        batch_size: samples per batch: one number for all buckets, or one for each.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`.
        drop_last: leave out the last batch of a bucket if it has fewer than `batch_size` samples.
        **options: the keywords of all samplers; see `BatchSamplerBase`.

    Example:
        >>> sampler = BucketBatchSampler(
        ...     range(10), [0, 4, 10], batch_size=[2, 3], shuffle=False
        ... )
        >>> list(sampler)
        [[0, 1], [2, 3], [4, 5, 6], [7, 8, 9]]
    """

    _budget_required = False

    def __init__(
        self,
        sizes: Sizes,
        bucket_boundaries: Sizes,
        *base_batch_sampler: object,  # bionemo's, refused below
        batch_size: int | Sequence[int] | None = None,
        max_total_size: Budget | None = None,
        drop_last: bool = False,
        **options: Unpack[SamplerOptions],
    ) -> None:
        if base_batch_sampler or any(name.startswith("base_batch_sampler") for name in options):
            raise TypeError(
                "BucketBatchSampler takes no base_batch_sampler_class: use batch_size= (one for "
                "each bucket) or max_total_size=, or, to run any class, the BucketBatchSampler of "
                "brim.compat.bionemo.size_aware_batching.sampler"
            )
        options.setdefault("shuffle", True)
        super().__init__(max_total_size, **options)
        if max_total_size is None and self.max_batch_size is not None:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} goes with max_total_size; without a budget, "
                "batch_size is the number of samples in a batch"
            )
        limits = self._limits
        if limits.costs and has_columns(sizes):
            columns = limits.columns(sizes)
            self.sizes = columns[0]
        else:
            self.sizes = size_column("sizes", sizes)
            columns = [self.sizes] * len(limits.costs)
        self.bucket_boundaries = sorted_boundaries(bucket_boundaries)
        self.num_buckets = len(self.bucket_boundaries) - 1
        self._batch_sizes = _batch_sizes(batch_size, self.num_buckets)
        self._drop_last = flag("drop_last", drop_last)
        self._columns = columns
        self._place_index(sizes)
        left_out = self._ready().left_out
        if 0 < len(self.sizes) == sum(len(indices) for indices in left_out.values()):
            raise RuntimeError(
                "no sample is in any bucket: all sizes are outside of the boundaries, or over "
                "the budget"
            )
        self._tell_of_left_out()

    def _make(self) -> _C.SampleBatching:
        return _C.bucket_batching(
            self.sizes,
            self.bucket_boundaries.tolist(),
            self._batch_sizes,
            self._columns,
            self._limits.costs,
            self._limits.maxima,
            self._drop_last,
            self.shuffle,
            self._oversize,
            self.batch_multiple,
            self._open_index(self.sizes),
        )

    def _data_tensors(self) -> list[torch.Tensor]:
        return [self.sizes, *self._columns]

    def _drops_nothing(self) -> dict[str, bool]:
        return {} if self._drop_last else super()._drops_nothing()

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "bucket_boundaries": self.bucket_boundaries.tolist(),
            "batch_size": self._batch_sizes,
            "drop_last": self._drop_last,
        }


def _batch_sizes(batch_size: Any, buckets: int) -> list[int]:
    if batch_size is None:
        return []
    if is_array(batch_size) and batch_size.ndim == 1:
        batch_size = batch_size.tolist()
    if isinstance(batch_size, (list, tuple)):
        return [whole("batch_size", size, 1) for size in batch_size]
    return [whole("batch_size", batch_size, 1)] * buckets
