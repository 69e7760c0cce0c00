"""`brim demo`: nearest neighbours under a memory budget, then batches of different lengths."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch

import brim
from brim.cli import arguments
from brim.cli.demo_batches import show_batches
from brim.cli.table import Table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_BATCH_SIZES = (16, 64, 256, 1024, 4096, 16384, 65536)
_FULL_QUERIES, _FULL_POINTS, _DIMENSION, _NEIGHBOURS = 2**16, 2**17, 128, 3


def add_parser(commands: Subparsers) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "demo", help="nearest neighbours under a memory budget, and batches of different lengths"
    )
    parser.add_argument(
        "--device",
        type=arguments.device,
        default=None,
        help="cpu, cuda, … (default: the accelerator where there is one)",
    )
    parser.add_argument(
        "--budget",
        type=arguments.budget,
        default=None,
        help="e.g. 512MiB (default: 512MiB on the CPU, 8GiB elsewhere)",
    )
    parser.add_argument(
        "--scale",
        type=_scale,
        default=None,
        help="points are 131072 / SCALE and queries 65536 (default: 64 on the CPU, 1 elsewhere)",
    )
    parser.set_defaults(run=run)


def _scale(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _FULL_POINTS // _NEIGHBOURS:
        raise argparse.ArgumentTypeError(
            f"must be from 1 to {_FULL_POINTS // _NEIGHBOURS}, got {text}"
        )
    return int(text)


def knn(x: torch.Tensor, y: torch.Tensor, batch_size: int, k: int = _NEIGHBOURS) -> torch.Tensor:
    """Indices of the k nearest of y for each row of x, `batch_size` rows at a time."""
    return torch.cat(
        [
            torch.cdist(x[start : start + batch_size], y).topk(k=k, dim=1, largest=False).indices
            for start in range(0, x.shape[0], batch_size)
        ]
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one row a batch size: time, peak and share of the budget, or that it does not fit."""
    device = arguments.device or brim.default_device()
    on_cpu = device.type == "cpu"
    scale = arguments.scale if arguments.scale is not None else (64 if on_cpu else 1)
    budget = arguments.budget or ("512MiB" if on_cpu else "8GiB")
    if on_cpu:
        brim.install_cpu_allocator()  # so that the inputs below count too
    torch.manual_seed(0)
    x = torch.rand(_FULL_QUERIES, _DIMENSION, device=device)
    y = torch.rand(_FULL_POINTS // scale, _DIMENSION, device=device)
    print(
        f"The {_NEIGHBOURS} nearest of {y.shape[0]} points for each of {x.shape[0]}, "
        f"in {_DIMENSION} dimensions, on {device}, with a budget of {budget}:\n"
    )
    knn(x[:64], y, 16)  # the first call loads kernels
    table = Table("batch size", "time", "peak", "of the budget")
    for batch_size in _BATCH_SIZES:
        table.add(str(batch_size), *measure(x, y, batch_size, budget, device))
    adapt(x, y, budget, device)
    show_batches()
    return 0


def measure(
    x: torch.Tensor, y: torch.Tensor, batch_size: int, budget: str, device: torch.device
) -> tuple[str, str, str]:
    """Run once under the budget; the cells of one row."""
    with brim.budget(budget, device=device) as limit, brim.PeakMeter(device) as meter:
        begin = time.perf_counter()
        try:
            knn(x, y, batch_size)
            synchronize(device)
        except torch.OutOfMemoryError:
            return "out of memory", "", ""
        seconds = time.perf_counter() - begin
    held = meter.start + meter.peak
    return f"{seconds:.2f} s", brim.format_bytes(held), f"{held / limit.limit:.0%}"


def adapt(x: torch.Tensor, y: torch.Tensor, budget: str, device: torch.device) -> None:
    """Run the same function adaptively, asked for everything at once; one row a size it tried."""
    print("\nThe same, decorated with @brim.maximize and asked for everything at once:\n")
    adaptive = brim.maximize("batch_size", device=device)(knn)
    with brim.budget(budget, device=device) as limit:
        for call in ("first call", "second call"):
            begin = time.perf_counter()
            _, attempts = adaptive.record(x, y, batch_size=x.shape[0])
            synchronize(device)
            seconds = time.perf_counter() - begin
            table = Table(call, "time", "peak", "of the budget")
            for attempt in attempts:
                if not attempt.fitted:
                    table.add(str(attempt.size), "out of memory", "", "")
                    continue
                held = attempt.held + (attempt.peak or 0)
                cells = (f"{seconds:.2f} s", brim.format_bytes(held), f"{held / limit.limit:.0%}")
                table.add(str(attempt.size), *cells)
            print()


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; the CPU is always done."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
