"""An estimate: what is held while a call runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brim import _C
from brim.plot._canvas import budget_on, bytes_on, draw, legend_below, tidy

if TYPE_CHECKING:
    from brim.foresee import Estimate

KINDS = (
    "parameter",
    "gradient",
    "optimizer state",
    "activation",
    "temporary",
    "input",
    "workspace",
    "other",
)
"""The kinds of memory, in the order of the C++ core."""

# From the bottom to the top of the picture: what stays first. All differ in grey, neighbours much.
STACK = (
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
    progress = [_share(i, len(moments)) for i in range(len(moments))]
    layers = [
        (name, color, [moment.held[KINDS.index(name)] for moment in moments])
        for name, color in STACK
    ]
    layers = [layer for layer in layers if any(layer[2])]
    if layers:
        axes.stackplot(
            progress,
            *(values for _, _, values in layers),
            step="post",
            colors=[color for _, color, _ in layers],
            labels=[name for name, _, _ in layers],
            linewidth=0,
        )
    most = found.held_before + found.peak
    for (name, other), line in zip(beside.items(), _LINES, strict=False):
        sums = [sum(moment.held) for moment in other._timeline()]
        places = [_share(i, len(sums)) for i in range(len(sums))]
        label = f"{name}: {_C.format_bytes(max(sums))}"
        axes.step(places, sums, line, where="post", color="black", linewidth=1.6, label=label)
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


def _share(place: int, count: int) -> float:
    return 100 * place / max(count - 1, 1)
