"""Streams in the workers of a DataLoader: nothing is lost, nothing comes twice, epochs go on."""

from __future__ import annotations

import itertools
import pickle
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from brim.data import bucket_stream, pack_stream
from brim.data.streams import StreamBatches

COUNT = 300


def sample(number: int) -> list[int]:
    return [number] * (1 + number * 7 % 23)


class Whole(IterableDataset[Any]):
    """Gives each worker all samples."""

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(COUNT))


class Sharded(IterableDataset[Any]):
    """As in the documentation of torch.utils.data: each worker gives its own part."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return map(sample, range(number, COUNT, workers))


class ShardedLate(IterableDataset[Any]):
    """Asks for its worker with each sample."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(COUNT):
            info = get_worker_info()
            if info is None or number % info.num_workers == info.id:
                yield sample(number)


class Part(IterableDataset[Any]):
    """A worker_init_fn says which part it gives."""

    def __init__(self, size: int | None = None) -> None:
        self.begin, self.step, self.size = 0, 1, size

    def __iter__(self) -> Iterator[Any]:
        numbers = range(self.begin, COUNT, self.step)
        return ([n] * self.size if self.size else sample(n) for n in numbers)


def divide(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.iterable.begin, info.dataset.iterable.step = worker, info.num_workers  # type: ignore[attr-defined]


class Drawn(IterableDataset[Any]):
    """Another order in each worker, since each has its own random state."""

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(COUNT))
        random.shuffle(numbers)
        return map(sample, numbers)


def make(kind: str, data: Any, **options: Any) -> StreamBatches:
    if kind == "pack":
        return pack_stream(data, 96, lookahead=50, **options)
    return bucket_stream(data, [0, 8, 30], 96, lookahead=50, **options)


def load(stream: Any, workers: int, **options: Any) -> Any:
    return DataLoader(stream, batch_size=None, num_workers=workers, **options)


def seen(batches: Any) -> list[int]:
    return sorted(one[0] for batch in batches for one in batch)


@pytest.mark.parametrize("data", [Whole, Sharded, ShardedLate])
@pytest.mark.parametrize(("kind", "workers"), [("pack", 2), ("bucket", 2)])
def test_data_sets_that_divide_their_samples_lose_none(data: Any, kind: str, workers: int) -> None:
    batches = list(load(make(kind, data()), workers))
    assert batches == list(make(kind, Whole()))
    assert seen(batches) == list(range(COUNT))


def test_a_data_set_that_is_to_divide_its_samples_does() -> None:
    stream = make("pack", Sharded(), sharded=True)
    assert seen(load(stream, 2)) == list(range(COUNT))


def test_the_collate_function_still_knows_its_worker() -> None:
    stream = make("pack", Sharded(), collate_fn=lambda batch: get_worker_info().id)  # type: ignore[union-attr]
    assert list(load(stream, 2))[:4] == [0, 1, 0, 1]


def messages(loader: Any) -> list[str]:
    """Those of this process, in place of a worker's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
    return [str(one.message) for one in caught]


class InTurns:
    """Workers in this process, one after the other, whose warnings can be seen."""

    def __init__(self, stream: StreamBatches, workers: int, init: Any = None) -> None:
        self.stream, self.workers, self.init = pickle.dumps(stream), workers, init
        self.words = stream._readers._words

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data._utils import worker as torch_worker

        for number in range(self.workers):
            stream = pickle.loads(self.stream)
            stream._readers._words = self.words
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=number, num_workers=self.workers, seed=77 + number, dataset=stream
            )
            try:
                if self.init:
                    self.init(number)
                yield from stream
            finally:
                torch_worker._worker_info = None


@pytest.mark.parametrize("data", [Part, Drawn])
@pytest.mark.parametrize("kind", ["pack", "bucket"])
def test_workers_that_read_other_samples_are_an_error(data: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=r"workers 0 and 1 .* read different samples"):
        list(InTurns(make(kind, data()), 2, divide))


@pytest.mark.slow  # torch waits for seconds until its workers are gone
def test_workers_in_processes_that_read_other_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"workers \d and \d .* read different samples"):
        list(load(make("pack", Drawn()), 2))


def test_samples_of_one_size_that_differ_between_workers_are_told() -> None:
    differ = InTurns(make("pack", Part(size=5)), 2, divide)
    assert any("begin with different samples, all of one size" in m for m in messages(differ))
    assert messages(InTurns(make("pack", Part(size=5)), 2)) == []


def test_samples_that_are_not_divided_though_they_should_be_are_told() -> None:
    twice = InTurns(make("pack", Whole(), sharded=True), 2)
    assert any("sharded=True" in m and "come twice" in m for m in messages(twice))
    assert messages(InTurns(make("pack", Sharded(), sharded=True), 2)) == []


# ---- epochs ------------------------------------------------------------------------------------


class Epochs(IterableDataset[Any]):
    """Every sample says which epoch it is of."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ([self.epoch] * (1 + number % 5) for number in range(40))


def epochs_of(loader: Any) -> set[int]:
    return {one[0] for batch in loader for one in batch}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_each_iteration_is_the_next_epoch_in_every_worker(workers: int, persistent: bool) -> None:
    stream = make("pack", Whole(), shuffle=True)
    loader = load(stream, workers, persistent_workers=persistent)
    counted = [list(loader) for _ in range(3)]
    assert counted[0] != counted[1] != counted[2] != counted[0]
    for batches in counted:
        assert seen(batches) == list(range(COUNT))
    alone = make("pack", Whole(), shuffle=True)
    assert [list(alone) for _ in range(3)] == counted
    stream.set_epoch(1)
    assert list(loader) == counted[1]
    assert list(loader) == counted[2], "the one after it"
    assert stream.epoch == 3


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_epochs_are_passed_on_to_the_iterable(workers: int, persistent: bool) -> None:
    stream = make("pack", Epochs())
    loader = load(stream, workers, persistent_workers=persistent)
    assert [epochs_of(loader) for _ in range(3)] == [{0}, {1}, {2}]
    stream.set_epoch(7)
    assert [epochs_of(loader) for _ in range(2)] == [{7}, {8}]


def test_an_iterable_that_was_told_its_epoch_keeps_it() -> None:
    data = Epochs()
    stream = make("pack", data)
    data.set_epoch(5)
    assert epochs_of(stream) == {5}
    data.set_epoch(6)
    assert epochs_of(stream) == {6}
    stream.set_epoch(2)
    assert epochs_of(stream) == {2}


def test_an_iterator_that_nobody_uses_takes_no_epoch() -> None:
    stream = make("pack", Epochs())
    iter(stream)
    assert epochs_of(stream) == {0}
    next(iter(stream))
    assert epochs_of(stream) == {2}, "one that was begun does"


def test_loaders_with_the_same_seed_are_other_epochs_too() -> None:
    stream = make("pack", Epochs())
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        found.append(epochs_of(load(stream, 2)))
    assert found == [{0}, {1}, {2}]


def test_an_epoch_set_while_workers_start_is_for_the_next_iteration() -> None:
    stream = make("pack", Epochs())
    for expected in ({0}, {5}):
        iterator = iter(load(stream, 2))
        stream.set_epoch(5)
        assert epochs_of(iterator) == expected


@pytest.mark.parametrize(
    ("kind", "data", "options"),
    [("pack", Whole, {"shuffle": True}), ("pack", Epochs, {}), ("bucket", Epochs, {})],
)
def test_ranks_that_count_epochs_by_themselves_are_told_once(
    kind: str, data: Any, options: dict[str, Any]
) -> None:
    stream = make(kind, data(), rank=0, world_size=2, **options)
    list(stream)
    with pytest.warns(UserWarning, match="each rank counts the epochs"):
        list(stream)
    list(stream)
    stream = make(kind, data(), rank=0, world_size=2, **options)
    for epoch in range(3):
        stream.set_epoch(epoch)
        list(stream)
    with pytest.warns(UserWarning, match="each rank counts the epochs"):
        list(stream)  # this epoch was not set
    stream = make(kind, Whole(), rank=0, world_size=2)  # nothing depends on the epoch
    for _ in range(3):
        list(stream)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_that_is_told_the_same_epoch_again_has_it_again(workers: int) -> None:
    data = Epochs()
    loader = load(make("pack", data), workers)
    for _ in range(3):
        data.set_epoch(0)
        assert epochs_of(loader) == {0}
    untold = load(make("pack", Epochs()), workers)
    assert [epochs_of(untold) for _ in range(2)] == [{0}, {1}]


def test_a_wrong_epoch_is_named() -> None:
    with pytest.raises(ValueError, match=r"epoch must be below 2\*\*32"):
        make("pack", Whole()).set_epoch(2**32)


# ---- several iterations at once ----------------------------------------------------------------


class Worker:
    """A worker of a DataLoader in this process."""

    def __init__(self, stream: StreamBatches, seed: int, number: int) -> None:
        self.stream = pickle.loads(pickle.dumps(stream))
        self.stream._readers._words = stream._readers._words
        self.info = {"id": number, "num_workers": 2, "seed": seed + number, "dataset": self.stream}
        self.iterator = self.run(lambda: iter(self.stream))

    def run(self, work: Any) -> Any:
        from torch.utils.data._utils import worker as torch_worker

        torch_worker._worker_info = torch_worker.WorkerInfo(**self.info)
        try:
            return work()
        finally:
            torch_worker._worker_info = None

    def take(self, batches: int | None = None) -> list[Any]:
        return self.run(lambda: list(itertools.islice(self.iterator, batches)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_workers_of_two_loaders_that_begin_in_any_order_share_their_own_epoch(order: Any) -> None:
    stream = make("pack", Whole(), shuffle=True)
    workers = [Worker(stream, seed, number) for seed in (70, 90) for number in range(2)]
    taken: list[list[Any]] = [[], [], [], []]
    for each in order:
        taken[each] += workers[each].take(2)
    for mine, worker in zip(taken, workers, strict=True):
        mine += worker.take()
    loaders = [taken[0] + taken[1], taken[2] + taken[3]]
    assert [seen(batches) for batches in loaders] == [list(range(COUNT))] * 2
    alone = make("pack", Whole(), shuffle=True)
    assert sorted(sorted(batches) for batches in loaders) == sorted(sorted(alone) for _ in range(2))


def test_two_loaders_of_the_same_seed_at_once_each_give_all_samples() -> None:
    stream = make("pack", Whole(), shuffle=True)
    loaders = []
    for _ in range(2):
        torch.manual_seed(0)
        loaders.append(iter(load(stream, 2)))
    pairs = list(itertools.zip_longest(*loaders, fillvalue=[]))
    first, second = ([batch for batch in batches if batch] for batches in zip(*pairs, strict=True))
    assert seen(first) == seen(second) == list(range(COUNT))
    alone = make("pack", Whole(), shuffle=True)
    epochs = [list(alone), list(alone)]
    assert sorted([first, second]) == sorted(epochs)


@pytest.mark.parametrize("kind", ["pack", "bucket"])
def test_an_iteration_inside_another_takes_nothing_from_it(kind: str) -> None:
    stream = make(kind, Whole())
    outer = []
    for number, batch in enumerate(stream):
        outer.append(batch)
        if number in (2, 5):
            assert seen(stream) == list(range(COUNT))
    assert seen(outer) == list(range(COUNT))
    one, two = zip(*zip(iter(stream), iter(stream), strict=True), strict=True)
    assert seen(one) == seen(two) == list(range(COUNT))


def test_iterations_that_share_one_iterator_are_warned_of() -> None:
    stream = make("pack", map(sample, range(COUNT)))
    first = iter(stream)
    next(first)
    with pytest.warns(UserWarning, match="share the samples of one map"):
        next(iter(stream))
    del first
    list(stream)


def test_epochs_set_between_loaders_that_are_starting_are_each_for_the_next_one() -> None:
    stream = make("pack", Epochs())
    found = [Worker(stream, 70, 0)]
    for epoch in (5, 9):
        stream.set_epoch(epoch)
        found.append(Worker(stream, 90 + epoch, 0))
    assert [epochs_of(worker.take()) for worker in found] == [{0}, {5}, {9}]


def test_a_lock_whose_holder_was_killed_is_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.data import readers

    monkeypatch.setattr(readers, "_LOCK_PATIENCE", 0.01)
    stream = make("pack", Whole())
    stream._readers._words[readers._LOCK] = 1
    assert seen(stream) == list(range(COUNT))


# ---- resuming ----------------------------------------------------------------------------------


def test_a_finished_state_goes_on_with_the_next_epoch() -> None:
    stream = make("pack", Whole(), shuffle=True)
    epochs = [list(stream), list(stream)]
    ended = make("pack", Whole(), shuffle=True)
    list(ended)
    resumed = make("pack", Whole(), shuffle=True)
    resumed.load_state_dict(ended.state_dict())
    assert list(resumed) == epochs[1]


def test_a_resumed_epoch_is_followed_by_a_whole_one_in_workers() -> None:
    stream = make("pack", Whole(), shuffle=True)
    epochs = [list(stream), list(stream)]
    begun = make("pack", Whole(), shuffle=True)
    done = list(itertools.islice(begun, 5))
    resumed = make("pack", Whole(), shuffle=True)
    resumed.load_state_dict(begun.state_dict())
    loader = load(resumed, 2)
    assert sorted(done + list(loader)) == sorted(epochs[0])
    assert list(loader) == epochs[1]


def in_the_middle(**options: Any) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """A state in epoch 0, what is left of that, and all of the next."""
    stream = make("pack", Whole(), **options)
    running = iter(stream)
    for _ in range(5):
        next(running)
    return stream.state_dict(), list(running), list(stream)


def test_a_position_reaches_workers_that_are_running() -> None:
    state, rest, following = in_the_middle(shuffle=True)
    stream = make("pack", Whole(), shuffle=True)
    loader = load(stream, 2, persistent_workers=True)
    list(loader)
    for _ in range(2):
        stream.load_state_dict(state)
        assert stream.state_dict() == state
        assert sorted(loader) == sorted(rest)
        assert list(loader) == following, "a whole one"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaded_position_is_used_once(workers: int) -> None:
    state, rest, _ = in_the_middle()
    stream = make("pack", Whole())
    loader = load(stream, workers)
    stream.load_state_dict(state)
    stream.set_epoch(0)  # as training loops do
    assert sorted(loader) == sorted(rest)
    for _ in range(2):
        stream.set_epoch(0)
        assert seen(loader) == list(range(COUNT))


def test_a_position_that_workers_come_too_late_for_is_an_error() -> None:
    state, _, _ = in_the_middle()
    stream = make("pack", Whole())
    stream.load_state_dict(state)
    workers = [Worker(stream, 70, number) for number in range(2)]
    workers[0].take(1)
    stream.load_state_dict(state)
    with pytest.raises(RuntimeError, match="while workers were starting"):
        workers[1].take(1)


def test_an_epoch_that_workers_come_too_late_for_is_an_error() -> None:
    stream = make("pack", Whole())
    worker = Worker(stream, 70, 0)
    for epoch in range(300):
        stream.set_epoch(epoch)
    with pytest.raises(RuntimeError, match="while workers were starting"):
        worker.take(1)
    assert stream.epoch == 299, "others are not affected"


def test_many_iterations_may_begin_before_the_last_worker_of_the_first() -> None:
    stream = make("pack", Whole(), shuffle=True)
    workers = [Worker(stream, 70, number) for number in range(2)]
    batches = workers[0].take(1)
    for _ in range(100):
        next(iter(stream))
    batches += workers[1].take() + workers[0].take()
    assert seen(batches) == list(range(COUNT))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_dataloader_resumes_after_any_batch_of_any_epoch() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        data = [sample(number) for number in range(40)]
        stream = pack_stream(data, 96, lookahead=10, shuffle=True)
        return stateful.StatefulDataLoader(stream, batch_size=None, num_workers=2)

    whole = loader()
    batches = list(whole) + list(whole)
    count = len(batches) // 2
    for done in (1, count - 2, count - 1, count, count + 1):
        first = loader()
        epochs = itertools.chain.from_iterable(itertools.repeat(first))
        begun = list(itertools.islice(epochs, done))
        resumed = loader()
        resumed.load_state_dict(first.state_dict())
        end = count if done <= count else 2 * count
        assert begun + list(resumed) == batches[:end], done


def test_a_state_of_the_main_process_says_that_it_does_not_know_the_workers_position() -> None:
    stream = pack_stream(Whole(), 100)
    assert stream.state_dict()["epoch"] == 0
    loader = iter(DataLoader(stream, batch_size=None, num_workers=1))
    next(loader)
    with pytest.warns(UserWarning, match="this state begins with epoch 1, and what is left"):
        assert stream.state_dict()["epoch"] == 1
    stream.set_epoch(0)
    assert stream.state_dict()["epoch"] == 0
