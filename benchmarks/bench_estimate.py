"""`brim.estimate` beside the measured peak of training steps, and PyTorch's MemTracker.

    python benchmarks/bench_estimate.py            # needs CUDA
    python benchmarks/bench_estimate.py ResNet     # steps whose name has this in it

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
from collections.abc import Iterator

import torch
from estimate_steps import STEPS, Make

import brim
from brim.cli.table import print_table
from brim.foresee._reach import Reachable

WORKSPACES = 2 * 32 << 20  # cuBLAS's on Hopper, of the forward's and of the engine's thread


def measured(make: Make) -> tuple[int, int]:
    """Peaks of the bytes allocated and reserved over two calls."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # what cuBLAS keeps
    step = make("cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    torch.cuda.synchronize()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del step
    gc.collect()
    return peaks[0] - max(0, before - WORKSPACES), peaks[1]


def mem_tracker(make: Make) -> int | None:
    """What PyTorch's MemTracker predicts for two calls, or None where it fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    try:
        with FakeTensorMode(), torch.device("cuda"):  # it cannot move a model
            step = make("cuda")
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


def rows(chosen: dict[str, Make]) -> Iterator[list[str]]:
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "MemTracker": []}
    for name, make in chosen.items():
        torch.manual_seed(0)
        gc.collect()
        torch.cuda.empty_cache()
        step = make("cuda")
        start = time.perf_counter()
        predicted = brim.estimate(step, device="cuda", calls=2)
        seconds = time.perf_counter() - start
        total = predicted.held_before + predicted.peak
        del step
        allocated, reserved = measured(make)
        start = time.perf_counter()
        tracked = mem_tracker(make)
        tracker_seconds = time.perf_counter() - start
        off = total / allocated - 1, predicted.reserved / reserved - 1
        errors["allocated"].append(abs(off[0]))
        errors["reserved"].append(abs(off[1]))
        if tracked is not None:
            errors["MemTracker"].append(abs(tracked / allocated - 1))
        yield [
            name[:28].ljust(28),
            f"{allocated >> 20}",
            f"{total >> 20} {off[0]:+.1%}",
            f"{reserved >> 20}",
            f"{predicted.reserved >> 20} {off[1]:+.1%}",
            f"{seconds:.1f} s",
            "failed" if tracked is None else f"{tracked >> 20} {tracked / allocated - 1:+.1%}",
            f"{tracker_seconds:.1f} s",
        ]
    for figure, share in errors.items():
        if share:
            print(f"{figure}: median {statistics.median(share):.2%}, worst {max(share):.2%}")


def main() -> None:
    warnings.filterwarnings("ignore")
    if not torch.cuda.is_available():
        sys.exit("bench_estimate.py measures on a GPU, and there is none")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    words = sys.argv[1:]
    chosen = {k: v for k, v in STEPS.items() if not words or any(word in k for word in words)}
    # cuBLAS's workspaces exist from here on, in every measurement alike.
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    print_table(
        ["step", "allocated", "estimated", "reserved", "estimated", "", "MemTracker", ""],
        rows(chosen),
    )


if __name__ == "__main__":
    main()
