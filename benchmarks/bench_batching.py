"""Batch samplers beside bionemo-size-aware-batching, in one run and on one core.

Sizes are log-normal, as those of proteins are (median 300, from 30 to 2000), the budget is 16384.
Times are medians over rounds in which all take turns, and hold everything from the tensor of sizes
on: making the sampler, and all batches of an epoch. What only makes the sampler is told apart. They
are times of the processor: nothing here waits, so on a quiet machine they are those of the clock,
and where others want the same core a long work suffers no more than a short one.

    ./dev bench batching
"""

from __future__ import annotations

import bisect
import itertools
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import peers
import torch
from torch.utils.data import BatchSampler

from brim import data

MILLION = 1_000_000
BUDGET = 16384
BUCKETS = 30
ROUNDS = 5
BIONEMO = "bionemo.size_aware_batching.sampler"

Work = Callable[[], object]


def say(what: str) -> None:
    """Progress, apart from the result."""
    print(f"    {what}", file=sys.stderr, flush=True)


def row(name: str, value: str, note: str = "", target: str = "") -> None:
    print(f"  {name:<52}{value:>12}   {note:<27}{target}".rstrip())


def medians(works: dict[str, Work], rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of each. What a work returns is freed when the clock has stopped."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            begin = time.process_time()
            result = work()
            seconds = time.process_time() - begin
            del result
            if number > 0:  # the first round warms up
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def consume(batches: Iterable[object]) -> None:
    deque(batches, maxlen=0)


def protein_sizes(samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logarithms = torch.randn(samples, generator=generator).mul_(0.6)
    return logarithms.exp_().mul_(300).round_().clamp_(30, 2000).long()


def rate(samples: int, seconds: float) -> str:
    return f"{samples / seconds / MILLION:.2f} M/s"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def faces(make: Callable[..., Any]) -> dict[str, Work]:
    """The ways to read an epoch, each with a sampler of its own."""
    return {
        "brim, plan()": lambda: make().plan(),
        "brim, as_tensors=True": lambda: consume(make(as_tensors=True)),
        "brim, lists": lambda: consume(make()),
        "brim, made only": lambda: make(),
    }


# ---- a whole epoch -------------------------------------------------------------------------------


def tell(
    times: dict[str, float],
    samples: dict[str, int],
    fastest: str | None,
    targets: dict[str, str],
) -> None:
    """A row for each: how many samples a second, and how many times the peer's."""
    for name, seconds in times.items():
        if name.endswith("made only"):
            row(name, milliseconds(seconds))
            continue
        count = samples.get(name, samples[""])
        note = milliseconds(seconds) if count == samples[""] else f"of {count} samples"
        if fastest in times and name != fastest and name.startswith("brim"):
            ratio = times[fastest] / samples[""] / (seconds / count)
            note = f"{milliseconds(seconds)}, {ratio:.1f}×"
        row(name, rate(count, seconds), note, targets.get(name, ""))


def buckets_of(sizes: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Boundaries with the least padding, and how many of a bucket's longest fill the budget."""
    boundaries = data.least_padding_boundaries(sizes, BUCKETS)
    return boundaries, [BUDGET // (int(above) - 1) for above in boundaries[1:]]


def bucket_epoch(sizes: torch.Tensor, bionemo: Any) -> None:
    samples = len(sizes)
    boundaries, batch_sizes = buckets_of(sizes)
    by_count = {"batch_size": batch_sizes}

    def ours(**options: Any) -> data.BucketBatchSampler:
        return data.BucketBatchSampler(sizes, boundaries, **by_count, seed=0, **options)

    def ours_by_budget(**options: Any) -> data.BucketBatchSampler:
        return data.BucketBatchSampler(
            sizes, boundaries, max_total_size=BUDGET, cost="sum", seed=0, **options
        )

    print(f"BucketBatchSampler, epoch with shuffle, {samples:,} samples, {BUCKETS} buckets")
    print(" batches of a fixed size for each bucket (BatchSampler as base)")
    works = faces(ours)
    peer = None
    if bionemo:

        def theirs() -> Any:
            return bionemo.BucketBatchSampler(
                sizes, boundaries, BatchSampler, {"drop_last": False}, by_count
            )

        peer = "bionemo"
        works = {peer: lambda: consume(theirs()), "bionemo, made only": theirs, **works}
    targets = {"brim, plan()": "target ≥ 40×", "brim, lists": "target ≥ 15×"} if bionemo else {}
    say("buckets with batches of a fixed size")
    tell(medians(works, ROUNDS if bionemo else 3), {"": samples}, peer, targets)

    print(" batches under a budget (SizeAwareBatchSampler as base)")
    works = faces(ours_by_budget)
    if bionemo:

        def theirs_by_budget() -> Any:
            shared = {"sizeof": sizes.tolist().__getitem__, "max_total_size": BUDGET}
            return bionemo.BucketBatchSampler(
                sizes, boundaries, bionemo.SizeAwareBatchSampler, shared
            )

        works = {
            "bionemo": lambda: consume(theirs_by_budget()),
            "bionemo, made only": theirs_by_budget,
            **works,
        }
    say("buckets under a budget")
    tell(medians(works, ROUNDS if bionemo else 3), {"": samples}, peer, targets)


def size_aware_epoch(sizes: torch.Tensor, bionemo: Any) -> None:
    samples = len(sizes)
    print(f"SizeAwareBatchSampler over a tensor of sizes, {samples:,} samples in order")

    def ours(**options: Any) -> data.SizeAwareBatchSampler:
        return data.SizeAwareBatchSampler(range(samples), sizes, BUDGET, **options)

    works = faces(ours)
    counts = {"": samples}
    peer, targets = None, {}
    if bionemo:

        def of_list() -> None:
            sizeof = sizes.tolist().__getitem__
            consume(bionemo.SizeAwareBatchSampler(range(samples), sizeof, BUDGET))

        def of_function() -> None:
            numbers = sizes.tolist()

            def sizeof(index: int) -> int:
                return int(numbers[index])

            consume(bionemo.SizeAwareBatchSampler(range(samples), sizeof, BUDGET))

        few = samples // 20  # a tensor for each size takes its time

        def of_tensor() -> None:
            consume(bionemo.SizeAwareBatchSampler(range(few), sizes.__getitem__, BUDGET))

        peer = "bionemo, sizes.tolist().__getitem__"
        works = {
            peer: of_list,
            "bionemo, a function that looks into the list": of_function,
            "bionemo, sizes.__getitem__": of_tensor,
            **works,
        }
        counts["bionemo, sizes.__getitem__"] = few
        targets = {"brim, plan()": "target ≥ 40×", "brim, lists": "target ≥ 8×"}
    say("samples in order")
    tell(medians(works), counts, peer, targets)


def best_fit_in_python(sizes: list[int]) -> list[list[int]]:
    """Best fit decreasing as it is written in Python: what is left of each bin, kept sorted."""
    room: list[int] = []
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = sizes[index]
        place = bisect.bisect_left(room, size)
        if place == len(room):
            left, members = BUDGET, []
        else:
            left, members = room.pop(place), bins.pop(place)
        members.append(index)
        place = bisect.bisect_left(room, left - size)
        room.insert(place, left - size)
        bins.insert(place, members)
    return bins


def packed_epoch(sizes: torch.Tensor) -> None:
    samples = len(sizes)

    def made(**options: Any) -> data.PackedBatchSampler:
        return data.PackedBatchSampler(sizes, BUDGET, **options)

    cases = {
        "windows of 10k": {},
        "windows of 10k, shuffled": {"shuffle": True},
        "global": {"window": None},
        "global, shuffled": {"window": None, "shuffle": True},
    }
    print(f"PackedBatchSampler, {samples:,} samples: plan()")
    works: dict[str, Work] = {
        name: lambda chosen=options: made(**chosen).plan()  # type: ignore[misc]
        for name, options in cases.items()
    }
    works["windows of 10k, shuffled, lists"] = lambda: consume(made(shuffle=True))
    say("packing")
    times = medians(works, ROUNDS if samples <= MILLION else 3)
    for name, seconds in times.items():
        options = cases.get(name)
        fill = "" if options is None else f"fill {made(**options).report().fill:.3%}"
        target = "target ≥ 10 M/s, fill ≥ 99.7 %"
        if name.startswith("global"):
            target = "target ≥ 4 M/s"
        row(name, rate(samples, seconds), fill, target if options is not None else "")
    if samples > MILLION:
        return
    few = samples // 5
    numbers = sizes[:few].tolist()
    seconds = medians({"": lambda: best_fit_in_python(numbers)}, 3)[""]
    fill = sum(numbers) / (len(best_fit_in_python(numbers)) * BUDGET)
    row(
        f"the same in Python with bisect, {few:,} samples",
        rate(few, seconds),
        f"fill {fill:.3%}",
    )


# ---- the first batch, and one in the middle ------------------------------------------------------


def samplers(sizes: torch.Tensor) -> dict[str, Callable[[], Any]]:
    samples = len(sizes)
    boundaries, batch_sizes = buckets_of(sizes)
    return {
        "SizeAwareBatchSampler": lambda: data.SizeAwareBatchSampler(range(samples), sizes, BUDGET),
        "SizeAwareBatchSampler, shuffled": lambda: data.SizeAwareBatchSampler(
            range(samples), sizes, BUDGET, shuffle=True, seed=0
        ),
        "BucketBatchSampler, shuffled": lambda: data.BucketBatchSampler(
            sizes, boundaries, batch_size=batch_sizes, seed=0
        ),
        "PackedBatchSampler, shuffled": lambda: data.PackedBatchSampler(
            sizes, BUDGET, shuffle=True
        ),
    }


def first_batch(sizes: torch.Tensor, bionemo: Any) -> None:
    kinds = samplers(sizes)
    print(f"First batch, {len(sizes):,} samples, making the sampler included")
    say("first batch")
    if bionemo:
        boundaries, batch_sizes = buckets_of(sizes)

        def theirs() -> object:
            made = bionemo.BucketBatchSampler(
                sizes, boundaries, BatchSampler, {"drop_last": False}, {"batch_size": batch_sizes}
            )
            return next(iter(made))

        row("bionemo BucketBatchSampler", milliseconds(medians({"": theirs}, 2)[""]))
    whole = medians({name: lambda make=make: make().plan() for name, make in kinds.items()}, 5)
    stream = medians(
        {name: lambda make=make: next(iter(make())) for name, make in kinds.items()}, 15
    )
    made = medians({name: lambda make=make: make() for name, make in kinds.items()}, 15)
    for name in kinds:
        row(f"{name}: whole plan", milliseconds(whole[name]), "", "target ≤ 300 ms")
        row(
            f"{name}: streaming",
            milliseconds(stream[name]),
            f"{milliseconds(made[name])} to make it",
            "target ≤ 10 ms",
        )
    numbers = itertools.cycle(sizes[:1000].tolist())

    def endless() -> object:
        return next(data.size_aware_batching(numbers, lambda size: size, BUDGET))

    seconds = medians({"": endless}, 15)[""]
    row("size_aware_batching over an endless iterator", milliseconds(seconds), "", "target ≤ 10 ms")


def middle_of(make: Callable[..., Any]) -> tuple[dict[str, Any], list[int]]:
    """A state half-way through the epoch, and the batch that comes next."""
    sampler = make()
    batches: Iterator[list[int]] = iter(sampler)
    consume(itertools.islice(batches, len(make()) // 2))
    return sampler.state_dict(), next(batches)


def resume(sizes: torch.Tensor, bionemo: Any) -> None:
    samples = len(sizes)
    kinds = samplers(sizes)
    kinds["PackedBatchSampler, global"] = lambda: data.PackedBatchSampler(
        sizes, BUDGET, window=None
    )
    print(f"Resume in the middle of {samples:,} samples: load_state_dict and the next batch")
    if bionemo:
        numbers = sizes.tolist()

        def replay() -> object:
            theirs = bionemo.SizeAwareBatchSampler(range(samples), numbers.__getitem__, BUDGET)
            return next(itertools.islice(theirs, middle, None))

        middle = len(kinds["SizeAwareBatchSampler"]()) // 2
        say("replay")
        row("bionemo SizeAwareBatchSampler, replayed", milliseconds(medians({"": replay}, 2)[""]))
        del numbers
    for name, make in kinds.items():
        say(f"resume: {name}")
        state, expected = middle_of(make)
        sampler = make()

        def go_on(sampler: Any, state: dict[str, Any] = state) -> list[int]:
            sampler.load_state_dict(state)
            batch: list[int] = next(iter(sampler))
            return batch

        assert go_on(make()) == expected, "a resumed epoch goes on where it stood"
        times = medians(
            {
                "loaded": lambda sampler=sampler, go_on=go_on: go_on(sampler),
                "made": lambda make=make, go_on=go_on: go_on(make()),
            },
            3 if name.endswith("global") else 15,
        )
        row(
            name,
            milliseconds(times["loaded"]),
            f"{milliseconds(times['made'])} if made anew",
            "" if name.endswith("global") else "target ≤ 10 ms",
        )


def main() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    peers.install()
    bionemo = peers.find(BIONEMO)
    begin = time.perf_counter()
    sizes = protein_sizes(MILLION)
    bucket_epoch(sizes, bionemo)
    size_aware_epoch(sizes, bionemo)
    packed_epoch(sizes)
    sizes = protein_sizes(10 * MILLION)
    bucket_epoch(sizes, None)
    size_aware_epoch(sizes, None)
    packed_epoch(sizes)
    first_batch(sizes, bionemo)
    resume(sizes, bionemo)
    say(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
