"""Axes of sizes and of times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from brim.plot._canvas import GREY

_CROWDED = 20  # times a size: on a linear axis it would be at the edge


def size_axis(axis: Any, sizes: Collection[float], name: str) -> bool:
    """Label an axis of sizes: linear if that tells three apart; returns if it is logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    *_, third = sorted({*sizes}, reverse=True)[:3]
    crowded = max(sizes) > _CROWDED * third
    if crowded:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=2)
        axis.set_major_locator(LogLocator(base=2, numticks=7))
    axis.set_label_text(name)
    axis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    return crowded


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
    """Times on an axis of their own on the right; returns what the legend shows of them."""
    if not points:
        return []
    right = axes.twinx()
    look = {"color": GREY, "marker": "s", "markersize": 5, "markerfacecolor": "white"}
    found: list[Any] = right.plot(*zip(*points, strict=True), linestyle="", label="time", **look)
    right.set_ylim(bottom=0)
    right.set_ylabel("time")
    right.yaxis.set_major_formatter(lambda value, _: duration(value))
    right.spines[["top", "left"]].set_visible(False)
    return found


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    Example:
        >>> duration(125.4), duration(2.504), duration(0.01), duration(2e-5), duration(0)
        ('125 s', '2.5 s', '10 ms', '20 µs', '0 s')
    """
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    name, unit = next((each for each in units if seconds >= each[1]), units[-1 if seconds else 0])
    number = seconds / unit
    return f"{number:.0f} {name}" if number >= 100 else f"{number:.3g} {name}"
