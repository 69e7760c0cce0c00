"""Ctrl-C at every line of every public call: nothing stays on, open, locked or fake.

    python proofs/prove_interrupts.py [--seconds 600] [--case audit] [--seed 1]

The calls are those of tests/python/interrupt_cases*.py. A KeyboardInterrupt is raised before each
line of brim that a call runs (its first two runs there), one call per line. After each, what the
process has on, open or pushed is compared with before, the model's modules and values too; then
the same call must give the right result, and no memory may stay held. With --seconds, lines are
drawn from all calls until the time is over; without, all are tried. `--plant` shows that the sweep
sees a fault: samplers then leave a hook on if they are interrupted.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import gc
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from tally import Tally

LINES_AT_ONCE = 16
A_HANG = 300  # seconds that no call takes, by far
SLACK = 64 << 10  # bytes that what is remembered of calls may take


class Found(NamedTuple):
    """What a few lines of a call came to."""

    name: str
    interrupted: int
    wrong: list[str]


def begin(plant: bool) -> None:
    """In a process of the pool."""
    import torch

    import brim

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    brim.install_cpu_allocator()
    faulthandler.enable()
    if plant:
        plant_a_fault()


def plant_a_fault() -> None:
    """What an interrupt leaves on if what puts it back is not in an `Undoing`."""
    from brim.data.base import BatchSamplerBase

    settle = BatchSamplerBase._settle

    def leaves_on(self: Any) -> None:
        sys.excepthook, before = print, sys.excepthook
        settle(self)
        sys.excepthook = before

    BatchSamplerBase._settle = leaves_on  # type: ignore[method-assign]


def cases() -> dict[str, Any]:
    """The calls by their names."""
    from tests.python import (  # noqa: F401  add theirs
        interrupt_cases_integrations,
        interrupt_cases_ranks,
        interrupt_cases_tools,
    )
    from tests.python.interrupt_cases import CASES

    return CASES


@functools.cache
def made(name: str) -> tuple[Any, Any]:
    """The case, and what a call of it returns; what is alive then is no garbage."""
    case = cases()[name]()
    case.call()
    expected = case.result(case.call())
    gc.collect()
    gc.freeze()
    return case, expected


def count(name: str) -> tuple[int, float]:
    """The lines of a call, and the seconds that two calls take."""
    from tests.python.interrupts import lines_of

    case, _ = made(name)
    begin = time.perf_counter()
    lines, _ = lines_of(case)
    return lines.lines, time.perf_counter() - begin


def held() -> tuple[int, int]:
    """Bytes of tensors, and open files, without what is garbage."""
    import brim

    gc.collect()
    return brim.memory_stats("cpu").allocated, len(os.listdir("/proc/self/fd"))


def sweep(name: str, lines: list[int]) -> Found:
    """Interrupt a call at each of these lines, and look at what is left."""
    from tests.python.interrupts import interrupted

    case, expected = made(name)
    before, done, wrong = held(), 0, []
    for at in lines:
        faulthandler.dump_traceback_later(A_HANG, exit=True)
        place = ""
        try:
            place = interrupted(case, at)
            done += bool(place)
            found = case.result(case.call())
            if found != expected:
                wrong.append(f"{name}: after {place} (line {at}) the next call gives {found}")
        except BaseException as error:
            wrong.append(f"{name}: line {at} {place}: {type(error).__name__}: {error}")
            made.cache_clear()
            case, expected = made(name)
            before = held()
    faulthandler.cancel_dump_traceback_later()
    after = held()
    if after[0] - before[0] > SLACK or after[1] > before[1]:
        kept = f"{after[0] - before[0]} bytes and {after[1] - before[1]} files"
        wrong.append(f"{name}: {kept} stay held after lines {lines}")
    return Found(name, done, wrong)


def chosen(counts: dict[str, tuple[int, float]], seed: int) -> Iterator[tuple[str, list[int]]]:
    """All lines of all calls, a few at a time: calls get equal time, lines are in random order."""
    random.seed(seed)
    pieces: list[tuple[float, str, list[int]]] = []
    for name, (count, seconds) in counts.items():
        lines = list(range(1, count + 1))
        random.shuffle(lines)
        for at in range(0, len(lines), LINES_AT_ONCE):
            pieces.append((at * seconds, name, lines[at : at + LINES_AT_ONCE]))
    return iter([piece[1:] for piece in sorted(pieces)])


def main() -> None:
    """Spread the lines over the processes, and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="how long; all lines if left out")
    parser.add_argument("--case", default="", help="calls whose name contains it")
    parser.add_argument("--seed", type=int, default=1, help="decides the order of lines")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plant", action="store_true", help="a fault, which must be found")
    given = parser.parse_args()

    names = [name for name in cases() if given.case in name]
    tally = Tally("Ctrl-C at every line of public calls")
    print(f"seed {given.seed}, {len(names)} calls")
    ends = time.monotonic() + (given.seconds or float("inf"))
    spawn = multiprocessing.get_context("spawn")
    options: dict[str, Any] = {"initializer": begin, "initargs": (given.plant,)}
    with ProcessPoolExecutor(given.processes, spawn, **options) as pool:
        counts = dict(zip(names, pool.map(count, names), strict=True))
        lines: Counter[str] = Counter()
        wrong: list[str] = []
        todo, running = chosen(counts, given.seed), set()
        try:
            while True:
                while len(running) < 2 * given.processes and time.monotonic() < ends:
                    piece = next(todo, None)
                    if piece is None:
                        break
                    running.add(pool.submit(sweep, *piece))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    found = each.result()
                    lines[found.name] += found.interrupted
                    wrong += found.wrong
                    for text in found.wrong:
                        print(f"  {text}"[:2000], flush=True)
        except BrokenProcessPool:
            wrong.append("a process ended: a call hung, or crashed; its stacks are above")
    for name in names:
        print(f"  {name}: {lines[name]:,} of {counts[name][0]:,} lines")
    total = sum(count for count, _ in counts.values())
    tally.row(f"lines of {len(names)} calls, of {total:,} lines", lines.total(), wrong)
    tally.finish()


if __name__ == "__main__":
    main()
