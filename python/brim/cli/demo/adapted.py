"""The first situation: a function that runs with the largest batch size that fits."""

from __future__ import annotations

import time
from typing import Any

import torch

import brim
from brim import plot
from brim._table import Table
from brim.cli.demo.situation import Situation

_QUERIES, _POINTS, _DIMENSION, _NEIGHBOURS = 2**16, 2**11, 128, 3
_BUDGET = 512 * 2**20
_BY_HAND = (256, 4096, 16384, 65536)


def run(device: torch.device, scale: int) -> Situation:
    """Nearest neighbours with batch sizes set by hand, then with `@brim.maximize`."""
    x = torch.rand(_QUERIES // scale, _DIMENSION, device=device)
    y = torch.rand(_POINTS, _DIMENSION, device=device)
    budget = _BUDGET // scale
    _knn(x[:64], y, 16)  # the first call loads kernels
    tried = [_by_hand(x, y, size // scale, budget) for size in _BY_HAND]
    adaptive = brim.maximize("batch_size", device=device)(_knn)
    attempts: list[brim.Attempt] = []
    for call in ("@brim.maximize", "… called again"):
        with brim.budget(budget, device):
            begin = time.perf_counter()
            attempts += adaptive.record(x, y, batch_size=len(x))[1]
            seconds = time.perf_counter() - begin
        last = attempts[-1]
        peak = last.held + (last.peak or 0)
        tried.append({"call": call, "size": last.size, "seconds": seconds, "peak": peak})
    rows = [_row(budget=budget, **each) for each in tried]
    return Situation(
        f"The {_NEIGHBOURS} nearest of {len(y)} points for each of {len(x)}, within "
        f"{brim.format_bytes(budget)} on {device}:",
        Table(["call", "batch size", "time", "peak", "of the budget"], rows),
        f"brim found {last.size}; there is no batch size to tune, and no call runs out of memory.",
        {"budget": budget, "calls": tried},
        f"brim took {last.size}",
        lambda axes: plot.attempts(attempts, axes, budget=budget),
    )


def _knn(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Indices of the nearest of y for each row of x, `batch_size` rows at a time."""
    nearest = [
        torch.cdist(part, y).topk(_NEIGHBOURS, dim=1, largest=False).indices
        for part in torch.split(x, batch_size)
    ]
    result = torch.cat(nearest)
    if result.device.type != "cpu":
        torch.accelerator.synchronize()
    return result


def _by_hand(x: torch.Tensor, y: torch.Tensor, size: int, budget: int) -> dict[str, Any]:
    found: dict[str, Any] = {"call": "by hand", "size": size, "seconds": None, "peak": None}
    with brim.budget(budget, x.device), brim.PeakMeter(x.device) as meter:
        begin = time.perf_counter()
        try:
            _knn(x, y, size)
        except torch.OutOfMemoryError:
            return found
        seconds = time.perf_counter() - begin
    return {**found, "seconds": seconds, "peak": meter.start + meter.peak}


def _row(call: str, size: int, seconds: float | None, peak: int | None, budget: int) -> list[str]:
    if seconds is None or peak is None:
        return [call, str(size), "out of memory", "", ""]
    return [call, str(size), f"{seconds:.2f} s", brim.format_bytes(peak), f"{peak / budget:.0%}"]
