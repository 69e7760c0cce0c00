"""BucketBatchSampler over batch sampler classes: torch's, brim's, a user's own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Sampler

from brim.compat.bionemo.size_aware_batching.sampler import (
    SizeAwareBatchSampler as OriginalSizeAwareBatchSampler,
)
from brim.data import BucketBatchSampler, SizeAwareBatchSampler, create_buckets

SIZES = torch.arange(25)
BOUNDARIES = torch.tensor([0, 6, 15, 25])


def bucket_of(size: float, boundaries: list[float]) -> int:
    return sum(size >= boundary for boundary in boundaries) - 1


class Pairs(Sampler[list[int]]):
    """A user's own: pairs from both ends, in an order of its own; no keyword that brim knows."""

    def __init__(self, indices: list[int], times: int = 1) -> None:
        self.indices = indices
        self.times = times

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.times):
            rest = list(self.indices)
            while rest:
                yield [rest.pop(0), *([rest.pop()] if rest else [])]

    def __len__(self) -> int:
        return self.times * ((len(self.indices) + 1) // 2)


class Endless(Sampler[list[int]]):
    """Has no length."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        yield list(self.indices)


# ---------------------------------------------------------------- the documented examples


def test_the_originals_first_example() -> None:
    sampler = BucketBatchSampler(
        sizes=SIZES,
        bucket_boundaries=BOUNDARIES,
        base_batch_sampler_class=BatchSampler,
        base_batch_sampler_shared_kwargs={"drop_last": False},
        base_batch_sampler_individual_kwargs={"batch_size": [2, 3, 5]},
        shuffle=False,
    )
    expected = [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    expected += [[15, 16, 17, 18, 19], [20, 21, 22, 23, 24]]
    assert list(sampler) == expected
    assert len(sampler) == 8
    direct = BucketBatchSampler(SIZES, BOUNDARIES, batch_size=[2, 3, 5], shuffle=False)
    assert list(direct) == expected


@pytest.mark.parametrize("base", [SizeAwareBatchSampler, OriginalSizeAwareBatchSampler])
def test_the_originals_example_with_a_budget(base: type[Sampler[list[int]]]) -> None:
    costs = SIZES.tolist()
    arguments: dict[str, Any] = {"sizeof": costs.__getitem__, "max_total_size": 40}
    sampler = BucketBatchSampler(SIZES, BOUNDARIES, base, arguments, {}, shuffle=False)
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
    ("base", "shared", "individual"),
    [
        (BatchSampler, {"drop_last": False}, {"batch_size": [2, 3, 5]}),
        (BatchSampler, {"batch_size": 4, "drop_last": False}, {}),
        (BatchSampler, {"batch_size": 4}, {"drop_last": [False, False, False]}),
        (SizeAwareBatchSampler, {"sizeof": SIZES, "max_total_size": 40}, {}),
        (SizeAwareBatchSampler, {"sizeof": SIZES}, {"max_total_size": [20, 30, 40]}),
        (SizeAwareBatchSampler, {"sizeof": SIZES, "max_total_size": 99, "cost": "padded"}, {}),
        (OriginalSizeAwareBatchSampler, {"sizeof": SIZES, "max_total_size": 40}, {}),
        (Pairs, {}, {}),
        (Pairs, None, {"times": [1, 2, 3]}),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_class_gives_batches_of_one_bucket_and_resumes(
    base: Any, shared: dict[str, Any] | None, individual: dict[str, list[Any]], shuffle: bool
) -> None:
    def make() -> BucketBatchSampler:
        return BucketBatchSampler(
            SIZES, BOUNDARIES, base, shared, individual, shuffle=shuffle, seed=3
        )

    sampler = make()
    times = individual.get("times", [1, 1, 1])
    boundaries = BOUNDARIES.tolist()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        has_length = base is not OriginalSizeAwareBatchSampler
        expected = len(sampler) if has_length else None
        batches = list(sampler)
        assert expected in (None, len(batches))
        for batch in batches:
            assert len({bucket_of(index, boundaries) for index in batch}) == 1
        assert Counter(itertools.chain.from_iterable(batches)) == {
            index: times[bucket_of(index, boundaries)] for index in range(25)
        }
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


def test_state_beyond_the_end_of_a_users_class_is_refused() -> None:
    sampler = BucketBatchSampler(SIZES, BOUNDARIES, Pairs, seed=5)
    with pytest.raises(ValueError, match="stands after 99 batches, there are only 13"):
        sampler.load_state_dict({**sampler.state_dict(), "cursor": [99]})


def test_two_iterations_of_a_users_class_side_by_side() -> None:
    sampler = BucketBatchSampler(SIZES, BOUNDARIES, Pairs, seed=5)
    expected = list(sampler)
    one, two = iter(sampler), iter(sampler)
    taken = [(next(one), next(two)) for _ in expected]
    assert [first for first, _ in taken] == [second for _, second in taken] == expected


def test_what_only_python_can_run_says_what_it_cannot() -> None:
    for options in ({"world_size": 2, "seed": 0}, {"as_tensors": True}):
        with pytest.raises(ValueError, match="Pairs runs in Python: several ranks and as_tensors"):
            BucketBatchSampler(SIZES, BOUNDARIES, Pairs, **options)
    sampler = BucketBatchSampler(SIZES, BOUNDARIES, Pairs)
    with pytest.raises(TypeError, match="Pairs runs in Python: there is no plan"):
        sampler.plan()
    with pytest.raises(TypeError, match="Pairs runs in Python: there is no report"):
        sampler.report()
    endless = BucketBatchSampler(SIZES, BOUNDARIES, Endless)
    with pytest.raises(TypeError, match="no len"):
        len(endless)
    assert len([batch for batch in iter(endless)]) == 3  # noqa: C416 - list() would ask for len


def test_drop_last_leaves_out_and_reports() -> None:
    def left_out(sampler: BucketBatchSampler) -> list[int]:
        return sampler.report().left_out["dropped last"].tolist()  # type: ignore[no-any-return]

    for sampler in (
        BucketBatchSampler(SIZES, BOUNDARIES, batch_size=4, drop_last=True, shuffle=False),
        BucketBatchSampler(
            SIZES,
            BOUNDARIES,
            BatchSampler,
            {"drop_last": True},
            {"batch_size": [4, 4, 4]},
            shuffle=False,
        ),
    ):
        assert list(map(len, sampler)) == [4] * len(sampler)
        assert left_out(sampler) == [4, 5, 14, 23, 24]


@pytest.mark.parametrize("base", [None, Pairs])
def test_sizes_outside_are_left_out_with_a_warning(base: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4} if base is None else {}
    with pytest.warns(UserWarning, match=r"10 of 25 samples are left out, outside buckets: 0, 1"):
        sampler = BucketBatchSampler(SIZES, [5, 20], base, shuffle=False, **options)
    assert list(itertools.chain.from_iterable(sampler)).__len__() == 15
    assert {index for batch in sampler for index in batch} == set(range(5, 20))
    if base is None:
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
    foreign = BucketBatchSampler(sizes, boundaries, Pairs, shuffle=False)
    for batch in foreign:
        assert len({bucket_of(sizes[index], ascending) for index in batch}) == 1


def test_made_buckets_are_boundaries_that_leave_nothing_out() -> None:
    sizes = torch.randint(1, 500, (2000,), generator=torch.Generator().manual_seed(0))
    buckets = create_buckets(sizes, max_width=50, min_bucket_count=100)
    sampler = BucketBatchSampler(sizes, buckets.bucket_boundaries, max_total_size=5000, seed=0)
    batches = list(sampler)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(2000))
    assert max(len(batch) * int(sizes[batch].max()) for batch in batches) <= 5000
