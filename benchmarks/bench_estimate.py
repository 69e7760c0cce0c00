"""`brim.estimate` beside the measured peak of training steps, and PyTorch's MemTracker.

    python benchmarks/bench_estimate.py            # needs CUDA
    python benchmarks/bench_estimate.py ResNet     # steps whose name has this in it
    python benchmarks/bench_estimate.py --mem-tracker   # MemTracker for every step, not for four

Each step is predicted on a fresh model, before anything ran: two calls, since the first one makes
the optimizer's state. Then it runs twice and its peak is measured. All figures are of the whole
device, in MiB, cuBLAS's workspaces included. MemTracker predicts allocated bytes only.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from unittest import mock

import torch
from estimate_steps import STEPS, Step, make_step
from results import Table

import brim
from brim._state.reach import Reachable

WORKSPACES = 2 * 32 << 20  # cuBLAS's on Hopper, of the forward's and of the engine's thread

TRACKED = {"ResNet-50, Adam", "ViT-B, AdamW", "GPT-2, AdamW", "Llama, AdamW"}  # it takes seconds


def measured(step: Step, before: int) -> tuple[int, int]:
    """Peaks of the bytes allocated and reserved over two calls of a step that never ran."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated() - max(0, before - WORKSPACES)
    return allocated, torch.cuda.max_memory_reserved()


def mem_tracker(name: str) -> int | None:
    """What PyTorch's MemTracker predicts for two calls, or None where it fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    try:
        with FakeTensorMode():
            with mock.patch("weakref.getweakrefs", return_value=[]):  # lets fake modules move
                step = make_step(name, "cuda")
            tracker = MemTracker()
            found = Reachable(step, (), {})
            tracker.track_external(*found.modules, *found.optimizers, *found.tensors)
            with tracker:
                step()
                tracker.reset_mod_stats()
                step()
            peak = tracker.get_tracker_snapshot("peak")
            return max(device["Total"] for device in peak.values())
    except Exception as error:
        print(f"MemTracker: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        return None


def against(predicted: int, actual: int, errors: list[float]) -> str:
    """A cell of the table. Notes the error."""
    errors.append(predicted / actual - 1)
    return f"{predicted >> 20} {errors[-1]:+.1%}"


def compare(name: str, track: bool, errors: dict[str, list[float]]) -> list[str]:
    """Predict a step before it ever ran, then run it. Returns the cells of a row."""
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # what cuBLAS keeps
    step = make_step(name, "cuda")
    start = time.perf_counter()
    predicted = brim.estimate(step, device="cuda", calls=2)
    seconds = time.perf_counter() - start
    allocated, reserved = measured(step, before)
    del step
    begin = time.perf_counter()
    tracked = mem_tracker(name) if track else None
    tracking = time.perf_counter() - begin
    cells = [
        name,
        f"{allocated >> 20}",
        against(predicted.held_before + predicted.peak, allocated, errors["allocated"]),
        f"{reserved >> 20}",
        against(predicted.reserved, reserved, errors["reserved"]),
        f"{seconds:.1f} s",
    ]
    if tracked is not None:
        cells.append(against(tracked, allocated, errors["MemTracker"]))
        cells.append(f"{tracking:.1f} s")
    return cells


def main() -> None:
    warnings.filterwarnings("ignore")
    if not torch.cuda.is_available():
        print("bench_estimate.py measures on a GPU, and there is none: skipped")
        return
    every = "--mem-tracker" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--mem-tracker"]
    chosen = [name for name in STEPS if not words or any(word in name for word in words)]
    # cuBLAS's workspaces exist from here on, in every measurement alike.
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    table = Table(
        "Peaks of training steps in MiB, and what was foreseen",
        ("step", "allocated", "foreseen", "reserved", "estimate", "took", "MemTracker", "it took"),
        device="cuda",
        width=45,
    )
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "MemTracker": []}
    for name in chosen:
        try:
            table.row(*compare(name, every or name in TRACKED, errors))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    table = Table("Errors of what was foreseen", ("of", "median", "worst"), device="cuda", width=45)
    for figure, found in errors.items():
        shares = sorted(map(abs, found))
        if shares:
            table.row(figure, f"{statistics.median(shares):.2%}", f"{shares[-1]:.2%}")


if __name__ == "__main__":
    main()
