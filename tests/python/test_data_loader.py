"""Samplers of brim.data where they are used: in a DataLoader, pickled, copied."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import brim
from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

SIZES = [1 + index * 7 % 19 for index in range(90)]


def size_of(index: int) -> int:
    return SIZES[index]


class Numbers(Dataset[int]):
    """Sample n is n itself, so that one sees which came."""

    def __getitem__(self, index: int) -> int:
        return int(index)

    def __len__(self) -> int:
        return len(SIZES)


def as_list(samples: list[int]) -> list[int]:
    return list(samples)


MAKERS: dict[str, Callable[..., Any]] = {
    "ordered": lambda **o: SizeAwareBatchSampler(range(90), SIZES, 40, shuffle=True, seed=1, **o),
    "streaming": lambda **o: SizeAwareBatchSampler(range(90), size_of, 40, **o),
    "packed": lambda **o: PackedBatchSampler(SIZES, 40, shuffle=True, seed=0, window=20, **o),
    "bucket": lambda **o: BucketBatchSampler(SIZES, [0, 5, 12, 20], batch_size=6, seed=2, **o),
    "budget in buckets": lambda **o: BucketBatchSampler(
        SIZES, [0, 5, 12, 20], max_total_size=40, seed=2, **o
    ),
}


def load(sampler: Any, workers: int) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, collate_fn=as_list)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_arrives_once_in_each_epoch(kind: str, workers: int) -> None:
    sampler = MAKERS[kind]()
    loader = load(sampler, workers)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected = len(loader)
        batches = list(loader)
        assert len(batches) == expected
        assert Counter(itertools.chain.from_iterable(batches)) == Counter(range(90))
        alone = MAKERS[kind]()
        alone.set_epoch(epoch)
        assert batches == list(alone)
        epochs.append(batches)
    assert (epochs[0] == epochs[1]) == (kind == "streaming")


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_training_goes_on_in_the_middle_of_an_epoch(kind: str, workers: int) -> None:
    whole = MAKERS[kind]()
    whole.set_epoch(1)
    expected = list(whole)

    sampler = MAKERS[kind]()
    sampler.set_epoch(1)
    seen, state = [], {}
    for number, batch in enumerate(load(sampler, workers), start=1):
        seen.append(batch)
        state = sampler.state_dict(batches=number)  # workers have fetched further
        if number == 4:
            break

    resumed = MAKERS[kind]()
    resumed.load_state_dict(state)
    loader = load(resumed, workers)
    for epoch in range(resumed.epoch, 3):
        resumed.set_epoch(epoch)
        if epoch == 1:
            assert len(loader) == len(expected) - 4
            assert seen + list(loader) == expected
        else:
            assert sorted(itertools.chain.from_iterable(loader)) == list(range(90))


@pytest.mark.parametrize("kind", ["ordered", "packed", "foreign"])
def test_the_number_of_workers_changes_nothing_that_is_random(kind: str) -> None:
    def epochs(workers: int) -> list[list[list[int]]]:
        generator = torch.Generator().manual_seed(6)
        sampler: Any
        if kind == "ordered":
            sampler = SizeAwareBatchSampler(range(90), SIZES, 40, shuffle=True, generator=generator)
        elif kind == "packed":
            sampler = PackedBatchSampler(SIZES, 40, shuffle=True, generator=generator)
        else:
            sampler = SizeAwareBatchSampler(
                RandomSampler(range(90), generator=generator), SIZES, 40
            )
        loader = load(sampler, workers)
        result = []
        for _ in range(3):
            expected = len(loader)
            result.append(list(loader))
            assert len(result[-1]) == expected
        return result

    assert epochs(0) == epochs(2)


def test_tensor_batches_in_a_loader() -> None:
    sampler = PackedBatchSampler(SIZES, 40, as_tensors=True)
    data = torch.arange(90) * 10
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2, collate_fn=torch.stack)
    assert sorted(torch.cat(list(loader)).tolist()) == data.tolist()


def test_ranks_in_loaders_share_the_samples() -> None:
    ranks = [
        PackedBatchSampler(SIZES, 40, shuffle=True, rank=rank, world_size=3) for rank in range(3)
    ]
    epochs = [list(load(sampler, 0)) for sampler in ranks]
    assert len({len(batches) for batches in epochs}) == 1
    samples = itertools.chain.from_iterable(itertools.chain.from_iterable(epochs))
    assert Counter(samples) == Counter(range(90))


# ---------------------------------------------------------------- pickled and copied


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda sampler: pickle.loads(pickle.dumps(sampler)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_copy_gives_the_same_batches_whatever_became_of_the_sampler(way: str, kind: str) -> None:
    sampler = MAKERS[kind]()
    sampler.set_epoch(2)
    expected = list(MAKERS[kind]()) if kind == "streaming" else None
    fresh = COPIES[way](sampler)
    len(sampler)
    running = iter(sampler)
    first = next(running)
    used = COPIES[way](sampler)
    rest = list(running)
    for other in (fresh, used):
        assert type(other) is type(sampler)
        assert other.epoch == 2
        assert len(other) == len(rest) + 1
        assert list(other) == [first, *rest]
    if expected is not None:
        assert [first, *rest] == expected


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_copy_keeps_a_position_that_was_loaded(way: str, kind: str) -> None:
    sampler = MAKERS[kind]()
    running = iter(sampler)
    list(itertools.islice(running, 3))
    state = sampler.state_dict(batches=3)
    rest = list(running)
    sampler.load_state_dict(state)
    other = COPIES[way](sampler)
    assert other.state_dict() == sampler.state_dict()
    assert len(other) == len(rest)
    assert list(other) == rest
    assert list(sampler) == rest  # which the copy has not used up


def test_a_copy_draws_seeds_of_its_own_from_where_the_generator_stood() -> None:
    generator = torch.Generator().manual_seed(4)
    sampler = PackedBatchSampler(SIZES, 40, shuffle=True, generator=generator)
    list(sampler)
    other = copy.deepcopy(sampler)
    epochs = [list(sampler), list(sampler)]
    assert [list(other), list(other)] == epochs
    assert epochs[0] != epochs[1]


def test_a_copy_says_no_second_time_what_is_left_out() -> None:
    with pytest.warns(UserWarning, match="left out"):
        sampler = SizeAwareBatchSampler(range(90), SIZES, 18)
    with pytest.warns(UserWarning, match="left out"):
        packed = PackedBatchSampler(SIZES, 18)
    for one in (sampler, packed):
        other = pickle.loads(pickle.dumps(one))
        assert list(other) == list(one)
        assert other.report().left_out["over budget"].tolist() == [
            index for index, size in enumerate(SIZES) if size > 18
        ]


def test_a_copy_keeps_what_a_subclass_and_its_user_added() -> None:
    sampler = Named("train", SIZES)
    sampler.note = "mine"
    other = pickle.loads(pickle.dumps(sampler))
    assert (type(other), other.name, other.note) == (Named, "train", "mine")
    assert list(other) == list(sampler)


class Named(PackedBatchSampler):
    """A user's own sampler, with arguments of its own."""

    note = ""

    def __init__(self, name: str, sizes: list[int]) -> None:
        self.name = name
        super().__init__(sizes, 40, shuffle=True, seed=8)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.int64])
def test_sizes_of_any_width_are_pickled_and_copied(kind: Any) -> None:
    """torch pickles tensors of unsigned 16 and 32 bits, but cannot read them back."""
    sizes = np.array([5, 2, 8, 3, 7], dtype=kind)
    samplers = [
        PackedBatchSampler(sizes, 10),
        BucketBatchSampler(sizes, [0, 5, 10], batch_size=2, shuffle=False),
        BucketBatchSampler(sizes, [0, 5, 10], max_total_size=10, shuffle=False),
        SizeAwareBatchSampler(range(5), sizes, 10),
    ]
    for sampler in samplers:
        for other in (
            pickle.loads(pickle.dumps(sampler)),
            copy.deepcopy(sampler),
            copy.copy(sampler),
        ):
            assert list(other) == list(sampler)


def test_a_sampler_with_a_memory_model_or_a_foreign_sampler_is_pickled() -> None:
    shapes = [(1, 16), (2, 32), (32, 16), (1, 512), (8, 128), (32, 512)]
    model = brim.MemoryModel().fit(shapes, [10_000 + 64 * n * length for n, length in shapes])
    packed = PackedBatchSampler(SIZES, "32KiB", cost=model)
    assert list(pickle.loads(pickle.dumps(packed))) == list(packed)
    generator = torch.Generator().manual_seed(4)
    foreign = SizeAwareBatchSampler(RandomSampler(range(90), generator=generator), SIZES, 40)
    len(foreign)
    other = pickle.loads(pickle.dumps(foreign))
    assert list(other) == list(foreign)
    by_mapping = SizeAwareBatchSampler(range(90), dict(enumerate(SIZES)), 40)
    assert list(pickle.loads(pickle.dumps(by_mapping))) == list(by_mapping)


def test_a_sampler_nests_in_torchs_own_parts() -> None:
    sampler = PackedBatchSampler(SIZES, 40)
    grouped = BatchSampler(sampler, batch_size=2, drop_last=False)  # type: ignore[arg-type]
    assert sum(len(pair) for pair in grouped) == len(sampler)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_sampler_in_the_place_of_single_samples_is_told(batch_size: int) -> None:
    sampler = PackedBatchSampler(SIZES, 40)
    data = torch.arange(len(SIZES))  # takes lists of indices too: nothing else would tell
    loader = DataLoader(data, sampler=sampler, batch_size=batch_size, collate_fn=list)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"PackedBatchSampler as sampler=.* pass it as batch_samp"):
        next(iter(loader))
    list(DataLoader(data, sampler=sampler, batch_size=None))  # type: ignore[arg-type]
