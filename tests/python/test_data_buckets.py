"""BucketBatchSampler: which samples share a batch, and in which order."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from brim.data import (
    BucketBatchSampler,
    PackedBatchSampler,
    SizeAwareBatchSampler,
    create_buckets,
)

SIZES = torch.arange(25)
BOUNDARIES = torch.tensor([0, 6, 15, 25])


def bucket_of(size: float, boundaries: list[float]) -> int:
    return sum(size >= boundary for boundary in boundaries) - 1


def test_a_batch_size_for_each_bucket() -> None:
    sampler = BucketBatchSampler(SIZES, BOUNDARIES, batch_size=[2, 3, 5], shuffle=False)
    expected = [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    expected += [[15, 16, 17, 18, 19], [20, 21, 22, 23, 24]]
    assert list(sampler) == expected
    assert len(sampler) == 8


def test_a_budget_inside_each_bucket() -> None:
    sampler = BucketBatchSampler(SIZES, BOUNDARIES, max_total_size=40, cost="sum", shuffle=False)
    expected: list[list[int]] = []
    for low, high in itertools.pairwise(BOUNDARIES.tolist()):
        batch: list[int] = []
        for index in range(low, high):
            if sum(batch) + index > 40:
                expected.append(batch)
                batch = []
            batch.append(index)
        expected.append(batch)
    assert list(sampler) == expected


@pytest.mark.parametrize(
    "sizes",
    [
        [(5, 1), (5, 1), (5, 9), (1, 1), (1, 1), (1, 8)],
        torch.tensor([(5, 1), (5, 1), (5, 9), (1, 1), (1, 1), (1, 8)]),
        [(5, 1.0), (5, 1), (5, 9), (1, 1), (1, 1), (1, 8)],
    ],
)
def test_the_first_of_several_columns_determines_the_bucket(sizes: Any) -> None:
    sampler = BucketBatchSampler(
        sizes, [0, 3, 9], max_total_size=[10, 9], cost="sum", shuffle=False
    )
    assert list(sampler) == [[3, 4], [5], [0, 1], [2]]
    assert sampler.sizes.tolist() == [5, 5, 5, 1, 1, 1]


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        ((BatchSampler,), {}),
        ((BatchSampler, {"drop_last": False}), {}),
        ((), {"base_batch_sampler_class": BatchSampler}),
        ((), {"base_batch_sampler_shared_kwargs": {"drop_last": False}, "batch_size": 2}),
    ],
)
def test_a_batch_sampler_class_is_refused_and_the_error_says_what_to_use(
    positional: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"batch_size= .*max_total_size=.*brim.compat.bionemo"):
        BucketBatchSampler(SIZES, BOUNDARIES, *positional, **keywords)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": [2, 3, 5]},
        {"batch_size": 4},
        {"max_total_size": 40, "cost": "sum"},
        {"max_total_size": 99},
        {"max_total_size": [99, 3], "cost": ["padded", "count"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_of_one_bucket_and_resume(options: dict[str, Any], shuffle: bool) -> None:
    def make() -> BucketBatchSampler:
        return BucketBatchSampler(SIZES, BOUNDARIES, shuffle=shuffle, seed=3, **options)

    sampler = make()
    boundaries = BOUNDARIES.tolist()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        expected = len(sampler)
        batches = list(sampler)
        assert len(batches) == expected
        for batch in batches:
            assert len({bucket_of(index, boundaries) for index in batch}) == 1
        assert sorted(itertools.chain.from_iterable(batches)) == list(range(25))
        order = [bucket_of(batch[0], boundaries) for batch in batches]
        assert (order == sorted(order)) or shuffle
        for done in (0, 1, len(batches) - 2):
            head = list(itertools.islice(iter(sampler), done))
            resumed = make()
            resumed.load_state_dict(sampler.state_dict(batches=done))
            head += itertools.islice(iter(resumed), 2)
            again = make()
            again.load_state_dict(resumed.state_dict(batches=len(head) - done))
            assert head + list(again) == batches


def test_shuffling_mixes_buckets_and_samples() -> None:
    sampler = BucketBatchSampler(SIZES.repeat(8), BOUNDARIES, batch_size=4, seed=1)
    order = [bucket_of(batch[0] % 25, BOUNDARIES.tolist()) for batch in sampler]
    assert order != sorted(order)
    assert set(order) == {0, 1, 2}


def test_drop_last_leaves_out_and_reports() -> None:
    sampler = BucketBatchSampler(SIZES, BOUNDARIES, batch_size=4, drop_last=True, shuffle=False)
    assert list(map(len, sampler)) == [4] * len(sampler)
    assert sampler.report().left_out["dropped last"].tolist() == [4, 5, 14, 23, 24]


def test_sizes_outside_are_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"10 of 25 samples are left out, outside buckets: 0, 1"):
        sampler = BucketBatchSampler(SIZES, [5, 20], batch_size=4, shuffle=False)
    assert sorted(itertools.chain.from_iterable(sampler)) == list(range(5, 20))
    outside = sampler.report().left_out["outside buckets"].tolist()
    assert outside == [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]


@given(
    st.lists(st.integers(0, 30) | st.floats(0, 30), min_size=1, max_size=40),
    st.lists(st.integers(1, 30) | st.floats(0.5, 30), min_size=1, max_size=5, unique_by=float),
    st.integers(1, 5),
    st.booleans(),
)
def test_buckets_hold_their_lower_boundary_and_not_their_upper(
    sizes: list[float], inner: list[float], batch_size: int, shuffle: bool
) -> None:
    boundaries = [0, *inner, 31]
    ascending = sorted(map(float, boundaries))
    sampler = BucketBatchSampler(sizes, boundaries, batch_size=batch_size, shuffle=shuffle, seed=0)
    batches = list(sampler)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) <= batch_size
        assert len({bucket_of(sizes[index], ascending) for index in batch}) == 1


def test_made_buckets_are_boundaries_that_leave_nothing_out() -> None:
    sizes = torch.randint(1, 500, (2000,), generator=torch.Generator().manual_seed(0))
    buckets = create_buckets(sizes, max_width=50, min_bucket_count=100)
    sampler = BucketBatchSampler(sizes, buckets.bucket_boundaries, max_total_size=5000, seed=0)
    batches = list(sampler)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(2000))
    assert max(len(batch) * int(sizes[batch].max()) for batch in batches) <= 5000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")
@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize(
    ("most", "make"),
    [
        (3.0, lambda sizes, **o: BucketBatchSampler(sizes, [0, 50, 90, 256], seed=0, **o)),
        (0.5, lambda sizes, **o: PackedBatchSampler(sizes, shuffle=True, seed=0, **o)),
        (0.5, lambda sizes, **o: SizeAwareBatchSampler(range(len(sizes)), sizes, **o)),
    ],
)
@pytest.mark.parametrize("oversize", ["leave_out", "truncate"])
def test_a_sampler_keeps_few_bytes_per_sample(most: float, make: Any, oversize: str) -> None:
    sizes = torch.randint(1, 100, (8_000_000,), dtype=torch.uint8)
    sizes[::1000] = 255

    def held() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    make(sizes[:1000], max_total_size=200, oversize=oversize)
    before = held()
    sampler = make(sizes, max_total_size=200, oversize=oversize)
    next(iter(sampler))
    assert held() - before < most * len(sizes)
