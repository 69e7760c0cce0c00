"""Samples that come one by one: sizes asked for late, no length, other people's samplers."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from brim.data import PackedBatchSampler, SizeAwareBatchSampler, size_aware_batching


class Counting:
    """Sizes by index, and what was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, index: int) -> int:
        self.asked.append(index)
        return 1 + index % 3


class Source:
    """Indices without a length, and how many were taken."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        for index in itertools.count() if self.count is None else range(self.count):
            self.taken += 1
            yield index


# ---------------------------------------------------------------- lazily


@pytest.mark.parametrize(
    "sampler", [range(1000), list(range(1000)), SequentialSampler(range(1000)), Source()]
)
def test_sizes_are_asked_for_as_batches_are_needed(sampler: Any) -> None:
    sizeof = Counting()
    batches = SizeAwareBatchSampler(sampler, sizeof, 6, cost="sum")
    assert sizeof.asked == []
    running = iter(batches)
    assert sizeof.asked == []
    assert next(running) == [0, 1, 2]
    assert sizeof.asked == [0, 1, 2, 3]
    assert next(running) == [3, 4, 5]
    assert sizeof.asked == list(range(7))


def test_len_asks_for_each_size_once_and_the_iteration_not_again() -> None:
    sizeof = Counting()
    sampler = SizeAwareBatchSampler(range(20), sizeof, 6, cost="sum")
    assert len(sampler) == len(sampler) == len(list(sampler)) == 7
    assert sampler.report().batches == 7
    assert sorted(sizeof.asked) == list(range(20))


def test_a_repeated_index_is_asked_for_once() -> None:
    sizeof = Counting()
    sampler = SizeAwareBatchSampler([5, 5, 2, 5], sizeof, 6)
    assert len(sampler) == 2
    assert list(sampler) == [[5, 5], [2, 5]]
    assert sorted(sizeof.asked) == [2, 5]


@pytest.mark.parametrize("options", [{"shuffle": True, "seed": 1}, {"world_size": 2}])
def test_shuffling_and_ranks_work_with_a_callable(options: dict[str, Any]) -> None:
    by_call = SizeAwareBatchSampler(range(50), lambda index: 1 + index % 3, 6, **options)
    by_table = SizeAwareBatchSampler(range(50), [1 + i % 3 for i in range(50)], 6, **options)
    expected = list(by_table)
    assert list(by_call) == expected
    as_tensors = SizeAwareBatchSampler(
        range(50), lambda index: 1 + index % 3, 6, as_tensors=True, **options
    )
    assert [batch.tolist() for batch in as_tensors] == expected


def test_data_without_an_end() -> None:
    endless = SizeAwareBatchSampler(itertools.count(), lambda index: 1 + index % 3, 6, cost="sum")
    assert list(itertools.islice(endless, 2)) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(TypeError, match="no length"):
        len(endless)
    texts = (str(10**number) for number in itertools.count())
    batches = size_aware_batching(texts, len, 6, cost="sum")
    assert next(batches) == ["1", "10", "100"]
    assert next(batches) == ["1000"]


def test_the_generator_looks_one_sample_ahead_and_no_further() -> None:
    source = Source()
    batches = size_aware_batching(source, lambda index: 1, 4)
    assert source.taken == 0
    assert next(batches) == [0, 1, 2, 3]
    assert source.taken == 5


def test_the_generator_collates_and_takes_mappings_costs_and_budgets() -> None:
    sizes = {"a": 1, "b": 2, "c": 2, "d": 1}
    letters = list("abcd")
    assert list(size_aware_batching(letters, sizes, 3, "".join, cost="sum")) == ["ab", "cd"]
    assert list(size_aware_batching(letters, sizes, 4, "".join, cost="padded")) == ["ab", "cd"]
    assert list(size_aware_batching(letters, sizes, 3, "".join, cost="count")) == ["abc", "d"]
    several = size_aware_batching(
        letters, lambda letter: (sizes[letter], 1), [9, 3], "".join, cost=["sum", "count"]
    )
    assert list(several) == ["abc", "d"]


def test_floats_are_added_up_as_floats() -> None:
    assert list(size_aware_batching([0.5, 0.25, 0.5], float, 0.75, cost="sum")) == [
        [0.5, 0.25],
        [0.5],
    ]


# ---------------------------------------------------------------- without a length


def test_sampler_without_a_length_has_none_but_everything_else() -> None:
    for sizeof in ([1, 2, 3] * 4, lambda index: 1 + index % 3, torch.tensor([1, 2, 3] * 4) / 2):
        sampler = SizeAwareBatchSampler(Source(12), sizeof, 6)
        with pytest.raises(TypeError, match="no length"):
            len(sampler)
        batches = list(sampler)
        assert list(itertools.chain.from_iterable(batches)) == list(range(12))
        assert list(sampler) == batches
        assert sampler.report().batches == len(batches)
        assert sampler.plan().indices.tolist() == list(range(12))
        tensors = SizeAwareBatchSampler(Source(12), sizeof, 6, as_tensors=True)
        assert [batch.tolist() for batch in tensors] == batches


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (12, ValueError, "sampler's index must be from 0 to 11.*got 12"),
        (-1, ValueError, "sampler's index must be at least 0, got -1"),
        ("a", TypeError, "sampler's index must be an int, got 'a'"),
        (0.5, TypeError, "sampler's index must be an int, got 0.5"),
    ],
)
def test_index_without_a_size_is_an_error(index: Any, error: type[Exception], text: str) -> None:
    def indices() -> Iterator[Any]:
        yield 3
        yield index

    with pytest.raises(error, match=text):
        next(iter(SizeAwareBatchSampler(indices(), [1] * 12, 6)))


def test_an_iterator_that_is_never_used_costs_nothing() -> None:
    """DataLoaders with workers ask for one more than they use."""
    once = iter(range(10))
    sampler = SizeAwareBatchSampler(once, lambda index: 1, 4)
    sampler.load_state_dict({**sampler.state_dict(), "cursor": [4]})
    iter(sampler)
    assert next(iter(sampler)) == [4, 5, 6, 7]

    random = SizeAwareBatchSampler(RandomSampler(range(60)), SIZES, 25)
    counted, plan = len(random), random.plan()
    iter(random)
    batches = [batch for batch in iter(random)]  # noqa: C416 - list() would ask for len
    assert len(batches) == counted
    assert list(itertools.chain.from_iterable(batches)) == plan.indices.tolist()

    generator = torch.Generator().manual_seed(1)
    drawn = PackedBatchSampler(SIZES, 25, shuffle=True, generator=generator)
    plan = drawn.plan()
    iter(drawn)
    assert list(itertools.chain.from_iterable(drawn)) == plan.indices.tolist()
    assert list(itertools.chain.from_iterable(drawn)) != plan.indices.tolist()


# ---------------------------------------------------------------- errors on the way


def test_error_of_the_data_comes_through_and_ends_the_iteration() -> None:
    class Breaking:
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise OSError("disk")

    sampler = SizeAwareBatchSampler(Breaking(), lambda index: 1, 3)
    running = iter(sampler)
    assert next(running) == [0, 1, 2]
    with pytest.raises(OSError, match="disk"):
        next(running)
    assert next(running, None) is None
    state = sampler.state_dict()
    assert not state["finished"]
    assert state["cursor"] == [3]  # where the last whole batch ended: nothing is lost
    sampler.load_state_dict({**state, "cursor": [5]})
    with pytest.raises(OSError, match="disk"):
        next(iter(sampler))


def test_error_of_sizeof_comes_through_and_no_sample_is_lost_on_resuming() -> None:
    broken = True

    def sizeof(index: int) -> int:
        if index == 5 and broken:
            raise OSError("network")
        return 1

    sampler = SizeAwareBatchSampler(range(8), sizeof, 3)
    running = iter(sampler)
    assert next(running) == [0, 1, 2]
    with pytest.raises(OSError, match="network"):
        next(running)
    assert next(running, None) is None
    broken = False
    sampler.load_state_dict(sampler.state_dict())
    assert [batch for batch in iter(sampler)] == [[3, 4, 5], [6, 7]]  # noqa: C416

    batches = size_aware_batching([1, 2, "x"], lambda sample: sample + 0, 2)
    assert next(batches) == [1]
    with pytest.raises(TypeError):
        next(batches)
    assert next(batches, None) is None


def test_state_beyond_the_end_is_of_other_samples() -> None:
    sampler = SizeAwareBatchSampler(Source(4), lambda index: 1, 3)
    sampler.load_state_dict({**sampler.state_dict(), "cursor": [9]})
    with pytest.raises(ValueError, match="stands at sample 9, and there are only 4"):
        next(iter(sampler))


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("done", range(9))
def test_streaming_resumes_anywhere_also_with_prefetching_and_from_a_table(done: int) -> None:
    def make() -> SizeAwareBatchSampler:
        return SizeAwareBatchSampler(range(20), lambda index: 1 + index % 3, 5)

    whole = [batch for batch in iter(make())]  # noqa: C416 - list() would ask for len
    sampler = make()
    running = iter(sampler)
    head = list(itertools.islice(running, done))
    state = sampler.state_dict()
    list(itertools.islice(running, 2))
    assert sampler.state_dict(batches=done)["cursor"] == state["cursor"]

    streaming = make()
    streaming.load_state_dict(state)
    assert head + [batch for batch in iter(streaming)] == whole  # noqa: C416
    counted = make()
    len(counted)  # now it has a table of sizes, and the state is of a stream
    counted.load_state_dict(state)
    assert len(counted) == len(whole) - done
    assert head + list(counted) == whole
    counted_after = make()
    counted_after.load_state_dict(state)
    assert len(counted_after) == len(whole) - done
    assert head + list(counted_after) == whole


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("done", range(6))
def test_streaming_state_on_a_table_where_samples_are_left_out(done: int) -> None:
    sizes = [1, 9, 2, 3, 9, 9, 1, 3, 2, 9]
    order = [1, 0, 2, 4, 3, 5, 6, 9, 7, 8]

    def make(**options: Any) -> SizeAwareBatchSampler:
        return SizeAwareBatchSampler(order, sizes.__getitem__, 3, **options)

    sampler = make()
    whole = list(make())
    running = iter(sampler)
    head = [batch for _, batch in zip(range(done), running, strict=False)]
    ranks = [make(rank=rank, world_size=2) for rank in (0, 1)]
    rest: list[int] = []
    for rank in ranks:
        rank.load_state_dict(sampler.state_dict(batches=min(done, len(head))))
        rest += itertools.chain.from_iterable(rank)
    expected = set(itertools.chain.from_iterable(whole[done:]))
    assert len(rest) == len(set(rest))
    assert expected >= set(rest)
    assert len(expected - set(rest)) < 2  # one may be too few for two ranks


# ---------------------------------------------------------------- other people's samplers


class Epochs:
    """A distributed sampler's manners: the same order for an epoch, another for the next."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.count, generator=generator).tolist()


SIZES = [1 + index * 7 % 19 for index in range(60)]


@pytest.mark.parametrize("callable_sizes", [False, True])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(60), generator=torch.Generator().manual_seed(1)),
        RandomSampler(range(60), replacement=True, num_samples=100),
        SubsetRandomSampler(range(10, 50)),
        WeightedRandomSampler([1.0] + [0.1] * 59, 80, replacement=True),
        DistributedSampler(range(60), num_replicas=2, rank=1),
        Epochs(60),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_len_and_the_following_iteration_agree_in_every_epoch(
    sampler: Any, callable_sizes: bool
) -> None:
    sizeof: Any = SIZES.__getitem__ if callable_sizes else SIZES
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sampler is a DistributedSampler")
        batches = SizeAwareBatchSampler(sampler, sizeof, 25)
    orders = []
    for epoch in range(8):
        batches.set_epoch(epoch)
        assert len(batches) == len(batches)
        counted, plan = len(batches), batches.plan()
        got = list(batches)
        assert len(got) == counted
        assert plan.indices.tolist() == list(itertools.chain.from_iterable(got))
        assert all(sum(SIZES[index] for index in batch) <= 25 for batch in got)
        assert sum(map(len, got)) == len(sampler)
        orders.append(str(got))
    assert len(set(orders)) == 8


@pytest.mark.parametrize("sizeof", [SIZES, SIZES.__getitem__], ids=["sizes", "callable"])
def test_epochs_are_passed_on_also_when_a_state_is_loaded(sizeof: Any) -> None:
    def make() -> SizeAwareBatchSampler:
        return SizeAwareBatchSampler(Epochs(60), sizeof, 25)

    sampler = make()
    sampler.set_epoch(3)
    whole = list(sampler)
    assert list(sampler) == whole
    running = iter(sampler)
    head = list(itertools.islice(running, 4))
    state = sampler.state_dict(batches=4)

    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.sampler.epoch == 3  # type: ignore[attr-defined]
    resumed.set_epoch(3)
    assert len(resumed) == len(whole) - 4
    assert head + list(resumed) == whole

    with pytest.raises(ValueError, match="another run"):
        resumed.load_state_dict({**state, "samples": 1, "epoch": 9})
    assert resumed.sampler.epoch == 3  # type: ignore[attr-defined]


def test_two_iterations_over_a_random_sampler_side_by_side() -> None:
    sampler = SizeAwareBatchSampler(RandomSampler(range(60)), SIZES, 25)
    both = [iter(sampler)]
    got = [next(both[0]), []]
    both.append(iter(sampler))
    for turn in itertools.chain(itertools.islice(itertools.cycle([0, 1]), 10), [0] * 99, [1] * 99):
        got[turn] += next(both[turn], [])
    assert sorted(got[0]) == sorted(got[1]) == list(range(60))
    assert got[0] != got[1]


# ---------------------------------------------------------------- what is kept alive


def test_iterators_and_samplers_are_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        for sizes in (SIZES, SIZES.__getitem__):
            sampler = SizeAwareBatchSampler(range(60), sizes, 25)
            running = iter(sampler)
            next(running)
            sampler.state_dict()
            sampler.load_state_dict(sampler.state_dict())
            gone = weakref.ref(sampler)
            del sampler
            assert gone() is None
            assert len(list(running)) > 0  # which does without its sampler
    finally:
        gc.enable()


def test_a_stream_lets_go_of_the_batches_that_it_gave() -> None:
    class Sample:
        size = 1

    alive: weakref.WeakSet[Sample] = weakref.WeakSet()

    def source() -> Iterator[Sample]:
        for _ in range(100):
            sample = Sample()
            alive.add(sample)
            yield sample

    most = 0
    for batch in size_aware_batching(source(), lambda sample: sample.size, 5):
        most = max(most, len(alive))
        del batch
    assert most <= 5 + 5 + 2
    assert len(alive) <= 1  # the generator's own last one


def test_tensor_batches_stay_as_they_were_after_their_iterator_is_gone() -> None:
    sizes = torch.randint(1, 20, (50_000,), generator=torch.Generator().manual_seed(0))
    for make in (
        lambda **options: SizeAwareBatchSampler(range(50_000), sizes, 100, **options),
        lambda **options: PackedBatchSampler(sizes, 100, shuffle=True, window=500, **options),
    ):
        expected = list(make())
        sampler = make(as_tensors=True)
        batches = list(sampler)
        del sampler
        gc.collect()
        torch.randint(0, 99, (50_000,))  # memory that would be used again
        assert [batch.tolist() for batch in batches] == expected
        before = batches[1].tolist()
        batches[0].fill_(-1)  # a user's batch to write to, and nobody else's
        assert batches[1].tolist() == before
        assert list(make()) == expected
