"""Settings of batch samplers, drawn at random."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

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
