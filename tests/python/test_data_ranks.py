"""Ranks that would iterate over different batches: looks at one batch, other data, states."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler

import brim
from brim._state.undoing import Undoing
from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler, agree

SIZES = [1 + index * 7 % 19 for index in range(200)]
MAKERS: dict[str, Callable[..., Any]] = {
    "ordered": lambda sizes=SIZES, budget=40, **o: SizeAwareBatchSampler(
        range(len(sizes)), sizes, budget, shuffle=True, **o
    ),
    "packed": lambda sizes=SIZES, budget=40, **o: PackedBatchSampler(
        sizes, budget, shuffle=True, **o
    ),
    "bucket": lambda sizes=SIZES, budget=40, **o: BucketBatchSampler(
        sizes, [0, 9, 60], max_total_size=budget, **o
    ),
}


def on_both(kind: str, workers: int = 0, **options: Any) -> list[Any]:
    """The loaders of two ranks."""
    return [
        DataLoader(
            range(200),  # type: ignore[arg-type]
            batch_sampler=MAKERS[kind](rank=rank, world_size=2, **options),
            collate_fn=list,
            num_workers=workers,
        )
        for rank in range(2)
    ]


def epoch_of(loaders: list[Any]) -> list[Any]:
    """An epoch, in which each sample must be on one rank, once."""
    batches = [list(loader) for loader in loaders]
    samples = itertools.chain.from_iterable(itertools.chain(*batches))
    assert sorted(samples) == list(range(200))
    return batches


# ---------------------------------------------------------------- looks at a few batches


@pytest.mark.filterwarnings("ignore:.* begins epoch . again")
@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_look_on_one_rank_leaves_it_in_the_epoch_of_the_others(kind: str, batches: int) -> None:
    loaders = on_both(kind)
    epochs = []
    for epoch in range(3):
        for _ in range(epoch if batches == 1 else 1):
            list(itertools.islice(loaders[epoch % 2], batches))
        epochs.append(epoch_of(loaders))
    assert len({str(epoch) for epoch in epochs}) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 tells of forks
def test_a_look_through_workers_that_fetch_ahead() -> None:
    loaders = on_both("packed", workers=1)
    next(iter(loaders[1]))
    assert epoch_of(loaders) != epoch_of(loaders)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_look_through_workers_that_fetch_the_whole_epoch_ahead() -> None:
    loaders = on_both("packed", workers=2, budget=700)
    epochs = [epoch_of(loaders)]
    assert len(epochs[0][0]) <= 4, "all batches are fetched before the first is used"
    for _ in range(2):
        next(iter(loaders[1]))
        epochs.append(epoch_of(loaders))
    assert len({str(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("kind", MAKERS)
def test_a_look_in_the_middle_of_an_epoch_changes_nothing(kind: str) -> None:
    loaders = on_both(kind)
    shares: list[Any] = [[], []]
    for number, batch in enumerate(loaders[0]):
        shares[0] += batch
        if number == 2:
            next(iter(loaders[0]))
    shares[1] = list(itertools.chain.from_iterable(loaders[1]))
    assert sorted(shares[0] + shares[1]) == list(range(200))
    epoch_of(loaders)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_look_after_resuming_leaves_the_position(kind: str) -> None:
    whole = on_both(kind)
    running = [iter(loader.batch_sampler) for loader in whole]
    done = [next(each) for each in running for _ in range(3)]
    resumed = on_both(kind)
    for old, new in zip(whole, resumed, strict=True):
        new.batch_sampler.load_state_dict(old.batch_sampler.state_dict())
    next(iter(resumed[0]))
    left = [batch for loader in resumed for batch in loader]
    assert sorted(itertools.chain(*done, *left)) == list(range(200))
    epoch_of(resumed)


@pytest.mark.parametrize("kind", MAKERS)
def test_states_within_a_resumed_epoch_are_where_it_stands(kind: str) -> None:
    def make() -> Any:
        return MAKERS[kind](rank=0, world_size=2)

    epoch = list(make())
    stopped = make()
    list(itertools.islice(stopped, 3))
    for batches in range(4, 7):
        resumed = make()
        resumed.load_state_dict(stopped.state_dict())
        running = iter(resumed)
        assert next(running) == epoch[batches - 1]
        stopped = resumed
        del running
    last = make()
    last.load_state_dict(stopped.state_dict())
    assert list(last) == epoch[6:]


def test_an_epoch_that_was_read_by_its_length_counts() -> None:
    sampler = MAKERS["packed"](rank=0, world_size=2)
    epochs = []
    for _ in range(3):
        batches = iter(sampler)
        epochs.append([next(batches) for _ in range(len(sampler))])
    assert len({str(epoch) for epoch in epochs}) == 3


AGAIN = r"begins epoch 0 again.*several ranks.*set_epoch"


def test_a_loop_after_one_that_ended_early_is_warned_of() -> None:
    sampler = MAKERS["packed"](rank=0, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(itertools.islice(sampler, 5))
    with pytest.warns(UserWarning, match=AGAIN):
        list(itertools.islice(sampler, 5))
    list(sampler)  # told once
    alone = MAKERS["packed"]()
    parts = [list(itertools.islice(alone, 5)) for _ in range(4)]
    assert len({str(part) for part in parts}) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("kept", "workers"), [(False, 0), (True, 0), (False, 1)])
def test_a_batch_that_is_always_the_same_is_warned_of(kept: bool, workers: int) -> None:
    loader = on_both("packed", workers=workers)[0]
    iterators = []

    def batch() -> Any:
        iterator = iter(loader)
        if kept:
            iterators.append(iterator)
        return next(iterator)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first = [batch(), batch()]
    with pytest.warns(UserWarning, match=AGAIN):
        assert [batch()] * 2 == first


def test_looks_on_ranks_are_not_kept() -> None:
    sampler = MAKERS["packed"](rank=0, world_size=2)
    sampler._epoch_was_set = True
    for _ in range(50):
        next(iter(sampler))
    assert len(sampler._iterations) <= 3


# ---------------------------------------------------------------- states of other data


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_of_other_data_is_refused(kind: str) -> None:
    state = MAKERS[kind](seed=1).state_dict()
    swapped = [SIZES[1], SIZES[0], *SIZES[2:]]
    with pytest.raises(ValueError, match="sizes of its samples are not those"):
        MAKERS[kind](swapped, seed=1).load_state_dict(state)
    for same in (torch.tensor(SIZES, dtype=torch.int16), torch.tensor(SIZES, dtype=torch.float32)):
        MAKERS[kind](same, seed=1).load_state_dict(state)
    older = {name: value for name, value in state.items() if name != "data"}
    MAKERS[kind](seed=1).load_state_dict(older)


def test_a_state_of_other_indices_is_refused() -> None:
    def make(indices: Any) -> Any:
        return PackedBatchSampler(SIZES, 40, indices=indices)

    state = make(range(100)).state_dict()
    make(list(range(100))).load_state_dict(state)
    with pytest.raises(ValueError, match="sizes of its samples are not those"):
        make(range(100, 200)).load_state_dict(state)


def test_counts_per_bucket_have_sizes_too() -> None:
    def make(sizes: Any) -> Any:
        return BucketBatchSampler(sizes, [0, 9, 60], batch_size=4, seed=1)

    with pytest.raises(ValueError, match="sizes of its samples are not those"):
        make(SIZES[::-1]).load_state_dict(make(SIZES).state_dict())


# ---------------------------------------------------------------- ranks are compared


class Ranks:
    """Two ranks that are threads, and the store of their group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.HashStore()
        monkeypatch.setattr(agree, "_group_of", lambda ranks: self)
        monkeypatch.setattr(agree, "_PATIENCE", 20.0)

    def get_group_store(self) -> Any:
        return self.store

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What it returned or raised on each."""
        results: list[Any] = [None, None]

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def made(kind: str, rank: int, **options: Any) -> Any:
    sampler = MAKERS[kind](rank=rank, world_size=2, **options)
    sampler._comparison._name = "the same place of the program"  # which threads share
    return sampler


OTHERS: dict[str, dict[str, Any]] = {
    "sizes": {"sizes": [SIZES[1], SIZES[0], *SIZES[2:]]},
    "samples": {"sizes": SIZES[:-1]},
    "max_total_size": {"budget": 41},
    "seed": {"seed": 2},
    "batch_multiple": {"batch_multiple": 2},
}


@pytest.mark.parametrize("differs", OTHERS)
@pytest.mark.parametrize("kind", ["ordered", "bucket"])
def test_ranks_with_other_samples_or_settings_all_get_one_error(
    ranks: Ranks, kind: str, differs: str
) -> None:
    def work(rank: int) -> Any:
        options = {"seed": 1, **(OTHERS[differs] if rank == 1 else {})}
        return list(made(kind, rank, **options))

    errors = ranks.run(work)
    assert all(isinstance(error, brim.RankError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert "rank 0 has" in str(errors[0])
    assert f"{differs} " in str(errors[0])


@pytest.mark.parametrize("before", [0, 1])
def test_another_epoch_on_one_rank_is_an_error_on_all(ranks: Ranks, before: int) -> None:
    def work(rank: int) -> Any:
        sampler = made("ordered", rank, seed=1)
        for epoch in range(before):
            sampler.set_epoch(epoch)
            list(sampler)
        sampler.set_epoch(before + rank)
        return list(sampler)

    errors = ranks.run(work)
    assert all(isinstance(error, brim.RankError) for error in errors)
    assert "Call set_epoch(epoch) on all ranks" in str(errors[0])


def test_a_state_on_one_rank_alone_is_an_error_on_all(ranks: Ranks) -> None:
    source = MAKERS["packed"](rank=0, world_size=2)
    with Undoing() as undo:
        agree.apart(undo)
        next(iter(source))

    def work(rank: int) -> Any:
        sampler = made("packed", rank)
        if rank == 1:
            sampler.load_state_dict(source.state_dict())
        return list(sampler)

    errors = ranks.run(work)
    assert all(isinstance(error, brim.RankError) for error in errors)
    assert "position" in str(errors[0])


def test_orders_that_ranks_drew_apart_are_an_error_on_all(ranks: Ranks) -> None:
    def work(rank: int) -> Any:
        order = RandomSampler(range(200), generator=torch.Generator().manual_seed(rank))  # type: ignore[arg-type]
        sampler = SizeAwareBatchSampler(order, SIZES, 40, rank=rank, world_size=2)
        sampler._comparison._name = "the same place"
        return list(sampler)

    errors = ranks.run(work)
    assert all(isinstance(error, brim.RankError) for error in errors)
    assert "order" in str(errors[0])


def test_equal_ranks_go_on_and_a_look_needs_no_second_exchange(ranks: Ranks) -> None:
    def work(rank: int) -> Any:
        sampler = made("packed", rank)
        if rank == 0:
            next(iter(sampler))
        epochs = [list(sampler) for _ in range(3)]
        return epochs, len(sampler._comparison._said), sampler._comparison._open

    (mine, said, pending), (others, *_) = ranks.run(work)
    assert said == 3
    assert not pending
    for a, b in zip(mine, others, strict=True):
        assert sorted(itertools.chain(*a, *b)) == list(range(200))


def test_a_rank_that_iterates_alone_goes_on(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "_PATIENCE", 0.01)
    sampler = made("packed", 0)
    epochs = [list(sampler) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    # A rank that comes later finds what differs, and the first with its next iteration.
    late = made("packed", 1, seed=5)
    with pytest.raises(brim.RankError, match="rank 1 has seed"):
        iter(late)
    with pytest.raises(brim.RankError, match="rank 1 has seed"):
        iter(sampler)


def test_ranks_of_another_group_are_not_compared() -> None:
    assert agree._group_of(agree.Ranks(0, 2)) is None


def test_a_store_that_is_gone_ends_the_comparison_only(ranks: Ranks) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("broken pipe")

    sampler = made("packed", 0)
    ranks.store = Gone()  # type: ignore[assignment]
    agree_store = agree._store_of
    try:
        agree._store_of = lambda group: group.get_group_store()
        assert list(sampler)
    finally:
        agree._store_of = agree_store


# ---------------------------------------------------------------- lengths that frameworks keep


def test_a_trainer_of_transformers_is_told_the_most_batches_of_its_epochs() -> None:
    class Arguments:
        max_steps, num_train_epochs, gradient_accumulation_steps = -1, 6.0, 1

    names: dict[str, Any] = {"__name__": "transformers.trainer"}
    exec("def set_initial_training_values(args, loader): return len(loader)", names)
    for kind in MAKERS:
        sampler = MAKERS[kind](seed=3)
        counts = []
        for epoch in range(6):
            sampler.set_epoch(epoch)
            counts.append(len(sampler))
        sampler.set_epoch(0)
        loader = DataLoader(range(200), batch_sampler=sampler)  # type: ignore[arg-type]
        assert names["set_initial_training_values"](Arguments, loader) == max(counts)
        assert len(sampler) == counts[0]
    drawn = DataLoader(range(200), batch_sampler=MAKERS["bucket"]())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="pass seed="):
        names["set_initial_training_values"](Arguments, drawn)
