"""Epochs that differ: who meets whom again, frameworks that tell the epoch, several threads."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

Array = Any
Batches = list[Array]


# ---------------------------------------------------------------- who meets whom again


def proteins(count: int) -> Array:
    random = np.random.default_rng(1)
    return np.clip(np.exp(random.normal(5.7, 0.7, count)), 30, 2000).astype(np.int64)


def recordings(count: int) -> Array:
    return np.random.default_rng(2).integers(16_000, 480_000, count)


def seconds(count: int) -> Array:
    return np.random.default_rng(3).exponential(10.0, count) + 0.5


# Sizes, and a budget.
SIZES: dict[str, tuple[Callable[[int], Array], int]] = {
    "proteins": (proteins, 16_384),
    "recordings": (recordings, 3_840_000),
    "seconds": (seconds, 500),
}


def batches_of(sampler: Any, epoch: int) -> Batches:
    sampler.set_epoch(epoch)
    offsets, indices = (part.numpy() for part in sampler.plan())
    return [indices[a:b] for a, b in itertools.pairwise(offsets)]


def meet_again(first: Batches, second: Batches, samples: int) -> float:
    """The share of the pairs in a batch of the first epoch that are in one in the second too."""
    batch = np.empty(samples, dtype=np.int64)
    for number, members in enumerate(second):
        batch[members] = number
    pairs = again = 0
    for members in first:
        together = np.bincount(batch[members])
        again += int((together * (together - 1) // 2).sum())
        pairs += len(members) * (len(members) - 1) // 2
    return again / pairs


def chance(batches: Batches, sizes: Array) -> float:
    """The share that would, were a batch's samples drawn from all between its ends in size.

    A batch that pads little can only hold samples of its own range of sizes.
    """
    ascending = np.sort(sizes)
    pairs = expected = 0.0
    for members in batches:
        own = sizes[members]
        low = np.searchsorted(ascending, own.min(), "left")
        high = np.searchsorted(ascending, own.max(), "right")
        of_batch = len(members) * (len(members) - 1) / 2
        pairs += of_batch
        expected += of_batch * (len(members) - 1) / max(high - low - 1, 1)
    return expected / pairs


@pytest.mark.parametrize("samples", [300, 1000, 15_000, 30_000])
@pytest.mark.parametrize("kind", SIZES)
def test_sums_are_of_samples_that_meet_by_chance(kind: str, samples: int) -> None:
    make, budget = SIZES[kind]
    sizes = make(samples)
    sampler = PackedBatchSampler(sizes, budget, shuffle=True, seed=1, cost="sum")
    tightest = PackedBatchSampler(sizes, budget, cost="sum").report()
    first, second, third = (batches_of(sampler, epoch) for epoch in range(3))
    again = (meet_again(first, second, samples) + meet_again(second, third, samples)) / 2
    assert again <= 2 / len(first)
    assert len(first) <= 1.003 * tightest.batches + 1
    within = sum(((sizes[b] - sizes[b].mean()) ** 2).sum() for b in first) / samples
    assert within >= 0.7 * sizes.var()


def test_a_batch_of_sums_is_full_and_of_all_sizes() -> None:
    sizes = proteins(100_000)
    sampler = PackedBatchSampler(sizes, 16_384, shuffle=True, seed=1, cost="sum")
    within = sum(((sizes[b] - sizes[b].mean()) ** 2).sum() for b in batches_of(sampler, 0))
    assert within / len(sizes) >= 0.7 * sizes.var()
    assert sampler.report().fill >= 0.997


@pytest.mark.parametrize("samples", [300, 1000, 15_000, 30_000])
@pytest.mark.parametrize("kind", SIZES)
def test_padded_samples_meet_no_more_often_than_their_padding_makes_them(
    kind: str, samples: int
) -> None:
    make, budget = SIZES[kind]
    sizes = make(samples)
    shuffled = np.random.default_rng(0).permutation(sizes)  # windows of the same kind
    sorted_windows = PackedBatchSampler(shuffled, budget, cost="padded").report().padding
    sampler = PackedBatchSampler(sizes, budget, cost="padded", shuffle=True, seed=1)
    epochs = [batches_of(sampler, epoch) for epoch in range(5)]
    again = float(np.mean([meet_again(a, b, samples) for a, b in itertools.pairwise(epochs)]))
    assert again <= 2 * chance(epochs[0], sizes)
    # Sorted windows: 97 % and more where one holds all samples, 33 % of two and 22 % of three.
    assert again <= {300: 0.9, 1000: 0.75, 15_000: 0.4, 30_000: 0.25}[samples]
    paddings = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        paddings.append(sampler.report().padding)
    assert float(np.mean(paddings)) <= 1.3 * sorted_windows


@pytest.mark.parametrize("cost", ["sum", "padded"])
def test_a_small_window_mixes_more(cost: str) -> None:
    sizes = proteins(2000)

    def again(window: int) -> float:
        sampler = PackedBatchSampler(sizes, 16_384, cost=cost, window=window, shuffle=True, seed=1)
        return meet_again(batches_of(sampler, 0), batches_of(sampler, 1), len(sizes))

    assert again(200) <= (0.15 if cost == "padded" else 0.04)


def test_a_bucket_is_shuffled_as_a_whole() -> None:
    sizes = proteins(5000)
    sampler = BucketBatchSampler(sizes, [0, 200, 400, 800, 2001], max_total_size=16_384, seed=1)
    first, second = batches_of(sampler, 0), batches_of(sampler, 1)
    assert meet_again(first, second, len(sizes)) <= 2 * chance(first, sizes)


@pytest.mark.parametrize("samples", [64, 128])
def test_padded_and_count_pad_as_little_as_sorted_samples(samples: int) -> None:
    sizes = proteins(10_000)
    sampler = PackedBatchSampler(
        np.stack([sizes, sizes], 1), [16_384, samples], cost=["padded", "count"], shuffle=True
    )
    descending = np.sort(sizes)[::-1]
    padded = begin = 0
    while begin < len(sizes):
        count = min(samples, 16_384 // descending[begin], len(sizes) - begin)
        padded += count * descending[begin]
        begin += count
    assert sampler.report().padding <= 1.5 * (1 - sizes.sum() / padded)


# ---------------------------------------------------------------- loops and frameworks


NUMBERS = [1 + index * 7 % 19 for index in range(90)]
MAKERS: dict[str, Callable[..., Any]] = {
    "ordered": lambda **o: SizeAwareBatchSampler(
        range(90), NUMBERS, 40, shuffle=True, **o, cost="sum"
    ),
    "packed": lambda **o: PackedBatchSampler(NUMBERS, 40, shuffle=True, **o, cost="sum"),
    "bucket": lambda **o: BucketBatchSampler(NUMBERS, [0, 9, 20], max_total_size=40, **o),
}


@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 2}])
def test_a_plain_loop_has_other_batches_in_each_epoch(options: dict[str, Any]) -> None:
    sampler = PackedBatchSampler(NUMBERS, 40, shuffle=True, **options)
    loader = DataLoader(range(90), batch_sampler=sampler)
    epochs = [[b.tolist() for b in loader] for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    # Each is the one of its number.
    told = PackedBatchSampler(NUMBERS, 40, shuffle=True, seed=0, **options)
    for number, epoch in enumerate(epochs):
        told.set_epoch(number)
        assert list(told) == epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_seeded_sampler_tells_once_that_an_epoch_begins_again(workers: int) -> None:
    sizes = [1 + index % 19 for index in range(90)]
    sampler = PackedBatchSampler(sizes, 40, shuffle=True, seed=0)
    loader = DataLoader(range(len(sizes)), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    next(iter(loader))  # a look at one batch is no epoch
    list(loader)
    with warnings.catch_warnings(record=True) as told:  # Python 3.12 tells of forks too
        warnings.simplefilter("always")
        list(loader)
        list(loader)
    (text,) = [str(each.message) for each in told if each.category is UserWarning]
    assert "begins epoch 0 again, with the same batches: call set_epoch" in text
    knowing = PackedBatchSampler(sizes, 40, shuffle=True, seed=0)
    knowing.set_epoch(0)
    assert list(knowing) == list(knowing)


def test_a_sampler_that_counts_epochs_resumes_in_its_epoch() -> None:
    def make() -> PackedBatchSampler:
        return PackedBatchSampler(NUMBERS, 40, shuffle=True)

    whole = make()
    epochs = [list(whole) for _ in range(4)]
    stopped = make()
    list(stopped)
    running = iter(stopped)
    done = [next(running) for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert done + list(resumed) == epochs[1]
    assert list(resumed) == epochs[2]
    after = make()
    after.load_state_dict(resumed.state_dict())  # of an epoch that has ended
    assert list(after) == epochs[3]


def set_epoch_as_lightning(loader: Any, epoch: int) -> None:
    """What `lightning.fabric.utilities.data._set_sampler_epoch` of lightning 2.6 does."""
    objects: dict[int, Any] = {}
    if (sampler := getattr(loader, "sampler", None)) is not None:
        objects[id(sampler)] = sampler
    if (batch_sampler := getattr(loader, "batch_sampler", None)) is not None and (
        sampler := getattr(batch_sampler, "sampler", None)
    ) is not None:
        objects[id(sampler)] = sampler
    for found in objects.values():
        set_epoch = getattr(found, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class Shard:
    """Every n-th batch, and how `accelerate.data_loader` 1.15 tells it the epoch."""

    def __init__(self, batch_sampler: Any, process: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.process = process

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):
            if number % 2 == self.process:
                yield batch

    def set_epoch_of_loader(self, epoch: int) -> None:
        if hasattr(self.batch_sampler, "sampler") and hasattr(
            self.batch_sampler.sampler, "set_epoch"
        ):
            self.batch_sampler.sampler.set_epoch(epoch)


def lightnings_own(loader: Any, epoch: int) -> None:
    data = pytest.importorskip("lightning.fabric.utilities.data")
    data._set_sampler_epoch(loader, epoch)


@pytest.mark.parametrize(
    "set_epoch", [set_epoch_as_lightning, pytest.param(lightnings_own, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", MAKERS)
def test_lightning_tells_the_epoch(kind: str, set_epoch: Callable[[Any, int], None]) -> None:
    loader = DataLoader(range(90), batch_sampler=MAKERS[kind](seed=1), collate_fn=list)
    epochs = []
    for epoch in range(3):
        set_epoch(loader, epoch)
        expected = MAKERS[kind](seed=1)
        expected.set_epoch(epoch)
        epochs.append(list(loader))
        assert epochs[-1] == list(expected)
    assert len({str(epoch) for epoch in epochs}) == 3


def test_lightning_tells_a_foreign_sampler_that_was_counted_before() -> None:
    order = DistributedSampler(range(90), num_replicas=1, rank=0, seed=5)
    sampler = SizeAwareBatchSampler(order, NUMBERS, 40)
    assert sampler.sampler is order
    loader = DataLoader(range(90), batch_sampler=sampler, collate_fn=list)
    epochs = []
    for epoch in range(3):
        len(loader)  # has asked for the order already
        set_epoch_as_lightning(loader, epoch)
        assert len(loader) == len(list(loader))
        epochs.append(list(itertools.chain.from_iterable(loader)))
        assert epochs[-1] == list(order)
    assert len({str(epoch) for epoch in epochs}) == 3


class CountsByItself:
    """A sampler whose epoch goes on with each iteration."""

    epoch = 0

    def __len__(self) -> int:
        return 90

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(
            torch.randperm(90, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )


def test_a_foreign_sampler_may_count_epochs_by_itself() -> None:
    sampler = SizeAwareBatchSampler(CountsByItself(), NUMBERS, 40)
    epochs = []
    for _ in range(6):
        counted = len(sampler)
        epochs.append(list(sampler))
        assert len(epochs[-1]) == counted
    assert len({str(epoch) for epoch in epochs}) == 6


@pytest.mark.parametrize("kind", MAKERS)
def test_accelerate_tells_the_epoch_and_its_processes_share_the_batches(kind: str) -> None:
    shards = [Shard(MAKERS[kind](seed=1), process) for process in range(2)]
    epochs = []
    for epoch in range(2):
        for shard in shards:
            shard.set_epoch_of_loader(epoch)
        epochs.append([list(shard) for shard in shards])
        samples = itertools.chain.from_iterable(itertools.chain(*epochs[-1]))
        assert sorted(samples) == list(range(90))
    assert epochs[0] != epochs[1]


def test_a_generator_that_was_put_in_place_later_decides() -> None:
    """As accelerate does, so that its processes draw alike."""
    samplers = [MAKERS["bucket"](), MAKERS["bucket"]()]
    for sampler in samplers:
        len(sampler)  # has drawn a seed
        sampler.sampler.generator = torch.Generator().manual_seed(7)
    assert list(samplers[0]) == list(samplers[1])


def test_a_distributed_sampler_is_warned_of() -> None:
    def make(replicas: int) -> SizeAwareBatchSampler:
        order = DistributedSampler(range(90), num_replicas=replicas, rank=0)
        return SizeAwareBatchSampler(order, NUMBERS, 40)

    with pytest.warns(UserWarning, match=r"DistributedSampler.*range\(n\)"):
        make(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(1)


# ---------------------------------------------------------------- in the loop


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_len_in_the_loop_is_that_of_the_epoch_that_runs(kind: str, workers: int) -> None:
    """Seeds are drawn, so that epochs differ in the number of their batches."""
    drawn = torch.Generator().manual_seed(3)
    sampler = MAKERS[kind](generator=drawn)
    loader = DataLoader(range(90), batch_sampler=sampler, collate_fn=list, num_workers=workers)
    counts = set()
    for epoch in range(3 if workers else 12):
        expected = len(loader) if epoch % 2 else None
        seen = [len(loader) for _ in loader]
        assert set(seen) == {len(seen)}
        assert expected in (None, len(seen))
        counts.add(len(seen))
    assert len(counts) > 1 or workers, "the test shows nothing"


def test_len_in_the_loop_of_a_resumed_epoch() -> None:
    sampler = MAKERS["packed"](generator=torch.Generator().manual_seed(3))
    running = iter(sampler)
    next(running)
    count = len(sampler)
    state = sampler.state_dict()
    resumed = MAKERS["packed"](generator=torch.Generator().manual_seed(4))
    resumed.load_state_dict(state)
    assert {len(resumed) for _ in resumed} == {count - 1}


# ---------------------------------------------------------------- several threads


@pytest.fixture
def eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


LENGTHS = np.random.default_rng(0).integers(1, 2000, 120_000)
MANY: dict[str, Callable[[], Any]] = {
    "ordered": lambda: SizeAwareBatchSampler(
        range(len(LENGTHS)),
        LENGTHS,
        5000,
        shuffle=True,
        seed=1,
        cost="sum",
    ),
    "packed": lambda: PackedBatchSampler(
        LENGTHS, 5000, shuffle=True, seed=1, window=500, cost="sum"
    ),
    "tensors": lambda: PackedBatchSampler(LENGTHS, 5000, window=500, as_tensors=True, cost="sum"),
    "streaming": lambda: SizeAwareBatchSampler(range(3000), LENGTHS.__getitem__, 5000, cost="sum"),
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.usefixtures("eager_threads")
def test_threads_that_read_one_iterator_share_its_batches(kind: str) -> None:
    batches = iter(MANY[kind]())
    got: list[list[Any]] = [[] for _ in range(4)]

    def read(mine: list[Any]) -> None:
        for batch in batches:
            mine.append([int(index) for index in batch])

    threads = [threading.Thread(target=read, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared = sorted(itertools.chain.from_iterable(got), key=str)
    assert shared == sorted(([int(i) for i in batch] for batch in MANY[kind]()), key=str)


@pytest.mark.usefixtures("eager_threads")
def test_a_state_is_taken_beside_a_thread_that_fetches_ahead() -> None:
    sampler = MANY["packed"]()
    batches = iter(sampler)
    ahead = list(itertools.islice(batches, 50))
    thread = threading.Thread(target=ahead.extend, args=(batches,))
    thread.start()
    states = []
    while thread.is_alive() or not states:
        states.append(sampler.state_dict(batches=50))
    thread.join()
    assert all(state == states[0] for state in states)
    resumed = MANY["packed"]()
    resumed.load_state_dict(states[-1])
    assert list(resumed) == ahead[50:]
