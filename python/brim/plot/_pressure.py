"""A step under pressure: what it holds, what it gave up, and where that was computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from brim import _C
from brim.plot._canvas import (
    BLUE,
    ORANGE,
    RED,
    SKY,
    budget_on,
    bytes_up,
    draw,
    legend_below,
    progress_across,
    tidy,
)

if TYPE_CHECKING:
    from brim.nn import PressureMoment, PressureRecord

_PALE = "#FFF3DC"  # below orange lines


def pressure(record: PressureRecord, where: Any = None) -> Any:
    """Draw what a step holds, and on top of it what it gave up and has not computed again yet.

    So the upper edge is about what the step would hold if there were room.

    Args:
        record: what `brim.nn.record_pressure` returned.
        where: an Axes of matplotlib, a file to write, or None.

    Returns:
        The Figure.
    """
    return draw(where, lambda axes: _paint(axes, record))


def _paint(axes: Any, record: PressureRecord) -> None:
    peak = max(moment.held for moment in record.moments)
    given_up = max(moment.given_up for moment in record.moments)
    most = max(moment.held + moment.given_up for moment in record.moments)
    moments = _thinned(record.moments)
    places = [place / max(len(moments) - 1, 1) for place in range(len(moments))]
    held = [moment.held for moment in moments]
    above = [moment.held + moment.given_up for moment in moments]
    axes.fill_between(places, held, step="post", color=SKY, linewidth=0, label="held")
    title = f"Peak {_C.format_bytes(peak)}: nothing was given up"
    if given_up:
        title = (
            f"Peak {_C.format_bytes(peak)} where {_C.format_bytes(most)} would be held: "
            f"up to {_C.format_bytes(given_up)} given up"
        )
        axes.fill_between(
            *(places, held, above),
            step="post",
            facecolor=_PALE,
            edgecolor=ORANGE,
            hatch="////",
            linewidth=0,
            label="given up, not yet computed again",
        )
        axes.step(places, above, where="post", color=ORANGE, linewidth=0.8)
    axes.step(places, held, where="post", color=BLUE, linewidth=0.8)
    if record.limit < 2 * most:
        budget_on(axes, record.limit, "limit")
        most = max(most, record.limit)
    dropped = [place for place, moment in enumerate(moments) if moment.dropped]
    again = [place for place, moment in enumerate(moments) if moment.again]
    for name, marker, color, which, heights in (
        ("dropped for an allocation", "v", RED, dropped, held),
        ("computed again", "^", BLUE, again, [0.015 * most] * len(moments)),
    ):
        if which:
            across, up = [places[i] for i in which], [heights[i] for i in which]
            axes.plot(across, up, marker, color=color, markersize=4, label=name)
    tidy(axes, title)
    progress_across(axes, "step")
    bytes_up(axes, most, "memory")
    legend_below(axes, columns=3)


def _thinned(moments: Sequence[PressureMoment], most: int = 1000) -> list[PressureMoment]:
    """Of each group of neighbours the one that holds the most, with what happened to all."""
    size = -(-len(moments) // most)
    groups = [moments[first : first + size] for first in range(0, len(moments), size)]
    return [
        max(group, key=lambda moment: moment.held)._replace(
            dropped=sum(moment.dropped for moment in group),
            again=sum(moment.again for moment in group),
        )
        for group in groups
    ]
