"""The second situation: the memory of a training step, known before it runs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import brim
from brim._table import Table
from brim.cli.demo.situation import Situation

_WIDTH, _BLOCKS = 256, 6
_BUDGET, _BUDGET_ELSEWHERE = 256 * 2**20, 2 * 2**30  # a GPU's libraries take some of theirs


def run(device: torch.device, scale: int) -> Situation:
    """Find the largest batch of a training step by tracing it, then run it and compare."""
    blocks = [[nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()] for _ in range(_BLOCKS)]
    model = nn.Sequential(*(layer for block in blocks for layer in block)).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch_size: int) -> None:
        loss = model(torch.rand(batch_size, _WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2)  # so that the optimizer has its state, and libraries their workspaces
    budget = (_BUDGET if device.type == "cpu" else _BUDGET_ELSEWHERE) // scale
    begin = time.perf_counter()
    largest = brim.largest_size(step, "batch_size", budget, device=device)
    seconds = time.perf_counter() - begin
    sizes = (max(largest // 4, 1), largest, largest + largest // 8 + 1)
    compared = [_compare(step, size, budget, device) for size in sizes]
    estimate = brim.estimate(step, largest, device=device, capacity=budget)
    brim.convert(model, recompute="cheap")
    with_brim = brim.estimate(step, largest, device=device)

    def paint(axes: Any) -> None:
        estimate.plot(axes, beside={"after brim.convert": with_brim})

    return Situation(
        f"brim.largest_size traced it in {seconds:.1f} s, ran nothing, and found {largest} samples "
        f"for {brim.format_bytes(budget)}:",
        Table(["batch size", "foreseen", "measured", "error"], [_row(**each) for each in compared]),
        "Whether a step fits is known before it runs, also for a GPU that is not there.",
        {"budget": budget, "largest": largest, "seconds": seconds, "compared": compared},
        f"{largest} samples fit",
        paint,
    )


def _compare(step: Any, size: int, budget: int, device: torch.device) -> dict[str, Any]:
    found = brim.estimate(step, size, device=device, capacity=budget)
    measured = None
    brim.release_cached(device)  # what earlier calls have left between their blocks
    with brim.budget(budget, device), brim.PeakMeter(device) as meter:
        try:
            step(size)
            measured = meter.peak
        except torch.OutOfMemoryError:
            pass
    return {"size": size, "foreseen": found.peak, "fits": found.fits, "measured": measured}


def _row(size: int, foreseen: int, fits: bool, measured: int | None) -> list[str]:
    text = brim.format_bytes(foreseen)
    return [
        str(size),
        text if fits else f"{text}: does not fit",
        "out of memory" if measured is None else brim.format_bytes(measured),
        "" if measured is None else f"{foreseen / measured - 1:+.2%}",
    ]
