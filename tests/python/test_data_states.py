"""States of batch samplers: resuming from them anywhere, and those that are refused."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import brim
from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

from .sampler_cases import Case, cases, taken


@given(cases(), st.integers(1, 3), st.data())
def test_resuming_anywhere_equals_the_uninterrupted_run(
    case: Case, world_size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    epoch = data.draw(st.integers(0, 5))
    sampler = case.make(rank=rank, world_size=world_size)
    sampler.set_epoch(epoch)
    whole = taken(sampler)
    done = data.draw(st.integers(0, len(whole)))
    running = iter(sampler)
    head = list(islice(running, done))
    state = json.loads(json.dumps(sampler.state_dict()))
    ahead = list(islice(running, data.draw(st.integers(0, 3))))  # as a DataLoader fetches
    assert not state["finished"]
    if done < len(whole):  # a look beyond the last batch finishes the epoch
        behind = case.make(rank=rank, world_size=world_size)
        behind.load_state_dict(sampler.state_dict(batches=done))
        assert head + taken(behind) == whole

    resumed = case.make(rank=rank, world_size=world_size)
    resumed.load_state_dict(state)
    assert resumed.epoch == epoch
    assert resumed.state_dict() == state
    resumed.set_epoch(epoch)  # as training loops do; must not forget the position
    assert len(resumed) == len(whole) - done
    plan = resumed.plan()
    rest = taken(resumed)
    assert head + rest == whole
    assert plan.indices.tolist() == list(chain.from_iterable(rest))
    assert head + ahead + list(running) == whole  # the first run went on undisturbed
    assert taken(resumed) == whole  # and the next iteration is a whole one again


@given(cases(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_ranks_may_change_at_any_point_again_and_again(
    case: Case, first: int, second: int, third: int, data: st.DataObject
) -> None:
    got: list[int] = []
    state = None
    for step, world_size in enumerate((first, second, third)):
        ranks = case.ranks(world_size)
        if state is not None:
            for sampler in ranks:
                sampler.load_state_dict(state)
        length = len(ranks[0])
        assert {len(sampler) for sampler in ranks} == {length}
        done = length if step == 2 else data.draw(st.integers(0, length))
        states = []
        for sampler in ranks:
            for batch in islice(iter(sampler), done):
                assert case.fits(batch)
                got.extend(batch)
            states.append(sampler.state_dict(batches=done))
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))

    assert max(Counter(got).values(), default=1) == 1
    missing = set(range(len(case.sizes))) - set(got)
    missing -= {index for index in missing if not case.fits([index])}
    # Only the last few can be too few to give every rank a batch.
    assert len(missing) < max(first, second, third)


@pytest.mark.parametrize("kind", ["ordered", "packed", "bucket"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_resuming_far_into_many_blocks(kind: str, shuffle: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 20, (60_000,), generator=generator).tolist()
    case = Case(kind, sizes, ["sum"], [64], shuffle=shuffle, seed=9, window=1000)
    whole = taken(case.make())
    for done in (0, 1, 1023, 1024, len(whole) // 2, len(whole) - 1, len(whole)):
        sampler = case.make()
        running = iter(sampler)
        for _ in islice(running, done):
            pass
        resumed = case.make()
        resumed.load_state_dict(sampler.state_dict())
        assert len(resumed) == len(whole) - done
        assert taken(resumed) == whole[done:]


@pytest.mark.parametrize("kind", ["ordered", "packed", "bucket"])
def test_after_a_finished_epoch_the_next_iteration_is_a_whole_one(kind: str) -> None:
    case = Case(kind, [1, 2, 3] * 9, ["sum"], [7], shuffle=True)
    sampler = case.make()
    sampler.set_epoch(4)
    whole = list(sampler)
    state = sampler.state_dict()
    assert state["finished"]
    resumed = case.make()
    resumed.load_state_dict(state)
    assert resumed.epoch == 4
    assert list(resumed) == whole


@pytest.mark.parametrize("kind", ["ordered", "packed", "bucket"])
def test_another_epoch_drops_a_loaded_position(kind: str) -> None:
    case = Case(kind, [1, 2, 3] * 9, ["sum"], [7], shuffle=True)
    sampler = case.make()
    next(iter(sampler))
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    fresh = case.make()
    fresh.set_epoch(1)
    assert list(sampler) == list(fresh)


@pytest.mark.parametrize("kind", ["ordered", "packed", "bucket"])
def test_an_iterator_made_before_the_epoch_is_set_again_uses_the_position_up(kind: str) -> None:
    sampler = Case(kind, [1, 2, 3] * 9, ["sum"], [7], shuffle=True).make()
    running = iter(sampler)
    next(running)
    state, rest = sampler.state_dict(), list(running)
    sampler.load_state_dict(state)
    running = iter(sampler)
    sampler.set_epoch(0)
    assert list(running) == rest
    assert len(list(sampler)) == len(rest) + 1


def test_a_drawn_seed_is_part_of_the_state() -> None:
    def make() -> PackedBatchSampler:
        generator = torch.Generator().manual_seed(torch.seed() % 2**32)
        return PackedBatchSampler([1] * 40, 5, shuffle=True, generator=generator)

    sampler = make()
    running = iter(sampler)
    head = list(islice(running, 3))
    resumed = make()
    resumed.load_state_dict(sampler.state_dict(batches=3))
    assert list(resumed) == list(running)
    assert len(head) == 3


# ---------------------------------------------------------------- states that are not ours


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"samples": 3}, ValueError, "its samples is 3, here it is 27"),
        ({"sampler": "PackedBatchSampler"}, ValueError, "its sampler is 'PackedBatchSampler'"),
        ({"format": 2}, ValueError, "its format is 2, here it is 1"),
        ({"epoch": -1}, ValueError, "epoch must be at least 0, got -1"),
        ({"epoch": "1"}, TypeError, "epoch must be an int, got '1'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 2**64}, ValueError, r"seed must be below 2\*\*64"),
        ({"finished": 1}, TypeError, "finished must be True or False, got 1"),
        ({"cursor": [-1, 1]}, ValueError, "cursor must be at least 0, got -1"),
        ({"cursor": ["a", 1]}, TypeError, "cursor must be an int, got 'a'"),
        ({"cursor": [1000, 1]}, ValueError, "position is not one of these samples"),
        ({"cursor": [0, 0]}, ValueError, "position is not one of these samples"),
        ({"cursor": [0, 1, 2]}, ValueError, "position is not one of these samples"),
        ({"cursor": [0, 1024], "segments": [[1, 0]]}, ValueError, "3 numbers, got .1, 0."),
        ({"cursor": [0, 1024], "segments": [7]}, ValueError, "3 numbers, got 7"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    case = Case("ordered", [1, 2, 3] * 9, ["sum"], [7], shuffle=True, seed=5)
    sampler = case.make()
    sampler.set_epoch(2)
    expected = case.make()
    expected.set_epoch(2)
    with pytest.raises(error, match=text):
        sampler.load_state_dict({**sampler.state_dict(), **changes})
    assert sampler.epoch == 2
    assert list(sampler) == list(expected)


SETTINGS: list[tuple[Any, dict[str, Any], str]] = [
    (SizeAwareBatchSampler, {"max_total_size": 8}, r"max_total_size is \[7\], here it is \[8\]"),
    (SizeAwareBatchSampler, {"cost": "sum"}, r"cost is \['padded'\], here it is \['sum'\]"),
    (SizeAwareBatchSampler, {"shuffle": True}, "shuffle is False, here it is True"),
    (PackedBatchSampler, {"max_total_size": 7.5}, r"max_total_size is \[7\], here it is \[7.5\]"),
    (PackedBatchSampler, {"window": None}, "window is 10000, here it is None"),
    (BucketBatchSampler, {"batch_size": 3}, r"batch_size is \[2\], here it is \[3\]"),
    (BucketBatchSampler, {"drop_last": True}, "drop_last is False, here it is True"),
    (BucketBatchSampler, {"bucket_boundaries": [0, 6]}, r"bucket_boundaries is \[0.0, 5.0\]"),
]


@pytest.mark.parametrize(("sampler", "changes", "text"), SETTINGS)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_state_of_other_settings_is_refused(
    sampler: Any, changes: dict[str, Any], text: str
) -> None:
    """Its place among their batches would be another sample here: some lost, some twice."""
    sizes = [1, 2, 3] * 9
    arguments: dict[Any, dict[str, Any]] = {
        SizeAwareBatchSampler: {"sampler": range(27), "sizeof": sizes, "max_total_size": 7},
        PackedBatchSampler: {"sizes": sizes, "max_total_size": 7},
        BucketBatchSampler: {
            "sizes": sizes,
            "bucket_boundaries": [0, 5],
            "batch_size": 2,
            "shuffle": False,
        },
    }
    one = sampler(**arguments[sampler])
    next(iter(one))
    state = json.loads(json.dumps(one.state_dict()))
    sampler(**arguments[sampler]).load_state_dict(state)
    with pytest.raises(ValueError, match=f"state is of another run: its {text}"):
        sampler(**{**arguments[sampler], **changes}).load_state_dict(state)


def test_a_state_of_another_memory_model_is_refused() -> None:
    shapes = [(1, 16), (2, 32), (32, 16), (1, 512), (8, 128), (32, 512)]
    models = [
        brim.MemoryModel().fit(shapes, [10_000 + factor * n * length for n, length in shapes])
        for factor in (64, 64, 65)
    ]
    samplers = [PackedBatchSampler([5, 9, 12], "1MiB", cost=model) for model in models]
    samplers[1].load_state_dict(samplers[0].state_dict())
    with pytest.raises(ValueError, match="another run: its cost is"):
        samplers[2].load_state_dict(samplers[0].state_dict())


@pytest.mark.parametrize("state", [5, None, [1, 2]])
def test_a_state_that_is_no_mapping_is_a_type_error(state: Any) -> None:
    with pytest.raises(TypeError, match="state must be what state_dict"):
        Case("packed", [1], ["sum"], [7]).make().load_state_dict(state)


def test_a_state_that_lacks_something_says_what() -> None:
    sampler = Case("packed", [1], ["sum"], [7]).make()
    state = sampler.state_dict()
    del state["seed"]
    with pytest.raises(ValueError, match=r"it lacks \['seed'\]"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("kind", ["ordered", "packed", "bucket"])
def test_state_after_more_batches_than_were_given_is_refused(kind: str) -> None:
    sampler = Case(kind, [1, 2, 3] * 9, ["sum"], [7]).make()
    with pytest.raises(ValueError, match=r"batches must be 0 before .*got 1"):
        sampler.state_dict(batches=1)
    assert sampler.state_dict(batches=0) == sampler.state_dict()
    running = iter(sampler)
    next(running)
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=f"batches must be .*got {wrong}"):
            sampler.state_dict(batches=wrong)
    for wrong_type in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="batches must be an int"):
            sampler.state_dict(batches=wrong_type)
