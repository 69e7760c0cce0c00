"""What a resumed run loses is reported, and what has no length can be resumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from brim.data import (
    BucketBatchSampler,
    PackedBatchSampler,
    SizeAwareBatchSampler,
    size_aware_batching,
)


def test_report_after_loading_is_of_what_is_left_and_names_what_ranks_cannot_share() -> None:
    before = SizeAwareBatchSampler(range(10), [10] * 10, 10)
    next(iter(before))
    after = [
        SizeAwareBatchSampler(range(10), [10] * 10, 10, rank=rank, world_size=2) for rank in (0, 1)
    ]
    for sampler in after:
        sampler.load_state_dict(before.state_dict())
    report = after[0].report()
    assert (report.samples, report.batched, report.batches) == (9, 8, 8)
    lost = report.left_out["too few for ranks"].tolist()
    used = [index for sampler in after for batch in sampler for index in batch]
    assert sorted([0, *used, *lost]) == list(range(10))
    assert after[0].report().samples == 10, "the next epoch is whole again"


class WithoutLength:
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    "options",
    [{}, {"as_tensors": True}, {"shuffle": True, "seed": 1}, {"world_size": 2}],
    ids=str,
)
def test_a_sampler_without_a_length_can_be_resumed(options: dict[str, Any]) -> None:
    def make() -> SizeAwareBatchSampler:
        return SizeAwareBatchSampler(WithoutLength(), [3] * 10, 6, **options)

    whole = [list(map(int, batch)) for batch in make()]
    sampler = make()
    next(iter(sampler))
    resumed = make()
    resumed.load_state_dict(sampler.state_dict())
    assert [list(map(int, batch)) for batch in resumed] == whole[1:]


def test_totals_beyond_what_a_double_holds_are_not_over_the_budget() -> None:
    sizes = [2**53 - 1, 1, 1, 1]
    sampler = SizeAwareBatchSampler(range(4), sizes.__getitem__, 2**53 + 1)
    assert all(sum(sizes[index] for index in batch) <= 2**53 + 1 for batch in iter(sampler))
    assert list(size_aware_batching([1, 2], int, 2**63 - 1)) == [[1, 2]]


def test_batch_sizes_may_be_an_array() -> None:
    numpy = pytest.importorskip("numpy")
    sampler = BucketBatchSampler(
        range(10), [0, 4, 10], batch_size=numpy.array([2, 3]), shuffle=False
    )
    assert list(sampler) == [[0, 1], [2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_numpy_function_is_a_callable_and_no_array() -> None:
    numpy = pytest.importorskip("numpy")
    assert list(SizeAwareBatchSampler(range(3), numpy.size, 2)) == [[0, 1], [2]]


SIZES = [(13 * i) % 29 + 1 for i in range(1000)]
ELASTIC: dict[str, Callable[..., Any]] = {
    "ordered": lambda **o: SizeAwareBatchSampler(range(1000), SIZES, 60, **o),
    "ordered, shuffled": lambda **o: SizeAwareBatchSampler(
        range(1000), SIZES, 60, shuffle=True, seed=2, **o
    ),
    "packed": lambda **o: PackedBatchSampler(SIZES, 60, window=100, **o),
    "packed, shuffled": lambda **o: PackedBatchSampler(SIZES, 60, window=100, shuffle=True, **o),
    "packed, padded": lambda **o: PackedBatchSampler(
        SIZES, 90, window=100, shuffle=True, cost="padded", **o
    ),
    "bucket": lambda **o: BucketBatchSampler(SIZES, [0, 8, 16, 30], max_total_size=90, seed=2, **o),
    "bucket, counts": lambda **o: BucketBatchSampler(
        SIZES, [0, 8, 16, 30], batch_size=[8, 4, 2], seed=2, **o
    ),
}


@pytest.mark.parametrize("sizes", [(4, 2), (4, 3), (4, 2, 3), (3, 4, 1)], ids=str)
@pytest.mark.parametrize("kind", ELASTIC)
def test_restarts_with_other_world_sizes_lose_and_repeat_nothing(
    kind: str, sizes: tuple[int, ...]
) -> None:
    make = ELASTIC[kind]
    for steps in (0, 1, 7, 24):
        used: list[int] = []
        state = None
        for phase, world_size in enumerate(sizes):
            states = []
            for rank in range(world_size):
                sampler = make(rank=rank, world_size=world_size)
                if state is not None:
                    sampler.load_state_dict(state)
                last = phase == len(sizes) - 1
                for batch in itertools.islice(sampler, None if last else steps):
                    used += batch
                states.append(sampler.state_dict())
            assert all(other == states[0] for other in states)
            state = states[0]
        assert sorted(used) == list(range(1000))


def test_iterators_are_made_by_samplers_alone() -> None:
    kind = type(iter(SizeAwareBatchSampler(range(2), [1, 1], 2)))
    for make in (kind, lambda: kind.__new__(kind), lambda: type("Sub", (kind,), {})):
        with pytest.raises(TypeError):
            make()
