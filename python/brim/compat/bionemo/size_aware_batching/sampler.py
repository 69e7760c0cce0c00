"""Batches under a limit of their total size, and batches of elements of similar size."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.data import Sampler

from brim import _C
from brim.compat.bionemo.size_aware_batching.utils import check_numbers
from brim.data import BatchSamplerBase
from brim.data.sizes import is_array, size_function

__all__: Sequence[str] = (
    "BucketBatchSampler",
    "Real",
    "SizeAwareBatchSampler",
    "size_aware_batching",
)

Data = TypeVar("Data")
BatchCollated = TypeVar("BatchCollated")
Real: TypeAlias = int | float
S = TypeVar("S", bound="Sampler[Any]")
SizeOf: TypeAlias = Callable[[Data], Real] | Mapping[Data, Real] | Sequence[Real] | torch.Tensor
Logger: TypeAlias = Callable[[str], None]


def _size_function(sizeof: Any) -> Callable[[Any], Any]:
    """The function of an element that gives its size."""
    if is_array(sizeof):
        if sizeof.ndim != 1:
            shape = tuple(sizeof.shape)
            raise TypeError(f"sizeof must be a callable or one-dimensional, but has shape {shape}")
        sizeof = sizeof.tolist()  # reading a tensor element by element takes ten times as long
    function = size_function(sizeof)
    return sizeof.__getitem__ if function is None else function


def size_aware_batching(
    dataset: Iterable[Data],
    sizeof: SizeOf[Data],
    max_total_size: Real,
    collate_fn: Callable[[list[Data]], BatchCollated] | None = None,
    info_logger: Logger | None = None,
    warn_logger: Logger | None = None,
) -> Iterator[list[Data] | BatchCollated]:
    """Batch the elements of an iterable, in order, up to a total size.

    A batch ends before the element that would exceed the limit. The input is read once, element by
    element. An element that exceeds the limit by itself is skipped.

    Args:
        dataset: the elements.
        sizeof: the sizes: a function, a dictionary with the elements as keys, or (if the elements
            are indices) a sequence, tensor or array.
        max_total_size: the limit, in the unit of `sizeof`.
        collate_fn: makes a batch from a list of elements; by default the list is the batch.
        info_logger: called at the end with the number of elements and batches.
        warn_logger: called for each skipped element, and at the end.

    Raises:
        TypeError: if an argument has the wrong type; while iterating, if a size cannot be compared
            with the limit.
        ValueError: if the limit is NaN; while iterating, if a size is NaN, infinite or negative.
        RuntimeError: while iterating, if `sizeof` fails.

    Example:
        >>> words = ["a", "list", "of", "a", "few", "words"]
        >>> list(size_aware_batching(words, len, 5))
        [['a', 'list'], ['of', 'a'], ['few'], ['words']]
    """
    size_of = _size_function(sizeof)
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be a callable or None, but got {collate_fn!r}")
    if max_total_size != max_total_size:
        raise ValueError(f"max_total_size must be a number, but got {max_total_size}")
    return _batches(dataset, size_of, max_total_size, collate_fn, info_logger, warn_logger)


def _batches(
    dataset: Iterable[Any],
    size_of: Callable[[Any], Any],
    limit: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    info_logger: Logger | None,
    warn_logger: Logger | None,
) -> Iterator[Any]:
    batch: list[Any] = []
    total: Any = 0
    batched = skipped = batches = 0
    for data in dataset:
        try:
            size = size_of(data)
            kind = size.__class__
            if kind is not int and kind is not float and hasattr(size, "item"):
                size = size.item()  # a total of uint8 would wrap at 256
        except Exception as error:
            raise RuntimeError(f"sizeof raises error at data={data}: {error}") from error
        try:
            too_large = size > limit
            is_size = 0 <= size < math.inf
        except TypeError as error:
            raise TypeError(f"{error}: sizeof({data}) is {size!r}, not int or float") from error
        if not is_size:
            raise ValueError(
                f"the size of element {data} is {size}; it must be a finite number, at least 0"
            )
        if too_large:
            skipped += 1
            if warn_logger is not None:
                warn_logger(
                    f"Size of element {data} exceeds max_total_size ({size} > {limit}), skipping"
                )
            continue
        if size + total > limit:
            batches += 1
            yield batch if collate_fn is None else collate_fn(batch)
            batch = []
            total = 0
        batch.append(data)
        batched += 1
        total += size
    if batch:
        batches += 1
        yield batch if collate_fn is None else collate_fn(batch)
    if warn_logger is not None and skipped > 0:
        warn_logger(
            f"{batched} of {batched + skipped} samples were batched; the other {skipped} exceed "
            f"max_total_size={limit}"
        )
    if info_logger is not None:
        info_logger(f"Batched {batched} samples into {batches} batches of at most {limit} each")


class SizeAwareBatchSampler(Sampler[list[int]]):
    """A `batch_sampler` of a DataLoader that limits the total size of a batch.

    Args:
        sampler: the indices; iterated anew for each epoch.
        sizeof: the size at an index: a function, a dictionary, a sequence, a tensor or an array.
        max_total_size: the limit; with 0 only samples of size 0 are in a batch.
        info_logger: called at the end with the number of samples and batches; prints by default.
        warn_logger: called for each index whose size alone exceeds the limit, and at the end; warns
            by default.

    Raises:
        TypeError: if `sampler` or `sizeof` has the wrong type.
        ValueError: if `max_total_size` is no number, NaN or negative. See `size_aware_batching` for
            errors while iterating.

    Example:
        >>> sampler = SizeAwareBatchSampler(range(5), [3, 1, 2, 2, 4], max_total_size=4)
        >>> list(sampler)
        Batched 5 samples into 3 batches of at most 4 each
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        sampler: Sampler[int] | Iterable[int],
        sizeof: SizeOf[int],
        max_total_size: Real,
        info_logger: Logger | None = print,
        warn_logger: Logger | None = warnings.warn,
    ) -> None:
        given: Any = sampler
        if isinstance(given, str) or not isinstance(given, (Sampler, Iterable)):
            raise TypeError(
                "sampler should be an instance of torch.utils.data.Sampler or Iterable, but got "
                f"{type(given).__name__}"
            )
        limit: Any = max_total_size
        if not isinstance(limit, numbers.Real):
            raise ValueError(f"max_total_size should be int or float but got {type(limit)}")
        if not max_total_size >= 0:
            raise ValueError(f"max_total_size should not be negative but got {max_total_size}")
        self._sampler = sampler
        self._sizeof = _size_function(sizeof)
        self._max_total_size = max_total_size
        self._loggers = (info_logger, warn_logger)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches."""
        return _batches(self._sampler, self._sizeof, self._max_total_size, None, *self._loggers)


def _check_keywords(name: str, keywords: dict[str, Any] | None) -> dict[str, Any]:
    if keywords is None:
        return {}
    if not isinstance(keywords, dict):
        raise TypeError(f"{name} should be a dictionary, but got {name}={keywords}")
    if not all(isinstance(key, str) for key in keywords):
        raise TypeError(f"{name} should have string keys, but got keys={list(keywords)}")
    return keywords


class BucketBatchSampler(Sampler[list[int]]):
    """Batches of elements of similar size: each batch comes from one bucket.

    Bucket k holds the elements with sizes in [boundary k, boundary k + 1). Its own
    `base_batch_sampler_class(indices, **keywords)` makes its batches. Elements outside all buckets
    are left out, with a warning.

    With `shuffle`, each iteration shuffles the elements inside their buckets, starting from the
    previous order. The bucket of each batch is drawn with probability proportional to its remaining
    elements. Without it, the buckets follow each other. Iterators are independent.

    Args:
        sizes: the size of each element; a 1D tensor of finite numbers.
        bucket_boundaries: at least two distinct numbers, in any order. They may be infinite.
        base_batch_sampler_class: a subclass of `torch.utils.data.Sampler` that makes batches.
        base_batch_sampler_shared_kwargs: keywords for all buckets.
        base_batch_sampler_individual_kwargs: keywords with one value for each bucket.
        shuffle: whether to shuffle.
        generator: the source of random numbers; by default one with a random seed.

    Attributes:
        bucket_sizes: the number of elements in each bucket.
        bucket_element_indices: their indices.
        base_batch_samplers: the sampler of each bucket.
        num_buckets: the number of buckets.
        num_samples: the number of elements in all buckets.

    Raises:
        TypeError: if an argument has the wrong type, or the sampler class does not take the
            keywords.
        ValueError: if an argument is not as described.
        RuntimeError: if all elements are outside the buckets.

    Example:
        >>> sizes, boundaries = torch.tensor([9, 1, 8, 2, 3]), torch.tensor([0, 5, 10])
        >>> kwargs = {"drop_last": False}, {"batch_size": [2, 4]}
        >>> base = torch.utils.data.BatchSampler
        >>> sampler = BucketBatchSampler(sizes, boundaries, base, *kwargs, shuffle=False)
        >>> list(sampler), len(sampler)
        ([[1, 3], [4], [0, 2]], 3)
    """

    def __init__(
        self,
        sizes: torch.Tensor,
        bucket_boundaries: torch.Tensor,
        base_batch_sampler_class: type[S],
        base_batch_sampler_shared_kwargs: dict[str, Any] | None = None,
        base_batch_sampler_individual_kwargs: dict[str, Iterable[Any]] | None = None,
        shuffle: bool | None = True,
        generator: torch.Generator | None = None,
    ) -> None:
        values = check_numbers("sizes", sizes, floats=True)
        boundaries = check_numbers("bucket_boundaries", bucket_boundaries, floats=True)
        if len(boundaries) < 2:
            raise ValueError(
                f"bucket_boundaries should have at least 2 numbers, but got {len(boundaries)}"
            )
        boundaries = torch.sort(boundaries)[0]
        if not torch.all(boundaries[:-1] < boundaries[1:]):
            raise ValueError(
                "bucket_boundaries should be numbers without duplicates, but got, sorted, "
                f"{boundaries}"
            )
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle should be a boolean value, but got shuffle={shuffle}")
        if not isinstance(base_batch_sampler_class, type) or not issubclass(
            base_batch_sampler_class, Sampler
        ):
            raise TypeError(
                "base_batch_sampler_class should be a batch sampler class inherited from "
                f"torch.utils.data.Sampler, but got {base_batch_sampler_class}"
            )
        if shuffle and issubclass(base_batch_sampler_class, BatchSamplerBase):
            raise TypeError(
                f"{base_batch_sampler_class} copies its indices, so shuffling them has no effect; "
                "use the SizeAwareBatchSampler of this module, or brim.data.BucketBatchSampler"
            )
        if shuffle and generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator().manual_seed(seed)

        self.sizes = sizes
        self.bucket_boundaries = boundaries
        self.num_buckets = len(boundaries) - 1
        self.shuffle = shuffle
        self.generator = generator
        self.base_batch_sampler_class: type[Sampler[Any]] = base_batch_sampler_class
        self.base_batch_sampler_shared_kwargs = _check_keywords(
            "base_batch_sampler_shared_kwargs", base_batch_sampler_shared_kwargs
        )
        each = _check_keywords(
            "base_batch_sampler_individual_kwargs", base_batch_sampler_individual_kwargs
        )
        individual = {key: list(value) for key, value in each.items()}
        if any(len(value) != self.num_buckets for value in individual.values()):
            raise ValueError(
                "Each value in base_batch_sampler_individual_kwargs should have a length of "
                f"{self.num_buckets}, the number of buckets, but got lengths "
                f"{[len(value) for value in individual.values()]}"
            )
        self.base_batch_sampler_individual_kwargs = [
            {key: value[k] for key, value in individual.items()} for k in range(self.num_buckets)
        ]

        # One dtype that holds both: int64 if all are integers.
        exact = not (values.is_floating_point() or boundaries.is_floating_point())
        dtype = torch.int64 if exact else torch.float64
        indices, offsets = _C.group_by_bucket(values.to("cpu", dtype), boundaries.to("cpu", dtype))
        counts = offsets.diff()
        self.num_samples = len(indices)
        if self.num_samples == 0:
            raise RuntimeError(
                "The sizes of all elements in the dataset are outside the bucket ranges provided"
            )
        if self.num_samples < len(sizes):
            warnings.warn(
                f"{len(sizes) - self.num_samples} elements are outside the buckets provided and "
                "will be skipped",
                stacklevel=2,
            )
        self.bucket_sizes = counts.to(sizes.device)
        #: The elements of each bucket after the last shuffle.
        self._orders: Sequence[torch.Tensor] = torch.split(indices, counts.tolist())
        #: What the lists of `bucket_element_indices` hold now; see `_shuffled_batches`.
        self._current = [*self._orders]
        self.bucket_element_indices: list[list[int]] = [order.tolist() for order in self._orders]
        make: Any = base_batch_sampler_class
        own = self.base_batch_sampler_individual_kwargs
        self.base_batch_samplers: list[Sampler[list[int]]] = [
            make(indices, **self.base_batch_sampler_shared_kwargs, **keywords)
            for indices, keywords in zip(self.bucket_element_indices, own, strict=True)
        ]

    def __len__(self) -> int:
        """The number of batches, if the sampler class has a length."""
        samplers: list[Any] = self.base_batch_samplers
        return sum(len(sampler) for sampler in samplers)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches."""
        if self.shuffle:
            yield from self._shuffled_batches()
            return
        iterators = [iter(sampler) for sampler in self.base_batch_samplers]
        for iterator, remaining in zip(iterators, self.bucket_sizes.tolist(), strict=True):
            while remaining > 0:
                batch = next(iterator, None)
                if batch is None:
                    break
                remaining -= len(batch)
                yield batch

    def _shuffled_batches(self) -> Iterator[list[int]]:
        # The samplers of the buckets read lists that all iterators share. So each iterator has its
        # own order, and restores it before it asks for a batch if another one has used the list.
        generator = self.generator
        assert generator is not None
        device = generator.device
        orders = self._orders = [
            order[torch.randperm(len(order), generator=generator, device=device).cpu()]
            for order in self._orders
        ]
        for bucket, order in enumerate(orders):
            self._put_order(bucket, order)
        iterators = [iter(sampler) for sampler in self.base_batch_samplers]
        remaining = self.bucket_sizes.to(device, copy=True)
        total = self.num_samples
        while total > 0:
            bucket = int(torch.multinomial(remaining / total, 1, generator=generator))
            self._put_order(bucket, orders[bucket])
            batch = next(iterators[bucket], None)
            if batch is None:  # the sampler dropped elements, such as an incomplete last batch
                remaining[bucket] = 0
                total = int(remaining.sum())
                continue
            remaining[bucket] -= len(batch)
            total -= len(batch)
            yield batch

    def _put_order(self, bucket: int, order: torch.Tensor) -> None:
        if self._current[bucket] is not order:
            self.bucket_element_indices[bucket][:] = order.tolist()
            self._current[bucket] = order
