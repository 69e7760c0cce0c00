"""An estimate: what is held while a call runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from brim import _C
from brim.plot._canvas import budget_on, bytes_on, draw, legend_below, tidy
from brim.plot._svg import Series

if TYPE_CHECKING:
    from brim._estimate import Estimate

KINDS = [name.replace("_", " ") for name in _C.MemoryKind.__members__]
"""The kinds of memory, in the order of the C++ core."""

# From the bottom to the top of the picture: what stays first. All differ in grey, neighbours much.
_STACK = (
    ("parameter", "#12263A"),
    ("optimizer state", "#7FA7C9"),
    ("gradient", "#0072B2"),
    ("input", "#DDDDDD"),
    ("activation", "#EFB02E"),
    ("temporary", "#7A3B00"),
    ("workspace", "#FBE6AE"),
    ("other", "#8C8C8C"),
)
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
    moments = found._timeline()
    layers = stacked(moments)
    if layers:
        axes.stackplot(
            _progress(len(moments)),
            *(layer.values for layer in layers),
            step="post",
            colors=[layer.color for layer in layers],
            labels=[layer.name for layer in layers],
            linewidth=0,
        )
    most = found.held_before + found.peak
    for (name, other), line in zip(beside.items(), _LINES, strict=False):
        sums = [sum(moment.held) for moment in other._timeline()]
        label = f"{name}: {_C.format_bytes(max(sums))}"
        axes.step(
            _progress(len(sums)),
            sums,
            line,
            where="post",
            color="black",
            linewidth=1.6,
            label=label,
        )
        most = max(most, *sums)
    if found.capacity is not None and found.capacity < 2 * most:
        budget_on(axes, found.capacity, "capacity")
        most = max(most, found.capacity)
    peak, held = _C.format_bytes(found.peak), _C.format_bytes(found.held_before)
    tidy(axes, f"Peak {peak} above the {held} held before, on {found.device}")
    axes.set_xlabel("progress of the call, in allocations and releases")
    axes.set_ylabel("memory held")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1.08 * most)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    bytes_on(axes.yaxis, most)
    legend_below(axes, columns=3)


def stacked(moments: Sequence[_C.HeldMoment]) -> list[Series]:
    """What is held at each moment, for each kind of which there is any."""
    layers = (
        Series(name, color, [moment.held[KINDS.index(name)] for moment in moments])
        for name, color in _STACK
    )
    return [layer for layer in layers if any(layer.values)]


def _progress(count: int) -> list[float]:
    return [100 * place / max(count - 1, 1) for place in range(count)]
