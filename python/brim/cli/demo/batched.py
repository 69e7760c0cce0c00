"""The fourth situation: batches of samples of different lengths, under a budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from brim import data
from brim._table import Table
from brim.cli.demo.situation import Situation

_SAMPLES, _TOKENS, _BUCKETS = 1_000_000, 16_384, 30


def run(device: torch.device, scale: int) -> Situation:
    """Put samples into batches in three ways."""
    lengths = torch.randn(_SAMPLES // scale).mul_(0.6).add_(5.7).exp_().clamp_(30, 2000).long()
    samplers: dict[str, Callable[[], data.BatchSamplerBase]] = {
        "SizeAwareBatchSampler": lambda: data.SizeAwareBatchSampler(
            range(len(lengths)), lengths, _TOKENS, cost="padded", shuffle=True, seed=0
        ),
        "BucketBatchSampler": lambda: data.BucketBatchSampler(
            lengths,
            data.least_padding_boundaries(lengths, _BUCKETS),
            max_total_size=_TOKENS,
            seed=0,
        ),
        "PackedBatchSampler": lambda: data.PackedBatchSampler(
            lengths, _TOKENS, cost="padded", shuffle=True
        ),
    }
    rows, figures = [], {}
    for name, make in samplers.items():
        begin = time.perf_counter()
        sampler = make()
        sampler.plan()
        seconds = time.perf_counter() - begin
        report = sampler.report()
        figures[name] = {
            "batches": report.batches,
            "fill": report.fill,
            "padding": report.padding,
            "seconds": seconds,
        }
        shares = (f"{report.fill:.1%}", f"{report.padding:.1%}")
        rows.append([name, str(report.batches), *shares, f"{seconds:.2f} s"])

    return Situation(
        f"At most {_TOKENS} tokens in a batch, padding included; {len(lengths)} samples of 30 to "
        "2000 tokens:",
        Table(["sampler", "batches", "fill", "padding", "time"], rows),
        "Samples of like lengths go together, so that little of a batch is padding.",
        figures,
        "what they hold",
        lambda axes: _paint(axes, figures),
    )


def _paint(axes: Any, figures: dict[str, dict[str, float]]) -> None:
    from brim.plot._canvas import tidy
    from brim.plot._plan import paint_shares

    tidy(axes, "")
    axes.set_xlabel("…BatchSampler")
    shares = {name: (each["fill"], each["padding"]) for name, each in figures.items()}
    paint_shares(axes, {name.removesuffix("BatchSampler"): shares[name] for name in shares})
