"""An audit: what each layer keeps for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim import _C
from brim.nn._audit_text import figures, folded
from brim.plot._canvas import BLUE, GREY, ORANGE, SKY, bytes_on, draw, legend_below, shortened, tidy

if TYPE_CHECKING:
    from brim.nn.audit import Audit

_MOST_ROWS = 14
_LONGEST_NAME = 28
COLUMNS = (
    ("torch.nn", "#333333", ""),
    ("brim", BLUE, ""),
    ('brim, recompute="cheap"', ORANGE, ""),
    ("the least", SKY, "////"),
)


def audit(found: Audit, where: Any = None) -> Any:
    """Draw the bytes that each layer keeps: with torch.nn, with brim, "cheap", and at the least.

    Equal layers of repeated blocks are one row; the smallest rows are drawn as one, "others".

    Args:
        found: what `brim.audit` returned.
        where: an Axes of matplotlib, a file to write, or None.

    Returns:
        The Figure.
    """
    rows = _rows(found)
    return draw(where, lambda axes: _paint(axes, rows, found), (8.0, 1.8 + 0.46 * len(rows)))


def _rows(found: Audit) -> list[tuple[str, tuple[int, ...]]]:
    layers = folded(found.layers)
    largest = sorted(layers, key=lambda layer: -max(figures(layer)))[:_MOST_ROWS]
    rows: list[tuple[str, tuple[int, ...]]] = [
        (f"{shortened(each.name, _LONGEST_NAME)} ({each.type})", figures(each))
        for each in layers
        if each in largest
    ]
    others = [figures(each) for each in layers if each not in largest]
    if others:
        sums = tuple(map(sum, zip(*others, strict=True)))
        rows.append((f"{len(others)} others", sums))
    return rows


def _paint(axes: Any, rows: list[tuple[str, tuple[int, ...]]], found: Audit) -> None:
    height = 0.8 / len(COLUMNS)
    totals = (found.torch_nn, found.brim, found.cheap, found.least)
    for k, (name, color, hatch) in enumerate(COLUMNS):
        axes.barh(
            [i + (k - 1.5) * height for i in range(len(rows))],
            [values[k] for _, values in rows],
            height=height,
            color=color,
            hatch=hatch,
            edgecolor="white" if not hatch else GREY,
            linewidth=0.3,
            label=f"{name}: {_C.format_bytes(totals[k])}",
        )
    tidy(axes, "Kept for backward")
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    bytes_on(axes.xaxis, max((max(values) for _, values in rows), default=1))
    legend_below(axes, columns=2)
