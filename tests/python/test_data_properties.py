"""What holds for every batch sampler, whatever the sizes: nothing lost, over budget or repeated."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import brim
from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

COSTS: dict[str, Callable[[list[int]], int]] = {
    "sum": sum,
    "count": len,
    "padded": lambda sizes: len(sizes) * max(sizes),
    "padded_squared": lambda sizes: len(sizes) * max(sizes) ** 2,
    "flops": lambda sizes: len(sizes) * (24576 * max(sizes) + max(sizes) ** 2),
}


@dataclass(frozen=True)
class Case:
    """A sampler's settings, so that several alike can be made."""

    kind: str
    sizes: list[Any]
    costs: list[str]
    maxima: list[int]
    shuffle: bool = False
    seed: int = 0
    window: int | None = 4
    rank: int = 0
    world_size: int = 1
    as_tensors: bool = False

    def make(self, **changes: Any) -> Any:
        case = replace(self, **changes)
        several = len(case.maxima) > 1
        cost = case.costs if several else case.costs[0]
        maximum = case.maxima if several else case.maxima[0]
        options: dict[str, Any] = {
            "shuffle": case.shuffle,
            "seed": case.seed,
            "rank": case.rank,
            "world_size": case.world_size,
            "as_tensors": case.as_tensors,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samples left out: those are looked up
            if case.kind == "ordered":
                order = range(len(case.sizes))
                return SizeAwareBatchSampler(order, case.sizes, maximum, cost=cost, **options)
            if case.kind == "packed":
                return PackedBatchSampler(
                    case.sizes, maximum, cost=cost, window=case.window, **options
                )
            return BucketBatchSampler(
                case.sizes, [0, 3, 8, 21], max_total_size=maximum, cost=cost, **options
            )

    def ranks(self, world_size: int) -> list[Any]:
        return [self.make(rank=rank, world_size=world_size) for rank in range(world_size)]

    def rows(self, batch: list[int]) -> list[list[int]]:
        """The sizes in a batch, column by column."""
        if len(self.maxima) == 1:
            return [[self.sizes[index] for index in batch]]
        return [[self.sizes[index][k] for index in batch] for k in range(len(self.maxima))]

    def fits(self, batch: list[int]) -> bool:
        columns = self.rows(batch)
        return all(
            COSTS[cost](column) <= maximum
            for cost, column, maximum in zip(self.costs, columns, self.maxima, strict=True)
        )


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = ("ordered", "packed", "bucket")) -> Case:
    budgets = draw(st.integers(1, 2))
    size = st.integers(0, 20)
    row: Any = size if budgets == 1 else st.tuples(size, size)
    sizes = draw(st.lists(row, max_size=50))
    costs = [draw(st.sampled_from(sorted(COSTS))) for _ in range(budgets)]
    most = {"sum": 60, "count": 9, "padded": 80, "padded_squared": 900, "flops": 2_000_000}
    least = {"sum": 10, "count": 1, "padded": 10, "padded_squared": 100, "flops": 250_000}
    case = Case(
        kind=draw(st.sampled_from(kinds)),
        sizes=sizes,
        costs=costs,
        maxima=[draw(st.integers(least[cost], most[cost])) for cost in costs],
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 2**63 - 1)),
        window=draw(st.none() | st.integers(1, 12)),
    )
    if case.kind == "bucket" and not any(case.fits([index]) for index in range(len(sizes))):
        case = replace(case, kind="packed")  # buckets with no sample at all are an error
    return case


def taken(sampler: Any) -> list[list[int]]:
    return [[int(index) for index in batch] for batch in sampler]


# ---------------------------------------------------------------- what is in the batches


@given(cases(), st.integers(1, 5))
def test_each_index_is_in_one_batch_of_one_rank_or_reported_with_a_reason(
    case: Case, world_size: int
) -> None:
    ranks = case.ranks(world_size)
    batches = [taken(sampler) for sampler in ranks]
    report = ranks[0].report()
    left_out = {reason: indices.tolist() for reason, indices in report.left_out.items()}

    seen = Counter(chain.from_iterable(chain.from_iterable(batches)))
    seen.update(chain.from_iterable(left_out.values()))
    assert seen == Counter(range(len(case.sizes)))
    assert set(left_out) <= {"over budget", "too few for ranks"}
    over = [index for index in range(len(case.sizes)) if not case.fits([index])]
    assert sorted(left_out.get("over budget", [])) == over
    assert report.samples == len(case.sizes)
    assert report.batched == sum(len(batch) for batch in chain.from_iterable(batches))
    assert report.batches == sum(map(len, batches))
    assert report.world_size == world_size


@given(cases(), st.integers(1, 5))
def test_no_batch_is_over_any_budget_and_none_is_empty(case: Case, world_size: int) -> None:
    for sampler in case.ranks(world_size):
        for batch in taken(sampler):
            assert batch
            assert case.fits(batch)


@given(cases(), st.integers(1, 5))
def test_ranks_have_equally_many_batches_as_len_says_before(case: Case, world_size: int) -> None:
    ranks = case.ranks(world_size)
    lengths = [len(sampler) for sampler in ranks]
    assert lengths == [len(taken(sampler)) for sampler in ranks]
    assert len(set(lengths)) == 1


@given(cases(), st.integers(1, 3), st.data())
def test_plan_and_tensors_are_the_same_batches(
    case: Case, world_size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    sampler = case.make(rank=rank, world_size=world_size)
    plan = sampler.plan()
    planned = [
        plan.indices[begin:end].tolist()
        for begin, end in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)
    ]
    batches = list(sampler)
    assert planned == batches
    assert all(type(batch) is list for batch in batches)
    assert all(type(index) is int for batch in batches for index in batch)
    as_tensors = list(case.make(rank=rank, world_size=world_size, as_tensors=True))
    assert all(batch.dtype == torch.int64 for batch in as_tensors)
    assert [batch.tolist() for batch in as_tensors] == batches


@given(cases(kinds=("ordered",)))
def test_ordered_batches_are_closed_only_when_the_next_sample_does_not_fit(case: Case) -> None:
    expected: list[list[int]] = []
    for index in range(len(case.sizes)):
        if not case.fits([index]):
            continue
        if expected and case.fits([*expected[-1], index]):
            expected[-1].append(index)
        else:
            expected.append([index])
    assert list(case.make(shuffle=False)) == expected


@given(cases())
def test_streaming_gives_the_batches_of_the_table(case: Case) -> None:
    order, several = range(len(case.sizes)), len(case.maxima) > 1
    streaming = SizeAwareBatchSampler(
        order,
        case.sizes.__getitem__,
        case.maxima if several else case.maxima[0],
        cost=case.costs if several else case.costs[0],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [batch for batch in iter(streaming)]  # noqa: C416 - list() would ask for len
    assert batches == list(case.make(kind="ordered", shuffle=False))


@given(cases())
def test_report_agrees_with_a_count_by_hand(case: Case) -> None:
    sampler = case.make()
    batches, report = taken(sampler), sampler.report()
    if not batches:
        assert (report.fill, report.padding, report.batches) == (0, 0, 0)
        return
    fills = [
        max(
            COSTS[cost](column) / maximum
            for cost, column, maximum in zip(case.costs, case.rows(batch), case.maxima, strict=True)
        )
        for batch in batches
    ]
    assert report.fill == pytest.approx(sum(fills) / len(fills))
    first = [case.rows(batch)[0] for batch in batches]
    padded = sum(len(sizes) * max(sizes) for sizes in first)
    real = sum(map(sum, first))
    assert report.padding == pytest.approx((1 - real / padded) if padded else 0)
    assert report.imbalance == 0
    assert f"{report.batched} of {report.samples} samples" in str(report)


def test_a_fitted_model_as_cost_keeps_every_batch_within_its_safe_peak() -> None:
    shapes = [(1, 16), (2, 32), (32, 16), (1, 512), (8, 128), (32, 512)]
    model = brim.MemoryModel().fit(
        shapes, [10_000 + 64 * n * length + n * length**2 for n, length in shapes]
    )
    lengths = torch.randint(1, 300, (500,), generator=torch.Generator().manual_seed(0))
    for sampler in (
        SizeAwareBatchSampler(range(500), lengths, "1MiB", cost=model),
        PackedBatchSampler(lengths, "1MiB", cost=model),
        BucketBatchSampler(lengths, [1, 50, 150, 300], max_total_size="1MiB", cost=model),
    ):
        batches = list(sampler)
        assert sorted(chain.from_iterable(batches)) == list(range(500))
        peaks = [model.safe_peak(len(batch), int(lengths[batch].max())) for batch in batches]
        assert max(peaks) <= 2**20
        assert sampler.report().fill > 0.7


# ---------------------------------------------------------------- epochs and seeds


@given(cases())
def test_the_same_settings_give_the_same_batches_and_iterating_changes_nothing(case: Case) -> None:
    sampler = case.make()
    once = taken(sampler)
    assert taken(sampler) == once
    assert taken(case.make()) == once


def test_epochs_and_seeds_are_unlike_each_other_and_come_back() -> None:
    sizes = list(range(1, 21)) * 5
    for kind in ("ordered", "packed", "bucket"):
        sampler = Case(kind, sizes, ["sum"], [40], shuffle=True, seed=3).make()
        epochs = []
        for epoch in (0, 1, 2, 1):
            sampler.set_epoch(epoch)
            epochs.append(taken(sampler))
        assert epochs[1] == epochs[3]
        assert len({str(batches) for batches in epochs}) == 3
        assert taken(Case(kind, sizes, ["sum"], [40], shuffle=True, seed=4).make()) != epochs[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda g: SizeAwareBatchSampler(range(60), [1] * 60, 7, shuffle=True, generator=g),
        lambda g: PackedBatchSampler([1] * 60, 7, shuffle=True, generator=g),
        lambda g: BucketBatchSampler([1] * 60, [0, 2], batch_size=7, generator=g),
    ],
)
def test_a_generator_decides_all_epochs_and_none_means_torchs_own(
    make: Callable[[torch.Generator | None], Any],
) -> None:
    def epochs(seed: int, own: bool) -> list[list[list[int]]]:
        generator = torch.Generator().manual_seed(seed) if own else None
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            sampler = make(generator)
            return [list(sampler) for _ in range(3)]

    for own in (True, False):
        if not own and make(None).__class__ is PackedBatchSampler:
            continue  # whose seed is 0 unless another is given
        first = epochs(5, own)
        assert first == epochs(5, own)
        assert first != epochs(6, own)
        assert len({str(batches) for batches in first}) == 3


# ---------------------------------------------------------------- iterators side by side


@given(cases(), st.lists(st.booleans(), max_size=30))
def test_two_live_iterators_do_not_disturb_each_other(case: Case, turns: list[bool]) -> None:
    sampler = case.make()
    expected = taken(sampler)
    sides = [iter(sampler), iter(sampler)]
    got: list[list[list[int]]] = [[], []]
    for turn in turns:
        got[turn].extend(islice(sides[turn], 1))
    for side in (0, 1):
        got[side].extend(sides[side])
        assert got[side] == expected


# ---------------------------------------------------------------- resuming


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
    (SizeAwareBatchSampler, {"cost": "padded"}, r"cost is \['sum'\], here it is \['padded'\]"),
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
