"""An audit: what each layer keeps for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim import _C
from brim.nn._audit_text import figures, folded
from brim.plot._canvas import (
    BLUE,
    ORANGE,
    SKY,
    Series,
    bars_across,
    draw,
    legend_below,
    shortened,
    tidy,
)

if TYPE_CHECKING:
    from brim.nn.audit import Audit

_MOST_ROWS = 14
_LONGEST_NAME = 28
COLUMNS = (
    ("torch.nn", "#333333"),
    ("brim", BLUE),
    ('brim, recompute="cheap"', ORANGE),
    ("the least", SKY),
)


def audit(found: Audit, where: Any = None) -> Any:
    """Draw the bytes that each layer keeps: with torch.nn, with brim, "cheap", and at the least.

    What keeps most is at the top. Equal layers of repeated blocks are one row; the smallest rows
    are drawn as one, "others".

    Args:
        found: what `brim.audit` returned.
        where: an Axes of matplotlib, a file to write, or None.

    Returns:
        The Figure.
    """
    rows = _rows(found)
    return draw(where, lambda axes: _paint(axes, rows, found), (7.0, 1.2 + 0.6 * len(rows)))


def _rows(found: Audit) -> list[tuple[str, tuple[int, ...]]]:
    """Of the layers that keep something, the one that keeps most first."""
    layers = sorted(folded(found.layers), key=lambda layer: -max(figures(layer)))
    rows: list[tuple[str, tuple[int, ...]]] = [
        (f"{shortened(each.name, _LONGEST_NAME)} ({each.type})", figures(each))
        for each in layers[:_MOST_ROWS]
    ]
    others = [figures(each) for each in layers[_MOST_ROWS:]]
    if others:
        sums = tuple(map(sum, zip(*others, strict=True)))
        rows.append((f"{len(others)} others", sums))
    return rows


def _paint(axes: Any, rows: list[tuple[str, tuple[int, ...]]], found: Audit) -> None:
    totals = (found.torch_nn, found.brim, found.cheap, found.least)
    series = [
        Series(f"{name}: {_C.format_bytes(total)}", color, [values[k] for _, values in rows])
        for k, ((name, color), total) in enumerate(zip(COLUMNS, totals, strict=True))
    ]
    tidy(axes, "Kept for backward")
    bars_across(axes, [name for name, _ in rows], series)
    legend_below(axes, columns=2)
