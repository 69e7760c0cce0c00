"""The first situation: a function that runs with the largest batch size that fits."""

from __future__ import annotations

import time
from typing import Any

import torch

import brim
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
    for call in ("@brim.maximize", "… called again"):
        tried.append(_adapted(adaptive, x, y, budget, call))
    rows = [_row(budget=budget, **each) for each in tried]
    chosen = tried[-1]["size"]
    return Situation(
        f"The {_NEIGHBOURS} nearest of {len(y)} points for each of {len(x)}, within "
        f"{brim.format_bytes(budget)} on {device}:",
        Table(["call", "batch size", "time", "peak", "of the budget"], rows),
        f"brim found {chosen}; there is no batch size to tune, and no call runs out of memory.",
        {"budget": budget, "calls": tried},
        f"brim took {chosen}",
        lambda axes: _paint(axes, tried, budget),
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


def _adapted(
    adaptive: brim.AdaptiveFunction[..., torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    budget: int,
    call: str,
) -> dict[str, Any]:
    with brim.budget(budget, x.device):
        begin = time.perf_counter()
        _, attempts = adaptive.record(x, y, batch_size=len(x))
        seconds = time.perf_counter() - begin
    last = attempts[-1]
    return {
        "call": call,
        "size": last.size,
        "seconds": seconds,
        "peak": last.held + (last.peak or 0),
    }


def _row(call: str, size: int, seconds: float | None, peak: int | None, budget: int) -> list[str]:
    if seconds is None or peak is None:
        return [call, str(size), "out of memory", "", ""]
    return [call, str(size), f"{seconds:.2f} s", brim.format_bytes(peak), f"{peak / budget:.0%}"]


def _paint(axes: Any, tried: list[dict[str, Any]], budget: int) -> None:
    from brim.plot._canvas import BLUE, ORANGE, budget_on, bytes_on, legend_below, tidy
    from brim.plot._sizes import seconds_on, size_text

    by_hand = [i for i, each in enumerate(tried) if each["call"] == "by hand" and each["peak"]]
    by_brim = [i for i, each in enumerate(tried) if each["call"] != "by hand"]
    failed = [i for i, each in enumerate(tried) if not each["peak"]]
    for places, label, look in (
        (by_hand, "by hand", {"color": "#C3CDD6"}),
        (failed, "by hand: out of memory", {"color": "white", "hatch": "///", "edgecolor": ORANGE}),
        (by_brim, "@brim.maximize, called twice", {"color": BLUE}),
    ):
        axes.bar(places, [tried[i]["peak"] or budget for i in places], 0.6, label=label, **look)
    budget_on(axes, budget)
    tidy(axes, "")
    axes.set_xticks(range(len(tried)), [size_text(each["size"]) for each in tried])
    axes.set_xlabel("batch size")
    axes.set_ylabel("peak memory")
    axes.set_ylim(0, 1.15 * budget)
    bytes_on(axes.yaxis, budget)
    times = [(i, tried[i]["seconds"]) for i in (*by_hand, *by_brim)]
    legend_below(axes, seconds_on(axes, times), columns=3)
