"""Options that all samplers have: oversize samples, counts, custom costs, samples of each epoch."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from brim.data import (
    BucketBatchSampler,
    PackedBatchSampler,
    SizeAwareBatchSampler,
    bucket_stream,
    pack_stream,
    size_aware_batching,
)

SIZES = np.random.default_rng(0).integers(1, 60, 400).tolist()

# By name: batches of SIZES under a budget, with these options.
MAKERS: dict[str, Callable[..., Any]] = {
    "ordered": lambda budget, **o: SizeAwareBatchSampler(range(400), SIZES, budget, **o),
    "asked": lambda budget, **o: SizeAwareBatchSampler(range(400), SIZES.__getitem__, budget, **o),
    "packed": lambda budget, **o: PackedBatchSampler(SIZES, budget, window=150, **o),
    "shuffled": lambda budget, **o: PackedBatchSampler(SIZES, budget, shuffle=True, **o),
    "bucket": lambda budget, **o: BucketBatchSampler(
        SIZES, [0, 20, 40, 60], max_total_size=budget, **o
    ),
    "stream": lambda budget, **o: size_aware_batching(range(400), SIZES.__getitem__, budget, **o),
    "pack_stream": lambda budget, **o: pack_stream(
        range(400), budget, sizeof=SIZES.__getitem__, lookahead=150, **o
    ),
    "bucket_stream": lambda budget, **o: bucket_stream(
        range(400), [0, 20, 40, 60], budget, sizeof=SIZES.__getitem__, lookahead=150, **o
    ),
}
SAMPLERS = ("ordered", "asked", "packed", "shuffled", "bucket")


def samples_of(batches: Any) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("cost", ["sum", "padded"])
@pytest.mark.parametrize("kind", MAKERS)
def test_oversize_samples_alone_or_truncated(kind: str, cost: str) -> None:
    def price(batch: list[int], most: int = 1000) -> int:
        sizes = [min(SIZES[sample], most) for sample in batch]
        return sum(sizes) if cost == "sum" else len(sizes) * max(sizes)

    alone = list(MAKERS[kind](45, cost=cost, oversize="alone"))
    assert samples_of(alone) == list(range(400))
    assert any(price(batch) > 45 for batch in alone)
    assert all(price(batch) <= 45 or len(batch) == 1 for batch in alone)
    truncated = list(MAKERS[kind](45, cost=cost, oversize="truncate"))
    assert samples_of(truncated) == list(range(400))
    assert all(price(batch, most=45) <= 45 for batch in truncated)
    assert any(price(batch) > 45 and len(batch) > 0 for batch in truncated)


def test_to_skip_is_to_leave_out() -> None:
    with pytest.warns(UserWarning, match="left out"):
        batches = [
            list(PackedBatchSampler(SIZES, 45, oversize=name)) for name in ("skip", "leave_out")
        ]
    assert batches[0] == batches[1]
    assert 0 < len(samples_of(batches[0])) < 400


def test_the_largest_size_is_what_samples_are_cut_to() -> None:
    assert PackedBatchSampler(SIZES, 100).largest_size == 100
    assert PackedBatchSampler(SIZES, 3600, cost="padded_squared").largest_size == 60
    assert PackedBatchSampler([0.5], 1.5).largest_size == 1.5
    several = PackedBatchSampler([(1, 2)], [10, 64], cost=["sum", "padded_squared"])
    assert several.largest_size == [10, 8]


@pytest.mark.parametrize(
    "price",
    [
        lambda n, longest: n * (3 * longest + longest**2),
        lambda n, longest: n * math.exp(longest),
        lambda n, longest: n * 10**longest,
        lambda n, longest: n * longest if longest < 100 else math.inf,
    ],
)
@pytest.mark.parametrize("kind", MAKERS)
def test_samples_are_truncated_under_any_function(kind: str, price: Any) -> None:
    longest_asked = 0

    def asked(n: int, longest: Any) -> Any:
        nonlocal longest_asked
        longest_asked = max(longest_asked, longest)
        return price(n, longest)

    batches = list(MAKERS[kind](45, cost=asked, oversize="truncate"))
    assert samples_of(batches) == list(range(400))
    most = max(length for length in range(60) if price(1, length) <= 45)
    for batch in batches:
        assert price(len(batch), min(most, max(SIZES[i] for i in batch))) <= 45
    assert longest_asked <= 64


def test_a_cost_may_exceed_what_a_double_holds_exactly() -> None:
    def price(n: int, longest: int) -> int:
        return n * longest * 10**18

    assert list(PackedBatchSampler([2, 3, 4], 6e18, cost=price)) == [[2], [1, 0]]


@pytest.mark.parametrize("cost", ["sum", "padded"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_largest_number_of_samples(kind: str, cost: str) -> None:
    batches = list(MAKERS[kind](500, cost=cost, max_batch_size=6))
    assert samples_of(batches) == list(range(400))
    assert max(map(len, batches)) == 6
    for batch in batches:
        sizes = [SIZES[sample] for sample in batch]
        assert (sum(sizes) if cost == "sum" else len(sizes) * max(sizes)) <= 500


def test_a_largest_number_of_samples_beside_several_budgets() -> None:
    sizes = [(size, 1 + size // 10) for size in SIZES]
    for make in (
        lambda: PackedBatchSampler(sizes, [300, 40], max_batch_size=7),
        lambda: PackedBatchSampler(torch.tensor(sizes), [300, 40], max_batch_size=7),
        lambda: SizeAwareBatchSampler(range(400), sizes.__getitem__, [300, 40], max_batch_size=7),
        lambda: BucketBatchSampler(sizes, [0, 60], max_total_size=[300, 40], max_batch_size=7),
    ):
        batches = list(make())
        assert samples_of(batches) == list(range(400))
        assert max(map(len, batches)) == 7


def test_a_largest_number_of_samples_in_fit(held: int) -> None:
    def work(batch: list[int]) -> None:
        torch.zeros(len(batch), max(batch), 256).sum()

    for kind in (PackedBatchSampler, SizeAwareBatchSampler):
        sampler: Any = kind.fit(SIZES, work, SIZES, held + 2**23, "cpu", max_batch_size=5)
        assert max(map(len, sampler)) == 5
    drawn: Any = PackedBatchSampler.fit(
        SIZES, work, SIZES, held + 2**23, "cpu", indices=lambda epoch: [epoch, epoch + 1]
    )
    assert samples_of(drawn) == [0, 1]
    assert samples_of(drawn) == [1, 2]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_numbers_of_samples_are_multiples(kind: str) -> None:
    batches = list(MAKERS[kind](600, cost="padded", batch_multiple=8))
    assert samples_of(batches) == list(range(400))
    counts = [len(batch) for batch in batches]
    assert all(count % 8 == 0 or count < 8 for count in counts)
    assert sum(count % 8 != 0 for count in counts) < len(counts) / 2
    with pytest.raises(ValueError, match="batch_multiple"):
        PackedBatchSampler(SIZES, 600, cost="sum", batch_multiple=8)
    with pytest.raises(ValueError, match="either batch_size or batch_multiple"):
        BucketBatchSampler(SIZES, [0, 60], batch_size=4, batch_multiple=8)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_multiple_of_more_samples_than_a_batch_may_have(kind: str) -> None:
    with pytest.raises(ValueError, match="a batch may have, 4, got 8"):
        list(MAKERS[kind](600, cost="padded", max_batch_size=4, batch_multiple=8))
    with pytest.raises(ValueError, match="a batch may have, 4, got 8"):
        list(MAKERS[kind](4, cost="count", batch_multiple=8))


def test_two_limits_of_the_number_of_samples_pack_like_sizes_in_multiples() -> None:
    sampler = PackedBatchSampler(SIZES, 40, cost="count", max_batch_size=7, batch_multiple=2)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [6] * 66 + [4]
    assert [SIZES[i] for batch in batches for i in batch] == sorted(SIZES, reverse=True)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_function_is_a_cost(kind: str) -> None:
    asked: list[tuple[int, Any]] = []

    def price(count: int, longest: Any) -> float:
        asked.append((count, longest))
        return 10 + count * longest**1.5

    batches = list(MAKERS[kind](1000, cost=price))
    assert samples_of(batches) == list(range(400))
    lengths = [max(SIZES[sample] for sample in batch) for batch in batches]
    prices = [price(len(batch), longest) for batch, longest in zip(batches, lengths, strict=True)]
    assert max(prices) <= 1000
    assert max(prices) > 900
    assert all(type(count) is int and type(longest) is int for count, longest in asked)
    assert len(asked) < 40 * 60 + 3 * 400, "answers are remembered"


def test_a_cost_of_several_and_in_states() -> None:
    def price(count: int, longest: Any) -> float:
        return float(count * longest)

    sampler = PackedBatchSampler(
        [(s, s) for s in SIZES], [300, 300], cost=[price, "padded"], window=100
    )
    running = iter(sampler)
    done = [next(running) for _ in range(5)]
    resumed = PackedBatchSampler(
        [(s, s) for s in SIZES], [300, 300], cost=[price, "padded"], window=100
    )
    resumed.load_state_dict(sampler.state_dict())
    assert samples_of([*done, *resumed]) == list(range(400))
    other = PackedBatchSampler([(s, s) for s in SIZES], [300, 300], cost="padded", window=100)
    with pytest.raises(ValueError, match="its cost is"):
        other.load_state_dict(sampler.state_dict())


def test_what_a_cost_function_does_wrong_is_told() -> None:
    def fails(count: int, longest: Any) -> float:
        raise KeyError("not known")

    with pytest.raises(KeyError, match="not known"):
        PackedBatchSampler(SIZES, 100, cost=fails)
    with pytest.raises(ValueError, match=r"cost must give numbers that are.*got -1 for 1 samples"):
        PackedBatchSampler(SIZES, 100, cost=lambda count, longest: -1)
    with pytest.raises(TypeError, match="what cost returns must be"):
        PackedBatchSampler(SIZES, 100, cost=lambda count, longest: "much")

    armed = []

    def late(count: int, longest: Any) -> float:
        if armed:
            raise KeyError("late")
        return float(count)

    sampler = PackedBatchSampler(SIZES, 20, cost=late)
    armed.append(True)
    for read in (list, len, PackedBatchSampler.plan, PackedBatchSampler.report):
        with pytest.raises(KeyError, match="late"):
            read(sampler)


def test_each_epoch_may_have_samples_of_its_own() -> None:
    weights = torch.linspace(0, 1, 400)

    def draw(epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(epoch)
        return torch.multinomial(weights, 300, replacement=True, generator=generator)

    def make(**options: Any) -> PackedBatchSampler:
        return PackedBatchSampler(SIZES, 200, indices=draw, shuffle=True, seed=1, **options)

    sampler = make()
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        expected = len(sampler)
        epochs.append(list(sampler))
        assert len(epochs[-1]) == expected
        assert samples_of(epochs[-1]) == sorted(draw(epoch).tolist())
    assert epochs[0] == epochs[2] != epochs[1]

    counting = PackedBatchSampler(SIZES, 200, indices=draw)  # epochs count by themselves
    assert [samples_of(counting) for _ in range(2)] == [
        sorted(draw(epoch).tolist()) for epoch in range(2)
    ]
    sampler.set_epoch(1)
    running = iter(sampler)
    done = [next(running) for _ in range(4)]
    resumed = make()
    resumed.load_state_dict(sampler.state_dict())
    assert done + list(resumed) == epochs[1]
    shares = [make(rank=rank, world_size=2) for rank in range(2)]
    assert samples_of(itertools.chain(*shares)) == sorted(draw(0).tolist())


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="max_batch_size must be at least 1, got 0"):
        PackedBatchSampler(SIZES, 100, max_batch_size=0)
    with pytest.raises(ValueError, match="max_batch_size=5 goes with max_total_size"):
        BucketBatchSampler(SIZES, [0, 60], batch_size=4, max_batch_size=5)
    with pytest.raises(ValueError, match="indices must be from 0 to 399"):
        PackedBatchSampler(SIZES, 100, indices=lambda epoch: [400])
    with pytest.raises(ValueError, match="as an iterable"):
        PackedBatchSampler(SIZES.__getitem__, 100, indices=lambda epoch: [1])
    with pytest.raises(ValueError, match="no sample fits"):
        PackedBatchSampler(SIZES, 5, cost=lambda count, longest: 9.0, oversize="truncate")


def test_a_sampler_shows_its_budget_and_cost() -> None:
    sampler = PackedBatchSampler(SIZES, 600, cost="padded")
    shown = "PackedBatchSampler(max_total_size=600, cost='padded', shuffle=False, epoch=0)"
    assert repr(sampler) == shown


def test_an_unknown_keyword_names_those_that_there_are() -> None:
    with pytest.raises(TypeError, match=r"'batch_size': all samplers take .* max_batch_size,"):
        PackedBatchSampler(SIZES, 600, batch_size=4)  # type: ignore[call-arg]


def test_one_cost_is_the_default_everywhere() -> None:
    from inspect import signature

    from brim.cli.plan import add_arguments

    lengths = [5, 9, 2, 7, 1, 8]
    samplers: list[Any] = [
        PackedBatchSampler(lengths, 16),
        SizeAwareBatchSampler(range(6), lengths, 16),
        BucketBatchSampler(lengths, [0, 6, 10], max_total_size=16),
    ]
    batches = [list(sampler) for sampler in samplers]
    batches.append(list(size_aware_batching(range(6), lengths.__getitem__, 16)))
    batches.append(list(pack_stream(range(6), 16, sizeof=lengths.__getitem__)))
    batches.append(list(bucket_stream(range(6), [0, 6, 10], 16, sizeof=lengths.__getitem__)))
    for some in batches:
        assert max(len(batch) * max(lengths[i] for i in batch) for batch in some) <= 16
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert {sampler.cost for sampler in samplers} == {"padded"}
    assert signature(PackedBatchSampler.fit).parameters["cost"].default == "padded"
    assert parser.get_default("cost") == "padded"
