"""What holds for every batch sampler, whatever the sizes: nothing lost, over budget or repeated."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import brim
from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

from .sampler_cases import COSTS, Case, cases, taken


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


@pytest.mark.filterwarnings("ignore:.*begins epoch 0 again")
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


@pytest.mark.filterwarnings("ignore:.*begins epoch 0 again")
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
