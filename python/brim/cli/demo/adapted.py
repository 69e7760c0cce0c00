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
_SIZES = (256, 4096, 16384, 65536)
_BY_HAND, _LARGEST, _AGAIN = "by hand", "@brim.maximize", "… called again"
_FASTEST = 'objective="throughput"'
_SETTLED = 8  # calls: each size is timed twice


def run(device: torch.device, scale: int) -> Situation:
    """Nearest neighbours with batch sizes set by hand, then with `@brim.maximize`."""
    x = torch.rand(_QUERIES // scale, _DIMENSION, device=device)
    y = torch.rand(_POINTS, _DIMENSION, device=device)
    budget = _BUDGET // scale
    _knn(x[:64], y, 16)  # the first call loads kernels
    tried = [_by_hand(x, y, size // scale, budget) for size in _SIZES]
    largest = brim.maximize("batch_size", device=device)(_knn)
    tried += [_adapted(largest, x, y, budget, call) for call in (_LARGEST, _AGAIN)]
    fastest = brim.maximize("batch_size", device=device, objective="throughput")(_knn)
    tried.append([_adapted(fastest, x, y, budget, _FASTEST) for _ in range(_SETTLED)][-1])
    rows = [_row(budget=budget, **each) for each in tried]
    chosen, quickest = tried[-2]["size"], _quickest(tried)["size"]
    return Situation(
        f"The {_NEIGHBOURS} nearest of {len(y)} points for each of {len(x)}, within "
        f"{brim.format_bytes(budget)} on {device}:",
        Table(["call", "batch size", "time", "peak", "of the budget"], rows),
        f"brim found {chosen}; there is no batch size to tune, and no call runs out of memory.\n"
        + _speed(tried),
        {"budget": budget, "calls": tried},
        f"{chosen} fit{f', {quickest} is fastest' * (quickest < chosen)}",
        lambda axes: _paint(axes, tried, budget),
    )


def _quickest(tried: list[dict[str, Any]]) -> dict[str, Any]:
    return min((each for each in tried if each["seconds"]), key=lambda each: each["seconds"])


def _speed(tried: list[dict[str, Any]]) -> str:
    """Whether the largest size is the fastest one too."""
    largest, fastest, quickest = tried[-2], tried[-1], _quickest(tried)
    if quickest["size"] < largest["size"]:
        found = (
            f"The largest batch is not the fastest: {largest['size']} took "
            f"{largest['seconds']:.2f} s, {quickest['size']} took {quickest['seconds']:.2f} s."
        )
    else:
        found = "No smaller batch was faster."
    return (
        f"{found}\n{_FASTEST} looks for speed: after {_SETTLED} calls it takes {fastest['size']}, "
        f"in {fastest['seconds']:.2f} s."
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
    found: dict[str, Any] = {"call": _BY_HAND, "size": size, "seconds": None, "peak": None}
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
    from brim.plot._attempts import Call, paint_calls
    from brim.plot._canvas import BLUE, ORANGE, PALE, SKY, tidy

    looks = {
        _BY_HAND: ("by hand", PALE),
        _LARGEST: ("@brim.maximize, called twice", BLUE),
        _AGAIN: ("@brim.maximize, called twice", BLUE),
        _FASTEST: ('objective="throughput"', SKY),
    }
    failed = ("by hand: out of memory", ORANGE)
    tidy(axes, "")
    calls = [
        Call(
            *(looks[each["call"]] if each["peak"] else failed),
            each["size"],
            each["peak"] or budget,
            each["seconds"],
        )
        for each in tried
    ]
    paint_calls(axes, calls, budget, "batch size")
