"""A record: the sizes that an adaptive call tried, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from brim.plot._canvas import BLUE, ORANGE, budget_on, bytes_up, draw, legend_below, tidy
from brim.plot._sizes import duration, size_text

if TYPE_CHECKING:
    from brim._C import Attempt

_MOST_NAMED = 12  # more sizes do not fit below an axis


class Call(NamedTuple):
    """A call with a size: what it held at most, and how long it took, if it did not fail."""

    group: str  # those of a group look alike
    color: str
    size: int
    bytes: int
    seconds: float | None


def attempts(tried: Sequence[Attempt], where: Any = None, *, budget: int | None = None) -> Any:
    """Draw the memory and the time of each size that an adaptive call tried, in order.

    What failed is drawn with the memory that it held and asked for, which is less than it needs.
    Sizes and times stand below the bars if there are no more than twelve.

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
    looks = {True: ("fitted", BLUE), False: ("did not fit: held and asked for", ORANGE)}
    calls = [
        Call(
            *looks[each.fitted],
            each.size,
            each.held + (each.peak or 0) + (each.requested or 0),
            each.seconds if each.fitted else None,
        )
        for each in tried
    ]
    tidy(axes, f"Sizes that were tried, of which {sum(a.fitted for a in tried)} fitted")
    paint_calls(axes, calls, budget, "size")


def paint_calls(axes: Any, calls: Sequence[Call], budget: int | None, name: str) -> None:
    """A bar for the memory of each call; below it the size, called `name`, and the time."""
    for group, color in dict.fromkeys(each[:2] for each in calls):
        places = [i for i, each in enumerate(calls) if each.group == group]
        failed = calls[places[0]].seconds is None
        look = (
            {"color": "white", "edgecolor": color, "hatch": "////"} if failed else {"color": color}
        )
        axes.bar(places, [calls[i].bytes for i in places], 0.6, label=group, **look)
    if budget is not None:
        budget_on(axes, budget)
    axes.set_xlim(-0.7, len(calls) - 0.3)
    if len(calls) <= _MOST_NAMED:
        axes.set_xticks(range(len(calls)), map(_text, calls))
        axes.set_xlabel(f"{name}, and the time of the call")
    else:
        axes.set_xlabel("attempt")
    bytes_up(axes, max(budget or 0, 1, *(each.bytes for each in calls)), "memory")
    legend_below(axes, columns=3)


def _text(call: Call) -> str:
    return f"{size_text(call.size)}\n{'failed' if call.seconds is None else duration(call.seconds)}"
