"""How near to the largest size adaptive calls come, and how often they fail, over kinds of work.

brim beside halving, bisection, torch_max_mem and accelerate. Each cell: failed attempts of the
first call, and the size that it used as a share of the largest that fits; of brim also the worst
share from the third call on, and the failures after the first call. A row takes all first sizes
(1.2 to 100 times the largest) together: the mean of the failures and the smallest share.

    ./dev bench foresight
"""

from __future__ import annotations

import logging
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from adaptive_works import MIB, WORKS, Run, largest_that_fits
from harness import Adaptive, adaptive_peers, install_peers, progress
from results import Table

import brim

FIRST_SIZES = (1.2, 1.9, 3.3, 10, 100)  # times the largest that fits

# An adaptive call from a first size on: the sizes that it tried, the last of which fitted.
Call = Callable[[int], list[int]]


def by_brim(run: Run, **options: Any) -> Call:
    adaptive = brim.maximize("n", **options)(lambda n: run(n))
    return lambda first: [attempt.size for attempt in adaptive.record(first)[1]]


def by_peer(run: Run, make: Adaptive) -> Call:
    def call(first: int) -> list[int]:
        sizes: list[int] = []

        def counted(batch_size: int) -> None:
            sizes.append(batch_size)
            run(batch_size)

        try:
            make(counted, first)()
        except (MemoryError, RuntimeError):  # it gave up, and has used nothing
            sizes.append(0)
        return sizes

    return call


def strategies() -> Iterator[tuple[str, Callable[[Run], Call]]]:
    yield "brim", by_brim
    yield "halving", lambda run: by_brim(run, strategy="halving")
    yield "bisection", lambda run: by_brim(run, strategy="bisect")
    for name, make in adaptive_peers():
        yield name, partial(by_peer, make=make)


def rows(device: torch.device, budget: int) -> Iterator[list[str]]:
    ways = dict(strategies())
    yield ["work", "largest", *ways, "3rd call on", "later failures"]
    worst: list[float] = []
    later_failures = 0
    for name, make in WORKS.items():
        progress(name)
        run = make(device)
        run(1)
        brim.release_cached(device)
        held = brim.memory_stats(device).allocated
        with brim.budget(held + budget * MIB, device=device):
            largest = largest_that_fits(run, 10**6, device, 1 if device.type == "cpu" else 6)
            firsts = [max(int(times * largest), largest + 1) for times in FIRST_SIZES]
            cells = []
            later: list[list[int]] = []
            for way in ways.values():
                failures, shares = [], []
                for first in firsts:
                    adaptive = way(run)
                    brim.release_cached(device)
                    sizes = adaptive(first)
                    failures.append(len(sizes) - 1)
                    shares.append(sizes[-1] / largest)
                    if way is by_brim:
                        later += [adaptive(first) for _ in range(4)]
                cells.append(f"{statistics.mean(failures):.1f} {min(shares):4.0%}")
        settled = [c[-1] / largest for i, c in enumerate(later) if i % 4 >= 1]
        worst.append(min(settled))
        failed = sum(len(c) - 1 for c in later)
        later_failures += failed
        yield [name, str(largest), *cells, f"{min(settled):.0%}", str(failed)]
    yield ["all", "", *[""] * len(ways), f"{min(worst):.0%}", str(later_failures)]


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    install_peers()
    torch.set_num_threads(1)  # kernels take scratch memory per thread
    brim.install_cpu_allocator()
    devices = [("cpu", 64)] + [("cuda", 512)] * torch.cuda.is_available()
    for device, budget in devices:
        found = rows(torch.device(device), budget)
        title = (
            f"Failed attempts of the first call and the size used, on {device} under {budget} MiB"
        )
        table = Table(title, next(found), device=device, width=26)
        for cells in found:
            table.row(*cells)


if __name__ == "__main__":
    sys.exit(main())
