"""`brim demo`: nearest neighbours under a memory budget, then batches of different lengths."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch

import brim
from brim import data
from brim.cli import arguments
from brim.cli.table import print_table

HELP = "nearest neighbours under a memory budget, and batches of different lengths"

_BATCH_SIZES = (16, 64, 256, 1024, 4096, 16384, 65536)
_FULL_QUERIES, _FULL_POINTS, _DIMENSION, _NEIGHBOURS = 2**16, 2**17, 128, 3
_SAMPLES, _TOKENS, _BUCKETS = 1_000_000, 16_384, 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the device, the budget and the amount of data."""
    parser.add_argument(
        "--device",
        type=arguments.device,
        help="cpu, cuda, … (default: the accelerator where there is one)",
    )
    parser.add_argument(
        "--budget",
        type=arguments.budget,
        help="e.g. 512MiB (default: 512MiB on the CPU, 8GiB elsewhere)",
    )
    parser.add_argument(
        "--scale",
        type=_scale,
        help="points are 131072 / SCALE and queries 65536 (default: 64 on the CPU, 1 elsewhere)",
    )


def _scale(text: str) -> int:
    most = _FULL_POINTS // _NEIGHBOURS
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be from 1 to {most}, got {text}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print three tables: fixed batch sizes, the adaptive call, and three batch samplers."""
    device = arguments.device or brim.default_device()
    on_cpu = device.type == "cpu"
    scale = arguments.scale or (64 if on_cpu else 1)
    budget = arguments.budget or ("512MiB" if on_cpu else "8GiB")
    if on_cpu:
        brim.install_cpu_allocator()  # so that the inputs count too
    torch.manual_seed(0)
    x = torch.rand(_FULL_QUERIES, _DIMENSION, device=device)
    y = torch.rand(_FULL_POINTS // scale, _DIMENSION, device=device)
    print(
        f"The {_NEIGHBOURS} nearest of {y.shape[0]} points for each of {x.shape[0]}, "
        f"in {_DIMENSION} dimensions, on {device}, with a budget of {budget}:\n"
    )
    _knn(x[:64], y, 16)  # the first call loads kernels
    head = ["time", "peak", "of the budget"]
    print_table(["batch size", *head], _fixed_sizes(x, y, budget))
    print("\nThe same, decorated with @brim.maximize and asked for everything at once:\n")
    adaptive = brim.maximize("batch_size", device=device)(_knn)
    for call in ("first call", "second call"):
        print_table([call, *head], _adaptive_call(adaptive, x, y, budget))
        print()
    print(
        f"Batches of at most {_TOKENS} tokens, padding included, of {_SAMPLES} samples of 30 to "
        "2000 tokens, shuffled:\n"
    )
    print_table(["", "batches", "fill", "padding", "time"], _samplers())
    return 0


def _knn(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Indices of the nearest of y for each row of x, `batch_size` rows at a time."""
    nearest = [
        torch.cdist(x[i : i + batch_size], y).topk(_NEIGHBOURS, dim=1, largest=False).indices
        for i in range(0, x.shape[0], batch_size)
    ]
    result = torch.cat(nearest)
    if result.device.type != "cpu":
        torch.accelerator.synchronize()
    return result


def _cells(seconds: float, held: int, limit: int) -> list[str]:
    return [f"{seconds:.2f} s", brim.format_bytes(held), f"{held / limit:.0%}"]


def _fixed_sizes(x: torch.Tensor, y: torch.Tensor, budget: str) -> Iterator[list[str]]:
    """One row per batch size: time, peak and share of the budget, or "out of memory"."""
    for size in _BATCH_SIZES:
        with brim.budget(budget, x.device) as limit, brim.PeakMeter(x.device) as meter:
            begin = time.perf_counter()
            try:
                _knn(x, y, size)
            except torch.OutOfMemoryError:
                yield [str(size), "out of memory", "", ""]
                continue
            seconds = time.perf_counter() - begin
        yield [str(size), *_cells(seconds, meter.start + meter.peak, limit.limit)]


def _adaptive_call(
    adaptive: brim.AdaptiveFunction[..., torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    budget: str,
) -> Iterator[list[str]]:
    """One row per attempt."""
    with brim.budget(budget, x.device) as limit:
        begin = time.perf_counter()
        _, attempts = adaptive.record(x, y, batch_size=x.shape[0])
        seconds = time.perf_counter() - begin
        for attempt in attempts:
            if attempt.fitted:
                held = attempt.held + (attempt.peak or 0)
                yield [str(attempt.size), *_cells(seconds, held, limit.limit)]
            else:
                yield [str(attempt.size), "out of memory", "", ""]


def _samplers() -> Iterator[list[str]]:
    """One row per sampler: number of batches, fill, padding and time."""
    lengths = torch.randn(_SAMPLES, generator=torch.Generator().manual_seed(0))
    lengths = lengths.mul_(0.6).add_(5.7).exp_().clamp_(30, 2000).long()
    boundaries = data.least_padding_boundaries(lengths, _BUCKETS)
    samplers: dict[str, Callable[[], data.BatchSamplerBase]] = {
        "in their order": lambda: data.SizeAwareBatchSampler(
            range(_SAMPLES), lengths, _TOKENS, cost="padded", shuffle=True, seed=0
        ),
        "buckets": lambda: data.BucketBatchSampler(
            lengths, boundaries, max_total_size=_TOKENS, seed=0
        ),
        "packed": lambda: data.PackedBatchSampler(lengths, _TOKENS, cost="padded", shuffle=True),
    }
    for name, make in samplers.items():
        begin = time.perf_counter()
        sampler = make()
        sampler.plan()
        seconds = time.perf_counter() - begin
        report = sampler.report()
        shares = (f"{report.fill:.1%}", f"{report.padding:.1%}")
        yield [name, str(report.batches), *shares, f"{seconds:.2f} s"]
