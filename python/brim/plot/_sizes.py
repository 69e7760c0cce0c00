"""Memory and time against the size, on logarithmic axes where the sizes span much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brim.plot._canvas import GREY, bytes_on

_WIDE = 20  # times the smallest: more needs a logarithmic axis


def sizes_on(axes: Any, sizes: Sequence[float], name: str, peaks: Sequence[float]) -> None:
    """Set up the axes of sizes and of memory."""
    from matplotlib.ticker import FuncFormatter

    wide = max(sizes) > _WIDE * min(sizes)
    if wide:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(name)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.set_ylabel("peak memory")
    bytes_on(axes.yaxis, max(peaks), logarithmic=wide)
    if not wide:
        axes.set_ylim(0, 1.15 * max(peaks))


def _short(size: float) -> str:
    """A size in few characters.

    Example:
        >>> _short(512), _short(65536), _short(3000)
        ('512', '64 Ki', '3000')
    """
    for name, unit in (("Mi", 2**20), ("Ki", 2**10)):
        if size >= 8 * unit and size % unit == 0:
            return f"{size / unit:g} {name}"
    return f"{size:g}" if size < 1e6 else f"{size:.2g}"


def seconds_on(axes: Any, points: Sequence[tuple[float, float]]) -> list[Any]:
    """Times on an axis of their own on the right; returns the lines for the legend."""
    if not points:
        return []
    right = axes.twinx()
    times = [seconds for _, seconds in points]
    if max(times) > _WIDE * min(times) and axes.get_yscale() == "log":
        right.set_yscale("log")
    else:
        right.set_ylim(0, 1.15 * max(times))
    lines: list[Any] = right.plot(
        *zip(*sorted(points), strict=True),
        color=GREY,
        linestyle=":",
        marker="s",
        markersize=5,
        markerfacecolor="white",
        label="time",
    )
    right.set_ylabel("time")
    right.yaxis.set_major_formatter(lambda value, _: _duration(value))
    right.spines[["top", "left"]].set_visible(False)
    return lines


def _duration(seconds: float) -> str:
    """Seconds, milliseconds or microseconds.

    Example:
        >>> _duration(2.5), _duration(0.01), _duration(2e-5)
        ('2.5 s', '10 ms', '20 µs')
    """
    for name, unit in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= unit or seconds == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds / 1e-6:g} µs"
