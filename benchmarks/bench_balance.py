"""Balance: imbalance, violations of a cap, and time, beside the methods of RL libraries.

The methods are short versions of our own: Karmarkar-Karp with equal counts and without, as in verl;
and as many parts as first fit by tokens needs, with Karmarkar-Karp by FLOPs, as in slime and miles.
The work of a sample is 24576 L + L². Imbalance is the largest work of a part over the mean, less 1.

    ./dev bench balance
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from harness import milliseconds, progress
from results import Table

from brim import data

Parts = list[list[int]]


def karmarkar_karp(costs: list[float], parts: int, equal_count: bool) -> Parts:
    """The two partial divisions with the largest differences are merged until one is left."""
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    together = parts if equal_count else 1
    heap = []
    for number, begin in enumerate(range(0, len(order), together)):
        slots = [(costs[i], [i]) for i in order[begin : begin + together]]
        slots += [(0.0, [])] * (parts - len(slots))
        heap.append((slots[-1][0] - slots[0][0], number, slots))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda slot: -slot[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [items for _, items in heap[0][2]]


def first_fit(sizes: list[int], cap: int) -> int:
    """The number of parts that first fit needs."""
    totals: list[int] = []
    for size in sizes:
        place = next((p for p, total in enumerate(totals) if total + size <= cap), None)
        if place is None:
            totals.append(size)
        else:
            totals[place] += size
    return len(totals)


class Mix(NamedTuple):
    """Lengths: log-normal ones, cut at both ends."""

    name: str
    median: float
    spread: float
    least: int
    most: int

    def lengths(self, count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(count, generator=generator).mul_(self.spread).exp_().mul_(self.median)
        return drawn.clamp_(self.least, self.most).long()


MIXES = [
    Mix("chat, to 16k", 600, 1.0, 10, 16384),
    Mix("reasoning, to 32k", 2500, 0.9, 50, 32768),
    Mix("documents, to 64k", 4000, 1.5, 100, 65536),
]


class Quality:
    """Means over several batches."""

    def __init__(self) -> None:
        self.imbalance = self.over = self.fullest = self.seconds = 0.0
        self.parts = self.runs = 0

    def add(self, divide: Callable[[], Parts], lengths: torch.Tensor, cap: float) -> None:
        begin = time.process_time()
        parts = divide()
        self.seconds += time.process_time() - begin
        work = data.flops(lengths)
        loads = [float(work[part].sum()) for part in parts]
        tokens = [int(lengths[part].sum()) for part in parts]
        self.imbalance += max(loads) / (sum(loads) / len(loads)) - 1
        self.over += sum(total > cap for total in tokens)
        self.fullest = max(self.fullest, max(tokens) / cap)
        self.parts += len(parts)
        self.runs += 1

    def row(self, table: Table, name: str) -> None:
        table.row(
            name,
            f"{self.imbalance / self.runs:.4%}",
            f"{self.over:.0f} parts over the cap of {self.parts}, fullest "
            f"{self.fullest:.3f}, {milliseconds(self.seconds / self.runs)}",
        )


def across_ranks() -> None:
    table = Table("Imbalance of 1024 samples over 32 ranks, equal counts, no cap; 5 batches")
    for mix in MIXES:
        theirs, ours = Quality(), Quality()
        for seed in range(5):
            lengths = mix.lengths(1024, seed)
            work = data.flops(lengths)
            costs = work.tolist()
            theirs.add(partial(karmarkar_karp, costs, 32, True), lengths, float("inf"))
            ours.add(partial(data.balance, work, 32, True), lengths, float("inf"))
        theirs.row(table, f"{mix.name}: Karmarkar-Karp with equal counts (verl)")
        ours.row(table, f"{mix.name}: brim")


def under_a_cap() -> None:
    title = "Imbalance of microbatches of a rank under a cap in tokens; 5 batches of 512 samples"
    table = Table(title, width=66)
    for mix in MIXES:
        for room in (1, 2, 4):
            cap = room * mix.most
            names = (
                "first fit, then KK by FLOPs",
                "brim, as many parts",
                "KK, more parts until none is over",
                "brim, as many parts as that",
                "brim, the fewest parts",
            )
            kinds = {name: Quality() for name in names}
            for seed in range(5):
                lengths = mix.lengths(512, seed)
                work = data.flops(lengths)
                costs = work.tolist()
                count = enough = first_fit(lengths.tolist(), cap)
                while any(
                    int(lengths[part].sum()) > cap for part in karmarkar_karp(costs, enough, False)
                ):
                    enough += 1
                works = (
                    partial(karmarkar_karp, costs, count, False),
                    partial(data.balance, work, count, cap=cap, sizes=lengths),
                    partial(karmarkar_karp, costs, enough, False),
                    partial(data.balance, work, enough, cap=cap, sizes=lengths),
                    partial(data.balance, work, cap=cap, sizes=lengths),
                )
                for quality, divide in zip(kinds.values(), works, strict=True):
                    quality.add(divide, lengths, cap)
            for name, quality in kinds.items():
                quality.row(table, f"{mix.name}, cap {cap}: {name}")


def speed() -> None:
    counts = (2, 8, 64, 512, 4096)
    table = Table(
        "balance(): million items per second (with a cap), lists of indices; median of 3",
        ("items", *(f"{parts} parts" for parts in counts)),
    )
    for equal in (False, True):
        for items in (1024, 16384, 65536, 1_000_000):
            lengths = MIXES[0].lengths(items, 0)
            work = data.flops(lengths)
            cells = []
            for parts in counts:
                if 2 * parts > items:
                    continue
                # Twice what equal parts hold: the cap is checked, and changes nothing.
                cap = max(2.0 * float(lengths.sum()) / parts, float(lengths.max()) * 2)
                cases = (
                    partial(data.balance, work, parts, equal),
                    partial(data.balance, work, parts, equal, cap=cap, sizes=lengths),
                )
                rates = []
                for run in cases:
                    times = []
                    calls = max(1, 65536 // items)
                    for _ in range(3):
                        begin = time.process_time()
                        for _ in range(calls):
                            run()
                        times.append((time.process_time() - begin) / calls)
                    rates.append(f"{items / sorted(times)[1] / 1e6:.1f}")
                cells.append(f"{rates[0]} ({rates[1]})")
            table.row(f"{items:,}{', equal counts' if equal else ''}", *cells)


def samplers() -> None:
    table = Table(
        "PackedBatchSampler under a budget in tokens: imbalance of work per step, 200 000 samples"
    )
    for mix in MIXES:
        lengths = mix.lengths(200_000, 0)
        work = data.flops(lengths)
        for budget in (mix.most, 4 * mix.most):
            for ranks in (8, 64):
                for name, chosen in {"today": None, "work": "flops"}.items():
                    made = partial(
                        data.PackedBatchSampler, lengths, budget, cost="sum", shuffle=True,
                        world_size=ranks, work=chosen,
                    )  # fmt: skip
                    begin = time.process_time()
                    made().plan()
                    seconds = time.process_time() - begin
                    report = made().report()
                    steps = work_per_step(made, work, ranks)
                    table.row(
                        f"{mix.name}, budget {budget}, {ranks} ranks, {name}",
                        f"{steps:.3%}",
                        f"fill {report.fill:.3%}, {report.batches} batches, "
                        f"plan() {len(lengths) / seconds / 1e6:.1f} M samples/s",
                    )


def work_per_step(
    made: Callable[..., data.PackedBatchSampler], work: torch.Tensor, ranks: int
) -> float:
    """The mean over steps of the largest work of a batch over the mean."""
    totals = []
    for rank in range(ranks):
        offsets, indices = made(rank=rank).plan()
        ends = torch.cat([torch.zeros(1, dtype=torch.float64), work[indices].cumsum(0)])[offsets]
        totals.append(ends.diff())
    steps = torch.stack(totals)
    return float((steps.amax(0) / steps.mean(0) - 1).mean())


def main() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    across_ranks()
    under_a_cap()
    samplers()
    progress("speed")
    speed()


if __name__ == "__main__":
    main()
