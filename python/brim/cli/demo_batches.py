"""The second part of `brim demo`: samples of different lengths in batches under a budget."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from brim import data
from brim.cli.table import Table

_SAMPLES, _BUDGET, _BUCKETS = 1_000_000, 16_384, 30


def show_batches() -> None:
    """Print one row a sampler: how many batches, how full, how much padding, how long it took."""
    lengths = torch.randn(_SAMPLES, generator=torch.Generator().manual_seed(0))
    lengths = lengths.mul_(0.6).add_(5.7).exp_().clamp_(30, 2000).long()
    print(
        f"Batches of at most {_BUDGET} tokens, padding included, of {_SAMPLES} samples of 30 to "
        "2000 tokens, shuffled:\n"
    )
    boundaries = data.least_padding_boundaries(lengths, _BUCKETS)
    samplers: dict[str, Callable[[], data.BatchSamplerBase]] = {
        "in their order": lambda: data.SizeAwareBatchSampler(
            range(_SAMPLES), lengths, _BUDGET, cost="padded", shuffle=True, seed=0
        ),
        "buckets": lambda: data.BucketBatchSampler(
            lengths, boundaries, max_total_size=_BUDGET, seed=0
        ),
        "packed": lambda: data.PackedBatchSampler(lengths, _BUDGET, cost="padded", shuffle=True),
    }
    table = Table("", "batches", "fill", "padding", "time")
    for name, make in samplers.items():
        begin = time.perf_counter()
        sampler = make()
        sampler.plan()
        seconds = time.perf_counter() - begin
        report = sampler.report()
        cells = (f"{report.fill:.1%}", f"{report.padding:.1%}", f"{seconds:.2f} s")
        table.add(name, str(report.batches), *cells)
