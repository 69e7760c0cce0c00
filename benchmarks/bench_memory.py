"""What the memory core costs from Python: `with` statements and allocations, with and without brim.

Each row is the median over batches that take turns, so that a slower moment of the machine meets
all alike.

    ./dev bench memory
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import torch

import brim

BATCHES, CALLS = 101, 2000


def nothing() -> None:
    with contextlib.nullcontext():
        pass


def peak_meter() -> None:
    with brim.PeakMeter("cpu"):
        pass


def budget() -> None:
    with brim.budget(2**33, device="cpu"):
        pass


def budget_of_text() -> None:
    with brim.budget("8GiB", device="cpu"):
        pass


def inject_oom() -> None:
    with brim.testing.inject_oom(at=10):
        pass


def classify() -> None:
    brim.is_out_of_memory(ERROR)


def empty() -> None:
    torch.empty(16)


ERROR = RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at dimension 0")


def nanoseconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        work()
    return (time.perf_counter_ns() - begin) / CALLS


def medians(works: dict[str, Callable[[], None]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(BATCHES):
        for name, work in works.items():
            times[name].append(nanoseconds(work))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    stock = medians({"torch.empty(16), torch's allocator": empty})
    brim.install_cpu_allocator()  # for the rest of the process, so this row cannot take turns
    rows = stock | medians(
        {
            "torch.empty(16), brim's allocator": empty,
            "an empty with statement": nothing,
            "with PeakMeter": peak_meter,
            "with budget(int)": budget,
            "with budget(str)": budget_of_text,
            "with inject_oom": inject_oom,
            "is_out_of_memory, another error": classify,
        }
    )
    print(f"{'median ns a call':<40}{'ns':>8}")
    for name, value in rows.items():
        print(f"{name:<40}{value:>8.0f}")


if __name__ == "__main__":
    main()
