"""What the memory core costs from Python: `with` statements and allocations, with and without brim.

./dev bench memory
"""

from __future__ import annotations

import contextlib

import torch
from harness import Work, medians
from results import Table

import brim

ERROR = RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at dimension 0")


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


def measured(works: dict[str, Work]) -> dict[str, float]:
    return medians(works, 101, calls=2000)


def main() -> None:
    rows = measured({"torch.empty(16), torch's allocator": empty})
    brim.install_cpu_allocator()  # for the rest of the process, so that row cannot take turns
    rows |= measured(
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
    table = Table("The memory core from Python")
    for name, seconds in rows.items():
        table.row(name, f"{seconds * 1e9:.0f} ns")


if __name__ == "__main__":
    main()
