"""Batch samplers beside bionemo-size-aware-batching, in one run and on one core.

Sizes are log-normal, like those of proteins (median 300, from 30 to 2000); the budget is 16384.
Times cover everything from the tensor of sizes on: making the sampler, and all batches of an epoch.
"made only" is the part that makes the sampler. They are processor time: nothing here waits, and
other programs on the same core do not count.

    ./dev bench batching
"""

from __future__ import annotations

import bisect
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from harness import Work, install_peers, median, medians, milliseconds, peer, progress
from results import Table
from torch.utils.data import BatchSampler

from brim import data

MILLION = 1_000_000
BUDGET = 16384
BUCKETS = 30
ROUNDS = 5

cpu_medians = partial(medians, clock=time.process_time)
cpu_median = partial(median, clock=time.process_time)


def consume(batches: Iterable[object]) -> None:
    deque(batches, maxlen=0)


def protein_sizes(samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logarithms = torch.randn(samples, generator=generator).mul_(0.6)
    return logarithms.exp_().mul_(300).round_().clamp_(30, 2000).long()


def buckets_of(sizes: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Boundaries with the least padding, and how many of a bucket's longest fill the budget."""
    boundaries = data.least_padding_boundaries(sizes, BUCKETS)
    return boundaries, [BUDGET // (int(above) - 1) for above in boundaries[1:]]


def bionemo_buckets(
    bionemo: Any, sizes: torch.Tensor, boundaries: torch.Tensor, batch_sizes: list[int]
) -> Any:
    base = (BatchSampler, {"drop_last": False}, {"batch_size": batch_sizes})
    return bionemo.BucketBatchSampler(sizes, boundaries, *base)


def rate(samples: int, seconds: float) -> str:
    return f"{samples / seconds / MILLION:.2f} M/s"


# ---- a whole epoch -------------------------------------------------------------------------------


def compare(
    title: str,
    samples: int,
    make: Callable[..., Any],
    theirs: dict[str, Work],
    targets: dict[str, str],
    counts: dict[str, int] | None = None,
) -> None:
    """A row for each: samples per second, and for brim how many times the first peer's."""
    works: dict[str, Work] = {
        **theirs,
        "brim, plan()": lambda: make().plan(),
        "brim, as_tensors=True": lambda: consume(make(as_tensors=True)),
        "brim, lists": lambda: consume(make()),
        "brim, made only": make,
    }
    table = Table(title)
    times = cpu_medians(works, ROUNDS if samples <= MILLION else 3)
    for name, seconds in times.items():
        if name.endswith("made only"):
            table.row(name, milliseconds(seconds))
            continue
        count = (counts or {}).get(name, samples)
        note = milliseconds(seconds) if count == samples else f"of {count} samples"
        if theirs and name.startswith("brim"):
            note += f", {times[next(iter(theirs))] / seconds:.1f}×"
        table.row(name, rate(count, seconds), note, targets.get(name, "") if theirs else "")


def bucket_epoch(sizes: torch.Tensor, bionemo: Any) -> None:
    samples = len(sizes)
    boundaries, batch_sizes = buckets_of(sizes)
    targets = {"brim, plan()": "target ≥ 40×", "brim, lists": "target ≥ 15×"}

    def ours(**options: Any) -> data.BucketBatchSampler:
        return data.BucketBatchSampler(sizes, boundaries, seed=0, **options)

    def by_budget() -> Any:
        shared = {"sizeof": sizes.tolist().__getitem__, "max_total_size": BUDGET}
        base = (bionemo.SizeAwareBatchSampler, shared)
        return bionemo.BucketBatchSampler(sizes, boundaries, *base)

    def works(make: Work) -> dict[str, Work]:
        both = {"bionemo": lambda: consume(make()), "bionemo, made only": make}
        return both if bionemo else {}

    title = f"BucketBatchSampler, epoch with shuffle, {samples:,} samples, {BUCKETS} buckets, "
    progress("buckets with batches of a fixed size")
    by_count = partial(bionemo_buckets, bionemo, sizes, boundaries, batch_sizes)
    made = partial(ours, batch_size=batch_sizes)
    fixed = "batches of a fixed size for each bucket (BatchSampler as base)"
    compare(title + fixed, samples, made, works(by_count), targets)
    progress("buckets under a budget")
    make = partial(ours, max_total_size=BUDGET, cost="sum")
    limited = "batches under a budget (SizeAwareBatchSampler as base)"
    compare(title + limited, samples, make, works(by_budget), targets)


def size_aware_epoch(sizes: torch.Tensor, bionemo: Any) -> None:
    samples = len(sizes)
    few = samples // 20  # a tensor for each size takes its time

    def theirs(count: int, sizeof: Callable[[], Any]) -> Work:
        return lambda: consume(bionemo.SizeAwareBatchSampler(range(count), sizeof(), BUDGET))

    def looking_up() -> Callable[[int], int]:
        numbers = sizes.tolist()
        return lambda index: int(numbers[index])

    by_tensor = "bionemo, sizes.__getitem__"
    works = {
        "bionemo, sizes.tolist().__getitem__": theirs(samples, lambda: sizes.tolist().__getitem__),
        "bionemo, a function that looks into the list": theirs(samples, looking_up),
        by_tensor: theirs(few, lambda: sizes.__getitem__),
    }
    progress("samples in order")
    compare(
        f"SizeAwareBatchSampler over a tensor of sizes, {samples:,} samples in order",
        samples,
        partial(data.SizeAwareBatchSampler, range(samples), sizes, BUDGET, cost="sum"),
        works if bionemo else {},
        {"brim, plan()": "target ≥ 40×", "brim, lists": "target ≥ 8×"},
        {by_tensor: few},
    )


def best_fit_in_python(sizes: list[int]) -> list[list[int]]:
    """Best fit decreasing as it is written in Python: what each bin has left, kept sorted."""
    remaining: list[int] = []
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = sizes[index]
        place = bisect.bisect_left(remaining, size)
        if place == len(remaining):
            left, members = BUDGET, []
        else:
            left, members = remaining.pop(place), bins.pop(place)
        members.append(index)
        place = bisect.bisect_left(remaining, left - size)
        remaining.insert(place, left - size)
        bins.insert(place, members)
    return bins


def packed_epoch(sizes: torch.Tensor) -> None:
    samples = len(sizes)

    made = partial(data.PackedBatchSampler, sizes, BUDGET, cost="sum")
    cases: dict[str, dict[str, Any]] = {
        "windows of 10k": {},
        "windows of 10k, shuffled": {"shuffle": True},
        "global": {"window": None},
        "global, shuffled": {"window": None, "shuffle": True},
    }
    table = Table(f"PackedBatchSampler, {samples:,} samples: plan()")
    works: dict[str, Work] = {
        name: lambda chosen=options: made(**chosen).plan()  # type: ignore[misc]
        for name, options in cases.items()
    }
    works["windows of 10k, shuffled, lists"] = lambda: consume(made(shuffle=True))
    progress("packing")
    times = cpu_medians(works, ROUNDS if samples <= MILLION else 3)
    for name, seconds in times.items():
        fill = target = ""
        if name in cases:
            fill = f"fill {made(**cases[name]).report().fill:.3%}"
            target = "target ≥ 10 M/s, fill ≥ 99.7 %"
            target = "target ≥ 4 M/s" if name.startswith("global") else target
        table.row(name, rate(samples, seconds), fill, target)
    if samples > MILLION:
        return
    few = samples // 5
    numbers = sizes[:few].tolist()
    seconds = cpu_median(lambda: best_fit_in_python(numbers), 3)
    fill = f"fill {sum(numbers) / (len(best_fit_in_python(numbers)) * BUDGET):.3%}"
    table.row(f"the same in Python with bisect, {few:,} samples", rate(few, seconds), fill)


# ---- the first batch, and one in the middle ------------------------------------------------------


def samplers(sizes: torch.Tensor) -> dict[str, Callable[[], Any]]:
    boundaries, batch_sizes = buckets_of(sizes)
    ordered = partial(data.SizeAwareBatchSampler, range(len(sizes)), sizes, BUDGET, cost="sum")
    return {
        "SizeAwareBatchSampler": ordered,
        "SizeAwareBatchSampler, shuffled": partial(ordered, shuffle=True, seed=0),
        "BucketBatchSampler, shuffled": partial(
            data.BucketBatchSampler, sizes, boundaries, batch_size=batch_sizes, seed=0
        ),
        "PackedBatchSampler, shuffled": partial(
            data.PackedBatchSampler, sizes, BUDGET, cost="sum", shuffle=True
        ),
    }


def first_batch(sizes: torch.Tensor, bionemo: Any) -> None:
    kinds = samplers(sizes)
    table = Table(f"First batch, {len(sizes):,} samples, making the sampler included")
    progress("first batch")
    if bionemo:
        made = partial(bionemo_buckets, bionemo, sizes, *buckets_of(sizes))
        seconds = cpu_median(lambda: next(iter(made())), 2)
        table.row("bionemo BucketBatchSampler", milliseconds(seconds))
    for name, make in kinds.items():
        whole = cpu_median(lambda make=make: make().plan(), ROUNDS)
        parts = {"first": lambda make=make: next(iter(make())), "made": make}
        times = cpu_medians(parts, 15)
        table.row(f"{name}: whole plan", milliseconds(whole), "", "target ≤ 300 ms")
        table.row(
            f"{name}: streaming",
            milliseconds(times["first"]),
            f"{milliseconds(times['made'])} to make it",
            "target ≤ 10 ms",
        )
    numbers = itertools.cycle(sizes[:1000].tolist())
    seconds = cpu_median(
        lambda: next(data.size_aware_batching(numbers, lambda size: size, BUDGET, cost="sum")), 15
    )
    name = "size_aware_batching over an endless iterator"
    table.row(name, milliseconds(seconds), "", "target ≤ 10 ms")


def resume(sizes: torch.Tensor, bionemo: Any) -> None:
    kinds = samplers(sizes)
    packed = partial(data.PackedBatchSampler, sizes, BUDGET, cost="sum", window=None)
    kinds["PackedBatchSampler, global"] = packed
    middle_of = f"Resume in the middle of {len(sizes):,} samples"
    table = Table(f"{middle_of}: load_state_dict and the next batch")
    if bionemo:
        numbers = sizes.tolist()
        middle = len(kinds["SizeAwareBatchSampler"]()) // 2

        def replay() -> object:
            order = range(len(numbers))
            theirs = bionemo.SizeAwareBatchSampler(order, numbers.__getitem__, BUDGET)
            return next(itertools.islice(theirs, middle, None))

        progress("replay")
        seconds = cpu_median(replay, 2)
        table.row("bionemo SizeAwareBatchSampler, replayed", milliseconds(seconds))
        del numbers
    for name, make in kinds.items():
        progress(f"resume: {name}")
        stopped = make()
        batches = iter(stopped)
        consume(itertools.islice(batches, len(make()) // 2))
        state, expected = stopped.state_dict(), next(batches)

        def resumed(sampler: Any, state: dict[str, Any] = state) -> list[int]:
            sampler.load_state_dict(state)
            batch: list[int] = next(iter(sampler))
            return batch

        assert resumed(make()) == expected, "a resumed epoch continues where it stopped"
        sampler = make()
        is_global = name.endswith("global")
        times = cpu_medians(
            {
                "loaded": partial(resumed, sampler),
                "made": lambda make=make, resumed=resumed: resumed(make()),
            },
            3 if is_global else 15,
        )
        table.row(
            name,
            milliseconds(times["loaded"]),
            f"{milliseconds(times['made'])} with a new one",
            "" if is_global else "target ≤ 10 ms",
        )


# ---- balance -------------------------------------------------------------------------------------


def balanced(sizes: torch.Tensor) -> None:
    table = Table("balance(): lists of indices, items per second")
    for kind, costs in {"lengths": sizes, "real costs": data.flops(sizes).sqrt()}.items():
        for items, parts, equal in itertools.product(
            (1024, 16384, MILLION), (8, 64), (False, True)
        ):
            some = costs[:items]
            run = partial(data.balance, some, parts, equal)
            loads = [float(some[part].sum()) for part in run()]
            table.row(
                f"{items:,} {kind} in {parts} parts{', equal counts' if equal else ''}",
                rate(items, cpu_median(run, 3, calls=max(1, 65536 // items))),
                f"imbalance {max(loads) / (sum(loads) / parts) - 1:.0e}",
                "target ≥ 10 M/s",
            )


def main() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    install_peers()
    bionemo = peer("bionemo.size_aware_batching.sampler")
    begin = time.perf_counter()
    sizes = protein_sizes(MILLION)
    bucket_epoch(sizes, bionemo)
    size_aware_epoch(sizes, bionemo)
    packed_epoch(sizes)
    balanced(sizes)
    sizes = protein_sizes(10 * MILLION)
    bucket_epoch(sizes, None)
    size_aware_epoch(sizes, None)
    packed_epoch(sizes)
    first_batch(sizes, bionemo)
    resume(sizes, bionemo)
    progress(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
