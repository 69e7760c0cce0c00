"""The face of bionemo's size_aware_batching: buckets, and batches out of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler

import brim
from brim import _C
from brim.compat.bionemo.size_aware_batching.sampler import (
    BucketBatchSampler,
    SizeAwareBatchSampler,
)
from brim.compat.bionemo.size_aware_batching.utils import Buckets, create_buckets

SIZES = torch.arange(25)
BOUNDARIES = torch.tensor([0, 6, 15, 25])


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "sizes": SIZES,
        "bucket_boundaries": BOUNDARIES,
        "base_batch_sampler_class": BatchSampler,
        "base_batch_sampler_shared_kwargs": {"drop_last": False},
        "base_batch_sampler_individual_kwargs": {"batch_size": [2, 3, 5]},
        **changes,
    }


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- create_buckets


def buckets_by_hand(
    sizes: list[int], max_width: int, min_count: int
) -> tuple[list[int], list[int]]:
    """The reference: goes up one unit at a time."""
    counts = Counter(sizes)
    boundaries, filled = [min(sizes)], [0]
    for size in range(min(sizes), max(sizes) + 1):
        full = filled[-1] >= min_count and counts[size] > 0
        if full or size - boundaries[-1] == max_width:
            boundaries.append(size)
            filled.append(0)
        filled[-1] += counts[size]
    return [*boundaries, max(sizes) + 1], filled


@given(
    st.lists(st.integers(-20, 60) | st.integers(0, 5), min_size=1, max_size=60),
    st.integers(1, 30),
    st.integers(1, 20),
)
def test_buckets_follow_the_rule(sizes: list[int], max_width: int, min_count: int) -> None:
    buckets = create_buckets(torch.tensor(sizes), max_width, min_count)
    boundaries, counts = buckets_by_hand(sizes, max_width, min_count)
    assert isinstance(buckets, Buckets)
    assert buckets.bucket_boundaries.tolist() == boundaries
    assert buckets.bucket_sizes.tolist() == counts


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_every_integer_dtype_makes_int64_buckets_that_do_not_wrap(dtype: torch.dtype) -> None:
    largest = min(torch.iinfo(dtype).max, 2**62)
    buckets = create_buckets(torch.tensor([largest - 1, largest], dtype=dtype), 10, 2)
    assert buckets.bucket_boundaries.dtype == torch.int64
    assert buckets.bucket_boundaries.tolist() == [largest - 1, largest + 1]
    assert buckets.bucket_sizes.tolist() == [2]


def test_gap_too_wide_for_its_empty_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_width=1 .*2\^24 buckets.* 0 to 1000000000000"):
        create_buckets(torch.tensor([0, 10**12]), 1, 1)
    assert len(create_buckets(torch.tensor([0, 10**12]), 10**9, 1).bucket_sizes) == 1001


def test_width_beyond_64_bits_is_as_good_as_any_that_is_wide_enough() -> None:
    assert create_buckets(SIZES, 10**30, 10**30).bucket_sizes.tolist() == [25]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"sizes": [1, 2, 3]}, TypeError, "sizes should be a torch tensor"),
        ({"sizes": torch.ones(2, 2).long()}, ValueError, r"1D tensor, but got a shape of \(2, 2\)"),
        ({"sizes": torch.tensor([1.0])}, ValueError, "sizes.dtype=torch.float32"),
        ({"sizes": torch.tensor([True])}, ValueError, "sizes.dtype=torch.bool"),
        ({"sizes": torch.tensor([], dtype=torch.int64)}, ValueError, "not be empty"),
        ({"max_width": 2.0}, ValueError, "max_width should be a positive integer.*=2.0"),
        ({"max_width": 0}, ValueError, "max_width should be a positive integer.*=0"),
        ({"min_bucket_count": -1}, ValueError, "min_bucket_count should be a positive.*=-1"),
        ({"min_bucket_count": None}, ValueError, "min_bucket_count should be a positive.*=None"),
    ],
)
def test_wrong_argument_of_create_buckets_is_an_error(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        create_buckets(**{"sizes": SIZES, "max_width": 5, "min_bucket_count": 3, **changes})


# ---------------------------------------------------------------- the bindings below


def padding(sizes: list[float], boundaries: list[float]) -> float:
    total = 0.0
    for low, high in itertools.pairwise(boundaries):
        bucket = [size for size in sizes if low <= size < high]
        total += sum(max(bucket) - size for size in bucket)
    return total


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 5))
def test_least_padding_is_what_trying_all_boundaries_finds(sizes: list[int], count: int) -> None:
    distinct = sorted(set(sizes))
    best = min(
        padding([*sizes], [distinct[0], *inner, distinct[-1] + 1])
        for n in range(count)
        for inner in itertools.combinations(distinct[1:], n)
    )
    for dtype in (torch.int64, torch.float64):
        boundaries = _C.least_padding_boundaries(torch.tensor(sizes, dtype=dtype), count)
        assert boundaries.dtype == dtype
        assert len(boundaries) <= count + 1
        assert padding([*sizes], boundaries.tolist()) == pytest.approx(best)


def test_wrong_argument_of_the_bindings_is_an_error() -> None:
    with pytest.raises(TypeError, match="sizes must be a tensor"):
        _C.least_padding_boundaries([1, 2], 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int64 or float64 tensor on the CPU"):
        _C.least_padding_boundaries(torch.ones(2), 2)
    with pytest.raises(ValueError, match="buckets=0"):
        _C.least_padding_boundaries(SIZES, 0)
    with pytest.raises(ValueError, match=r"sizes\[1\]=nan"):
        _C.least_padding_boundaries(torch.tensor([1.0, math.nan]).double(), 2)
    with pytest.raises(ValueError, match="sizes is empty"):
        _C.least_padding_boundaries(SIZES[:0], 2)
    with pytest.raises(TypeError, match="one dtype"):
        _C.group_by_bucket(SIZES, BOUNDARIES.double())
    assert _C.least_padding_boundaries(SIZES[::5], 9).tolist() == [0, 5, 10, 15, 20, 21]


# ---------------------------------------------------------------- batches


def test_documented_example_without_shuffle() -> None:
    batch_sampler = BucketBatchSampler(**arguments(shuffle=False))
    expected = [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    expected += [[15, 16, 17, 18, 19], [20, 21, 22, 23, 24]]
    assert list(batch_sampler) == expected
    assert list(batch_sampler) == expected
    assert len(batch_sampler) == 8


def test_attributes_tell_what_is_in_the_buckets() -> None:
    batch_sampler = BucketBatchSampler(
        **arguments(sizes=torch.tensor([7, 0, 24, 5, 6]), bucket_boundaries=BOUNDARIES.flip(0))
    )
    assert batch_sampler.bucket_boundaries.tolist() == [0, 6, 15, 25]
    assert batch_sampler.num_buckets == 3
    assert batch_sampler.num_samples == 5
    assert batch_sampler.bucket_sizes.tolist() == [2, 2, 1]
    assert batch_sampler.bucket_element_indices == [[1, 3], [0, 4], [2]]
    assert [type(one) for one in batch_sampler.base_batch_samplers] == [BatchSampler] * 3


class Reference:
    """The rule in plain words, with the same random numbers in the same order."""

    def __init__(self, buckets: list[list[int]], batch_sizes: list[int], drop_last: bool) -> None:
        self.buckets, self.batch_sizes, self.drop_last = buckets, batch_sizes, drop_last

    def epoch(self, random: torch.Generator) -> list[list[int]]:
        for bucket in self.buckets:
            permutation = torch.randperm(len(bucket), generator=random, device=random.device)
            bucket[:] = [bucket[i] for i in permutation]
        waiting = []
        for bucket, size in zip(self.buckets, self.batch_sizes, strict=True):
            cut = [bucket[i : i + size] for i in range(0, len(bucket), size)]
            waiting.append([b for b in cut if not self.drop_last or len(b) == size])
        left = torch.tensor([len(bucket) for bucket in self.buckets], device=random.device)
        batches = []
        while left.sum() > 0:
            k = int(torch.multinomial(left / int(left.sum()), 1, generator=random))
            if waiting[k]:
                batches.append(waiting[k].pop(0))
                left[k] -= len(batches[-1])
            else:
                left[k] = 0
        return batches


@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=60),
    st.lists(st.integers(1, 19), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.integers(0, 1000),
)
def test_shuffled_batches_have_the_originals_random_numbers(
    sizes: list[int], inner: list[int], drop_last: bool, seed: int
) -> None:
    boundaries = [0, *sorted(inner), 20]
    batch_sizes = [2 + k for k in range(len(boundaries) - 1)]
    batch_sampler = BucketBatchSampler(
        torch.tensor(sizes),
        torch.tensor(boundaries),
        BatchSampler,
        {"drop_last": drop_last},
        {"batch_size": batch_sizes},
        generator=generator(seed),
    )
    reference = Reference(
        [
            [i for i, size in enumerate(sizes) if low <= size < high]
            for low, high in itertools.pairwise(boundaries)
        ],
        batch_sizes,
        drop_last,
    )
    random = generator(seed)
    for _ in range(3):  # each epoch shuffles what the one before left
        assert list(batch_sampler) == reference.epoch(random)
        assert batch_sampler.bucket_element_indices == reference.buckets


def test_seed_comes_from_the_global_generator_where_none_is_given() -> None:
    def batches() -> list[list[int]]:
        torch.manual_seed(5)
        return list(BucketBatchSampler(**arguments()))

    assert batches() == batches()


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_element_is_in_one_batch_of_its_own_bucket(shuffle: bool) -> None:
    batch_sampler = BucketBatchSampler(**arguments(shuffle=shuffle))
    for _ in range(3):
        batches = list(batch_sampler)
        assert sorted(chain.from_iterable(batches)) == list(range(25))
        assert len(batches) == len(batch_sampler)
        for batch in batches:
            assert len({sum(size >= b for b in (6, 15)) for size in batch}) == 1


def test_size_aware_sampler_inside_the_buckets() -> None:
    changes = {
        "base_batch_sampler_class": SizeAwareBatchSampler,
        "base_batch_sampler_shared_kwargs": {"sizeof": SIZES, "info_logger": None},
        "base_batch_sampler_individual_kwargs": {"max_total_size": [10, 30, 50]},
    }
    batch_sampler = BucketBatchSampler(**arguments(**changes, shuffle=False))
    expected = [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9], [10, 11], [12, 13], [14]]
    expected += [[15, 16, 17], [18, 19], [20, 21], [22, 23], [24]]
    assert list(batch_sampler) == expected
    shuffled = BucketBatchSampler(**arguments(**changes))
    for batch in shuffled:
        assert sum(batch) <= {0: 10, 1: 30, 2: 50}[sum(batch[0] >= b for b in (6, 15))]


def test_a_sampler_that_copies_its_indices_cannot_be_shuffled() -> None:
    changes = {
        "base_batch_sampler_class": brim.data.SizeAwareBatchSampler,
        "base_batch_sampler_shared_kwargs": {"sizeof": SIZES},
        "base_batch_sampler_individual_kwargs": {"max_total_size": [10, 30, 50]},
    }
    batches = list(BucketBatchSampler(**arguments(**changes, shuffle=False)))
    assert sorted(chain.from_iterable(batches)) == list(range(25))
    with pytest.raises(TypeError, match="copies its indices"):
        BucketBatchSampler(**arguments(**changes))


class EagerSampler(Sampler[list[int]]):
    """Makes all of its batches when it is asked for an iterator."""

    def __init__(self, source: list[int]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[i] for i in self.source])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "base_batch_sampler_class": EagerSampler,
            "base_batch_sampler_shared_kwargs": None,
            "base_batch_sampler_individual_kwargs": None,
        },
    ],
)
def test_iterators_alive_at_once_do_not_disturb_each_other(changes: dict[str, Any]) -> None:
    def make() -> BucketBatchSampler:
        return BucketBatchSampler(**arguments(**changes, generator=generator(3)))

    together, alone = make(), list(make())
    first, second = iter(together), iter(together)
    taken: list[list[list[int]]] = [[next(first)], []]
    taken[0].append(next(first))
    for one, two in itertools.zip_longest(second, first):
        taken[1] += [one] if one is not None else []
        taken[0] += [two] if two is not None else []
    for batches in taken:
        assert sorted(chain.from_iterable(batches)) == list(range(25))
        for batch in batches:
            assert len({sum(size >= b for b in (6, 15)) for size in batch}) == 1
    # Each is a cut of its own shuffle: the first of the very one it would have had alone.
    for k in range(3):
        in_bucket = [
            [b for b in batches if b[0] in range(*BOUNDARIES[k : k + 2].tolist())]
            for batches in (taken[0], alone)
        ]
        assert in_bucket[0] == in_bucket[1]


def test_abandoned_iterator_leaves_the_next_epoch_whole() -> None:
    batch_sampler = BucketBatchSampler(**arguments())
    kept = iter(batch_sampler)
    next(kept)
    assert sorted(chain.from_iterable(batch_sampler)) == list(range(25))


@pytest.mark.parametrize("workers", [0, 2])
def test_works_as_the_batch_sampler_of_a_data_loader(workers: int) -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(
        SIZES,  # type: ignore[arg-type]
        batch_sampler=BucketBatchSampler(**arguments(shuffle=False)),
        num_workers=workers,
    )
    assert [batch.tolist() for batch in loader] == list(
        BucketBatchSampler(**arguments(shuffle=False))
    )
    assert len(loader) == 8


# ---------------------------------------------------------------- kinds of numbers


@pytest.mark.parametrize("sizes_dtype", [torch.uint8, torch.int64, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_sizes_and_boundaries_may_have_different_dtypes(
    sizes_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    batch_sampler = BucketBatchSampler(
        **arguments(sizes=SIZES.to(sizes_dtype), bucket_boundaries=BOUNDARIES.to(dtype))
    )
    assert batch_sampler.bucket_sizes.tolist() == [6, 9, 10]


def test_integers_that_no_double_holds_are_told_apart() -> None:
    sizes = torch.tensor([2**53, 2**53 + 1])
    with pytest.warns(UserWarning, match="1 elements are outside"):
        one = BucketBatchSampler(
            sizes, sizes, BatchSampler, {"batch_size": 1, "drop_last": False}, shuffle=False
        )
    assert list(one) == [[0]]


def test_default_device_does_not_matter() -> None:
    expected = list(BucketBatchSampler(**arguments(generator=generator(2))))
    with torch.device("meta"):
        batch_sampler = BucketBatchSampler(**arguments(generator=generator(2)))
        assert list(batch_sampler) == expected
        assert create_buckets(SIZES, 5, 5).bucket_sizes.tolist() == [5] * 5


def test_last_boundary_may_be_infinite() -> None:
    batch_sampler = BucketBatchSampler(
        **arguments(bucket_boundaries=torch.tensor([0, 6, 15, math.inf]))
    )
    assert batch_sampler.bucket_sizes.tolist() == [6, 9, 10]


def test_empty_buckets_are_passed_over() -> None:
    for shuffle in (False, True):
        batch_sampler = BucketBatchSampler(
            **arguments(bucket_boundaries=torch.tensor([-25, 0, 25, 50]), shuffle=shuffle)
        )
        assert batch_sampler.bucket_sizes.tolist() == [0, 25, 0]
        assert sorted(chain.from_iterable(batch_sampler)) == list(range(25))
        assert len(batch_sampler) == 9


@pytest.mark.cuda
def test_sizes_and_generator_may_be_on_a_gpu() -> None:
    def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cuda")

    for sizes, where in ((on_gpu(SIZES), "cuda"), (on_gpu(SIZES), "cpu"), (SIZES, "cuda")):
        batch_sampler = BucketBatchSampler(
            **arguments(sizes=sizes, generator=torch.Generator(where).manual_seed(1))
        )
        assert batch_sampler.bucket_sizes.device == sizes.device
        assert sorted(chain.from_iterable(batch_sampler)) == list(range(25))
        reference = Reference(
            [list(range(low, high)) for low, high in itertools.pairwise([0, 6, 15, 25])],
            [2, 3, 5],
            drop_last=False,
        )
        batch_sampler = BucketBatchSampler(
            **arguments(sizes=sizes, generator=torch.Generator(where).manual_seed(1))
        )
        random = torch.Generator(where).manual_seed(1)
        for _ in range(2):
            assert list(batch_sampler) == reference.epoch(random)
    on_both = create_buckets(on_gpu(SIZES), 5, 3)
    assert torch.equal(on_both.bucket_boundaries, create_buckets(SIZES, 5, 3).bucket_boundaries)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"sizes": SIZES.tolist()}, TypeError, "sizes should be a torch tensor"),
        ({"sizes": SIZES.reshape(5, 5)}, ValueError, "sizes should be a 1D tensor"),
        ({"sizes": SIZES.to(torch.complex64)}, ValueError, "sizes.dtype=torch.complex64"),
        ({"sizes": SIZES > 3}, ValueError, "sizes.dtype=torch.bool"),
        ({"bucket_boundaries": [0, 25]}, TypeError, "bucket_boundaries should be a torch tensor"),
        ({"bucket_boundaries": BOUNDARIES[None]}, ValueError, "bucket_boundaries should be a 1D"),
        ({"bucket_boundaries": BOUNDARIES[:1]}, ValueError, "at least 2 numbers, but got 1"),
        ({"bucket_boundaries": BOUNDARIES.to(torch.complex64)}, ValueError, "complex64"),
        ({"bucket_boundaries": torch.tensor([0, 6, 6, 25])}, ValueError, "without duplicates"),
        (
            {"bucket_boundaries": torch.tensor([0, math.nan, 6, 25])},
            ValueError,
            "without duplicates",
        ),
        ({"shuffle": 1}, TypeError, "shuffle should be a boolean value, but got shuffle=1"),
        ({"base_batch_sampler_class": DataLoader}, TypeError, "inherited from"),
        ({"base_batch_sampler_class": 3}, TypeError, "inherited from"),
        ({"base_batch_sampler_shared_kwargs": [("a", 1)]}, TypeError, "should be a dictionary"),
        ({"base_batch_sampler_shared_kwargs": {1: 1}}, TypeError, "string keys"),
        ({"base_batch_sampler_individual_kwargs": [("a", 1)]}, TypeError, "be a dictionary"),
        ({"base_batch_sampler_individual_kwargs": {1: [1, 2, 3]}}, TypeError, "string keys"),
        (
            {"base_batch_sampler_individual_kwargs": {"batch_size": [2, 3]}},
            ValueError,
            r"length of 3.*\[2\]",
        ),
        ({"base_batch_sampler_shared_kwargs": None}, TypeError, "drop_last"),
        ({"base_batch_sampler_shared_kwargs": {"shuffle": 1}}, TypeError, "shuffle"),
        ({"bucket_boundaries": BOUNDARIES + 25}, RuntimeError, "outside the bucket ranges"),
        ({"sizes": SIZES[:0]}, RuntimeError, "outside the bucket ranges"),
    ],
)
def test_wrong_argument_is_an_error_that_names_it(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        BucketBatchSampler(**arguments(**changes))


@pytest.mark.parametrize("size", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_size_that_is_not_finite_is_a_value_error_that_names_its_index(
    size: float, dtype: torch.dtype
) -> None:
    sizes = SIZES.to(dtype)
    sizes[7] = size
    with pytest.raises(ValueError, match=rf"sizes\[7\]={size} is not allowed"):
        BucketBatchSampler(**arguments(sizes=sizes))


def test_elements_outside_the_buckets_are_counted_in_a_warning() -> None:
    with pytest.warns(UserWarning, match="5 elements are outside the buckets provided"):
        batch_sampler = BucketBatchSampler(**arguments(bucket_boundaries=BOUNDARIES + 5))
    assert sorted(chain.from_iterable(batch_sampler)) == list(range(5, 25))
    assert batch_sampler.num_samples == 20


def test_values_of_individual_keywords_may_be_read_once_only() -> None:
    batch_sampler = BucketBatchSampler(
        **arguments(
            base_batch_sampler_individual_kwargs={"batch_size": iter([2, 3, 5])}, shuffle=False
        )
    )
    assert len(batch_sampler) == 8
