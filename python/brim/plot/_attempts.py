"""A record: the sizes that an adaptive call tried, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from brim.plot._canvas import BLUE, ORANGE, budget_on, bytes_on, draw, legend_below, tidy
from brim.plot._sizes import seconds_on

if TYPE_CHECKING:
    from brim._C import Attempt

_MOST_NAMED = 12  # more sizes do not fit below an axis


def attempts(tried: Sequence[Attempt], where: Any = None, *, budget: int | None = None) -> Any:
    """Draw the memory and the time of each size that an adaptive call tried, in order.

    What failed is drawn with the memory that it held and asked for, which is less than it needs.

    Args:
        tried: what `record` returned.
        where: an Axes of matplotlib, a file to write, or None.
        budget: bytes, drawn as a line.

    Returns:
        The Figure.

    Raises:
        ValueError: if there are no attempts.
    """
    if not tried:
        raise ValueError("there are no attempts to draw")
    return draw(where, lambda axes: _paint(axes, tried, budget))


def _paint(axes: Any, tried: Sequence[Attempt], budget: int | None) -> None:
    needs = [each.held + (each.peak or 0) + (each.requested or 0) for each in tried]
    for fitted, color, hatch, label in (
        (True, BLUE, "", "fitted"),
        (False, ORANGE, "////", "did not fit: held and asked for"),
    ):
        places = [i for i, each in enumerate(tried) if each.fitted is fitted]
        if places:
            heights = [needs[i] for i in places]
            axes.bar(places, heights, 0.6, color=color, hatch=hatch, edgecolor="white", label=label)
    if budget is not None:
        budget_on(axes, budget)
    most = max(budget or 0, *needs, 1)
    tidy(axes, f"Sizes that were tried, of which {sum(a.fitted for a in tried)} fitted")
    axes.set_xlim(-0.7, len(tried) - 0.3)
    axes.set_xlabel("size" if len(tried) <= _MOST_NAMED else "attempt")
    if len(tried) <= _MOST_NAMED:
        axes.set_xticks(range(len(tried)), [str(each.size) for each in tried])
    axes.set_ylabel("memory")
    axes.set_ylim(0, 1.15 * most)
    bytes_on(axes.yaxis, most)
    legend_below(axes, seconds_on(axes, [(i, each.seconds) for i, each in enumerate(tried)]))
