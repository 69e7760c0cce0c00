"""`brim.estimate` beside the measured peak of training steps, and PyTorch's MemTracker.

    python benchmarks/bench_estimate.py            # needs CUDA
    python benchmarks/bench_estimate.py ResNet     # steps whose name has this in it
    python benchmarks/bench_estimate.py --mem-tracker   # MemTracker for every step, not for four

Each step is predicted on a fresh model, before anything ran: two calls, since the first one makes
the optimizer's state. Then it runs twice and its peak is measured. All figures are of the whole
device, in MiB, cuBLAS's workspaces included. MemTracker predicts allocated bytes only.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
import warnings
from unittest import mock

import torch
from estimate_steps import STEPS, Make, Step

import brim
from brim.foresee._reach import Reachable

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


def mem_tracker(make: Make) -> int | None:
    """What PyTorch's MemTracker predicts for two calls, or None where it fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    try:
        with FakeTensorMode():
            with mock.patch("weakref.getweakrefs", return_value=[]):  # lets fake modules move
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


@dataclasses.dataclass
class Row:
    """One step: bytes predicted and measured, and the seconds that predictions took."""

    name: str
    allocated: int
    reserved: int
    predicted: int
    predicted_reserved: int
    seconds: float
    tracked: int | None
    tracker_seconds: float

    def cells(self) -> list[str]:
        tracked = ["", ""]
        if self.tracked is not None:
            error = self.tracked / self.allocated - 1
            tracked = [f"{self.tracked >> 20} {error:+.1%}", f"{self.tracker_seconds:.1f} s"]
        return [
            self.name,
            f"{self.allocated >> 20}",
            f"{self.predicted >> 20} {self.predicted / self.allocated - 1:+.1%}",
            f"{self.reserved >> 20}",
            f"{self.predicted_reserved >> 20} {self.predicted_reserved / self.reserved - 1:+.1%}",
            f"{self.seconds:.1f} s",
            *tracked,
        ]


def show(cells: list[str]) -> None:
    print(cells[0].ljust(45) + "".join(cell.rjust(14) for cell in cells[1:]), flush=True)


def compare(name: str, make: Make, track: bool) -> Row:
    """Predict a step before it ever ran, then run it."""
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # what cuBLAS keeps
    step = make("cuda")
    start = time.perf_counter()
    predicted = brim.estimate(step, device="cuda", calls=2)
    seconds = time.perf_counter() - start
    allocated, reserved = measured(step, before)
    del step
    start = time.perf_counter()
    return Row(
        name,
        allocated,
        reserved,
        predicted.held_before + predicted.peak,
        predicted.reserved,
        seconds,
        mem_tracker(make) if track else None,
        time.perf_counter() - start,
    )


def show_errors(rows: list[Row]) -> None:
    for figure, errors in {
        "allocated": [row.predicted / row.allocated - 1 for row in rows],
        "reserved": [row.predicted_reserved / row.reserved - 1 for row in rows],
        "MemTracker": [row.tracked / row.allocated - 1 for row in rows if row.tracked is not None],
    }.items():
        shares = sorted(abs(error) for error in errors)
        if shares:
            print(f"{figure}: median {statistics.median(shares):.2%}, worst {shares[-1]:.2%}")


def main() -> None:
    warnings.filterwarnings("ignore")
    if not torch.cuda.is_available():
        print("bench_estimate.py measures on a GPU, and there is none: skipped")
        return
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    every = "--mem-tracker" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--mem-tracker"]
    chosen = {k: v for k, v in STEPS.items() if not words or any(word in k for word in words)}
    # cuBLAS's workspaces exist from here on, in every measurement alike.
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    show(["step", "allocated", "estimate", "reserved", "estimate", "", "MemTracker", ""])
    rows = []
    for name, make in chosen.items():
        try:
            rows.append(compare(name, make, every or name in TRACKED))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        else:
            show(rows[-1].cells())
    print()
    show_errors(rows)


if __name__ == "__main__":
    main()
