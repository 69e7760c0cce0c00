"""An estimate: what is held while a call runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from brim import _C
from brim.plot._canvas import Series, budget_on, bytes_up, draw, legend_below, progress_across, tidy

if TYPE_CHECKING:
    from brim._estimate import Estimate

KINDS = [name.replace("_", " ") for name in _C.MemoryKind.__members__]
"""The kinds of memory, in the order of the C++ core."""

# From the bottom to the top of the picture: what stays first. All differ in grey, neighbours much.
COLORS = {
    "parameter": "#12263A",
    "optimizer state": "#7FA7C9",
    "gradient": "#0072B2",
    "input": "#DDDDDD",
    "activation": "#EFB02E",
    "temporary": "#7A3B00",
    "workspace": "#FBE6AE",
    "other": "#8C8C8C",
}
_LINES = ("-", "--", "-.", ":")


def estimate(
    found: Estimate, where: Any = None, *, beside: Mapping[str, Estimate] | None = None
) -> Any:
    """Draw what a call holds from its first operator to its last, by the kind of memory.

    Args:
        found: what `brim.estimate` returned.
        where: an Axes of matplotlib, a file to write, or None.
        beside: other estimates, by name, drawn as lines: what the same step holds with brim.

    Returns:
        The Figure.
    """
    return draw(where, lambda axes: _paint(axes, found, beside or {}))


def _paint(axes: Any, found: Estimate, beside: Mapping[str, Estimate]) -> None:
    moments, times = found._timeline()
    top = [0] * len(moments)
    for layer in stacked(moments):
        below, top = top, [a + b for a, b in zip(top, layer.values, strict=True)]
        look = {"color": layer.color, "linewidth": 0, "label": layer.name}
        axes.stairs(top, times, baseline=below, fill=True, **look)
    most = found.held_before + found.peak
    for (name, other), line in zip(beside.items(), _LINES, strict=False):
        others, times = other._timeline()
        sums = [sum(moment.held) for moment in others]
        label = f"{name}: at most {_C.format_bytes(max(sums))}"
        look = {"color": "black", "linestyle": line, "linewidth": 1.6, "label": label}
        axes.stairs(sums, times, baseline=None, **look)
        most = max(most, *sums)
    if found.capacity is not None and found.capacity < 2 * most:
        budget_on(axes, found.capacity, "capacity")
        most = max(most, found.capacity)
    held = _C.format_bytes(found.held_before)
    peak = _C.format_bytes(found.held_before + found.peak)
    tidy(axes, f"At most {peak} held, {held} of it before, on {found.device}")
    progress_across(axes, "call", len(found._begins))
    bytes_up(axes, most, "memory held")
    legend_below(axes, columns=3)


def stacked(moments: Sequence[_C.HeldMoment]) -> list[Series]:
    """What is held at each moment, for each kind of which there is any."""
    layers = (
        Series(name, color, [moment.held[KINDS.index(name)] for moment in moments])
        for name, color in COLORS.items()
    )
    return [layer for layer in layers if any(layer.values)]
