"""Axes of sizes and of times, logarithmic where they span much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brim.plot._canvas import GREY

_WIDE = 20  # times the smallest: more needs a logarithmic axis


def size_axis(axis: Any, sizes: Sequence[float], name: str) -> bool:
    """Label an axis of sizes; returns whether it is logarithmic, as they span much."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    wide = max(sizes) > _WIDE * min(sizes)
    if wide:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=2)
        axis.set_major_locator(LogLocator(base=2, numticks=7))
    axis.set_label_text(name)
    axis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    return wide


def size_text(size: float) -> str:
    """A size in few characters, in one notation for all axes.

    Example:
        >>> size_text(512), size_text(65536), size_text(2.5)
        ('512', '65,536', '2.5')
    """
    if size >= 1e9:
        return f"{size:.2g}"
    return f"{size:,.0f}" if size == round(size) else f"{size:g}"


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
    logarithmic = right.get_yscale() == "log"
    right.yaxis.set_major_formatter(
        lambda value, _: _duration(value, value if logarithmic else max(times))
    )
    right.spines[["top", "left"]].set_visible(False)
    return lines


def _duration(seconds: float, most: float) -> str:
    """A time in the unit that suits the longest one.

    Example:
        >>> _duration(2.5, 3), _duration(0.5, 3), _duration(0.01, 0.02), _duration(2e-5, 2e-5)
        ('2.5 s', '0.5 s', '10 ms', '20 µs')
    """
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    name, unit = next((each for each in units if most >= each[1]), units[-1])
    return f"{seconds / unit:g} {name}"
