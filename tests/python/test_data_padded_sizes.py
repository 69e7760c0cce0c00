"""Samples that are padded in several sizes under one budget, against the definition of the cost."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

from . import padded_networks

Price = Callable[..., float]


def longest_of(combine: Callable[[list[int]], int], price: Callable[[int, int], int]) -> Price:
    return lambda n, *longest: price(n, combine(list(longest)))


PRICES: dict[str, Price] = {
    "padded": longest_of(sum, lambda n, x: n * x),
    "padded_product": longest_of(math.prod, lambda n, x: n * x),
    "padded_squared": longest_of(sum, lambda n, x: n * x * x),
    "flops": longest_of(sum, lambda n, x: n * x * (24576 + x)),
}


def cost_of(price: Price, sizes: torch.Tensor, batch: list[int]) -> float:
    return price(len(batch), *(max(sizes[batch][:, c].tolist()) for c in range(sizes.shape[1])))


def random_sizes(dice: random.Random, samples: int, columns: int, *, real: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dice.randrange(2**32))
    common = torch.randn(samples, 1, generator=generator)
    own = torch.randn(samples, columns, generator=generator)
    share = dice.random()
    sizes = (2.5 + 0.7 * (share * common + (1 - share) * own)).exp()
    sizes = sizes if real else sizes.long()
    return sizes * (torch.rand(samples, columns, generator=generator) > 0.02)  # some are 0


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("cost", [*PRICES, "function"])
@pytest.mark.parametrize("kind", [SizeAwareBatchSampler, PackedBatchSampler, BucketBatchSampler])
def test_no_batch_costs_more_and_no_sample_is_lost(kind: Any, cost: str) -> None:
    dice = random.Random(f"{kind.__name__} {cost}")
    price = PRICES.get(cost, lambda n, *longest: n * max(longest) + 3 * sum(longest))
    for round_ in range(4):
        columns = dice.randint(2, 4)
        sizes = random_sizes(dice, dice.choice([1, 40, 300]), columns, real=dice.random() < 0.3)
        alone = sorted(cost_of(price, sizes, [i]) for i in range(len(sizes)))
        budget = max(alone[int(0.97 * (len(alone) - 1))] * dice.choice([1, 5, 30]), 1)
        options: dict[str, Any] = {
            "cost": cost if cost in PRICES else price,
            "shuffle": round_ % 2 == 0,
            "max_batch_size": dice.choice([None, 9]),
            "batch_multiple": dice.choice([1, 4]),
        }
        given: Any = sizes if round_ % 3 else [tuple(row) for row in sizes.tolist()]
        if kind is SizeAwareBatchSampler:
            made = kind(range(len(sizes)), given, budget, seed=1, **options)
        elif kind is PackedBatchSampler:
            made = kind(given, budget, seed=1, window=dice.choice([37, 10_000]), **options)
        else:
            made = kind(given, [0, 5, 12, math.inf], max_total_size=budget, seed=1, **options)
        batches = list(made)
        for batch in batches:
            assert cost_of(price, sizes, batch) <= budget * (1 + 1e-12)
            assert len(batch) <= (options["max_batch_size"] or math.inf)
        left_out = made.report().left_out.get("over budget", torch.empty(0)).tolist()
        assert sorted(left_out + [i for batch in batches for i in batch]) == list(range(len(sizes)))
        for i in left_out:
            assert cost_of(price, sizes, [i]) > budget * (1 - 1e-12)
        made.set_epoch(0)
        assert list(made) == batches  # as the seed says


@pytest.mark.filterwarnings("ignore:.*left out")
def test_report_counts_fill_and_padding_by_the_cost() -> None:
    dice = random.Random(5)
    for cost, price in PRICES.items():
        sizes = random_sizes(dice, 200, 3, real=False)
        budget = 30 * int(max(cost_of(price, sizes, [i]) for i in range(200)))
        made = PackedBatchSampler(sizes, budget, cost=cost)
        costs = [cost_of(price, sizes, batch) for batch in made]
        own = sum(cost_of(price, sizes, [i]) for batch in made for i in batch)
        report = made.report()
        assert report.fill == pytest.approx(sum(costs) / len(costs) / budget)
        assert report.padding == pytest.approx(1 - own / sum(costs))


def test_ranks_share_the_batches_and_resume_anywhere() -> None:
    sizes = random_sizes(random.Random(1), 700, 2, real=False) + 1
    price = PRICES["padded_product"]

    def sampler(rank: int, world_size: int, epoch: int = 1) -> PackedBatchSampler:
        made = PackedBatchSampler(
            sizes, 6000, cost="padded_product", shuffle=True, seed=4, window=200,
            rank=rank, world_size=world_size, oversize="alone",
        )  # fmt: skip
        made.set_epoch(epoch)
        return made

    whole = list(sampler(0, 1))
    assert whole == list(sampler(0, 1))
    assert whole != list(sampler(0, 1, epoch=2))
    shared = [list(sampler(rank, 3)) for rank in range(3)]
    assert len({len(batches) for batches in shared}) == 1
    assert sorted(i for batches in shared for batch in batches for i in batch) == list(range(700))
    assert all(cost_of(price, sizes, b) <= 6000 or len(b) == 1 for part in shared for b in part)
    for done in range(0, len(whole), 7):
        stopped = sampler(0, 1)
        running = iter(stopped)
        for _ in range(done):
            next(running)
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = sampler(0, 1, epoch=0)
        resumed.load_state_dict(state)
        assert list(resumed) == whole[done:]


@pytest.mark.parametrize(
    ("cost", "kind", "padded", "before"),
    [
        ("padded", "pairs", 0.88, 0.84),
        ("padded_product", "images", 0.92, 0.75),
        ("padded_product", "alignments", 0.80, 0.60),
    ],
)
def test_batches_are_alike_in_all_sizes(cost: str, kind: str, padded: float, before: float) -> None:
    """A share of useful work that batches sorted by one number are far from."""
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "pairs": padded_networks.lengths_of_pairs(generator, 5000, 0.25),
        "images": padded_networks.shapes_of_images(generator, 5000, 200),
        "alignments": padded_networks.shapes_of_alignments(generator, 5000, 2.5),
    }[kind]
    price = PRICES[cost]
    own = torch.tensor([cost_of(price, sizes, [i]) for i in range(len(sizes))]).double()
    budget = int(24 * own.mean())
    for shuffle in (False, True):
        report = PackedBatchSampler(sizes, budget, cost=cost, shuffle=shuffle).report()
        assert 1 - report.padding >= padded
        assert report.fill >= 0.85
    by_one = own.argsort(descending=True)
    sorted_by_one = SizeAwareBatchSampler(by_one, sizes, budget, cost=cost).report()
    assert 1 - sorted_by_one.padding < before


def test_huge_sizes_do_not_overflow() -> None:
    for cost in PRICES:
        sizes = torch.tensor([[2**62, 2**62, 2**62], [3, 4, 5], [2**62, 0, 1], [1, 1, 1]])
        with pytest.warns(UserWarning, match="left out, over budget: 0"):
            made = PackedBatchSampler(sizes, 10**7, cost=cost)
        left_out = [0] if cost == "padded_product" else [0, 2]  # its product is 0
        assert made.report().left_out["over budget"].tolist() == left_out
    most = torch.full((3, 2), 2**62)
    for cost in ("padded", "padded_product"):
        with pytest.warns(UserWarning, match="3 of 3 samples are left out"):
            made = PackedBatchSampler(most, 2**63 - 1, cost=cost)
        assert list(made) == []
    assert list(PackedBatchSampler(most.double(), 1e300, cost="padded_product")) == [[0, 1, 2]]


@pytest.mark.filterwarnings("ignore:.*left out")
def test_wrong_sizes_and_costs() -> None:
    pairs = torch.tensor([[3, 4], [5, 6]])

    def make(sizes: Any = pairs, budget: Any = 100, **options: Any) -> PackedBatchSampler:
        return PackedBatchSampler(sizes, budget, **options)

    with pytest.raises(ValueError, match="sizes must be finite and not negative, got -1 at index"):
        make(torch.tensor([[3, 4], [5, -1]]))
    with pytest.raises(ValueError, match="sizes must be finite and not negative, got nan at index"):
        make(torch.tensor([[3, 4], [5, math.nan]]))
    with pytest.raises(ValueError, match="2 numbers for each sample, as for the first one"):
        make([(3, 4), (5, 6, 7)])
    for cost in ("sum", "count"):
        with pytest.raises(ValueError, match="cost must depend on the longest sample"):
            make(cost=cost)
    with pytest.raises(ValueError, match="a limit counts at most 8 sizes"):
        make(torch.ones(2, 9))
    with pytest.raises(ValueError, match="cost must give numbers that are not negative"):
        make(cost=lambda n, a, b: -1.0)
    with pytest.raises(TypeError):
        list(make(cost=lambda n, a: n * a))
    with pytest.raises(ValueError, match="largest_size needs a max_total_size for each size"):
        make().largest_size  # noqa: B018
    with pytest.raises(ValueError, match='oversize "truncate" needs a max_total_size for each'):
        make(budget=7, oversize="truncate")
    with pytest.raises(ValueError, match=r"sample 1 exceeds .* its size is 5 × 6, .* is 7"):
        make(budget=7, oversize="error")


def test_copies_have_the_same_batches() -> None:
    sizes = random_sizes(random.Random(2), 300, 2, real=False)
    made = PackedBatchSampler(sizes, 4000, cost="padded_product", shuffle=True, seed=1)
    batches = list(made)
    assert list(pickle.loads(pickle.dumps(made))) == batches
    assert list(copy.deepcopy(made)) == batches


def test_a_budget_for_each_size_takes_alike_samples_too() -> None:
    sizes = padded_networks.shapes_of_alignments(torch.Generator().manual_seed(3), 2000, 2.5)
    made = PackedBatchSampler(sizes, [800, 500], cost="padded")
    batches = list(made)
    for batch in batches:
        assert len(batch) * sizes[batch][:, 0].max() <= 800
        assert len(batch) * sizes[batch][:, 1].max() <= 500
    assert sorted(i for batch in batches for i in batch) == list(range(2000))
