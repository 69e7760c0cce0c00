"""Draws the pictures of measured results into a folder; the build calls this (see conf.py).

python docs/pictures/measured.py FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from brim.plot._canvas import BLUE, GREY, ORANGE, RED, SKY, tidy

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import report

STYLES = [(BLUE, "o"), (ORANGE, "s"), (SKY, "D"), (GREY, "^"), (BLUE, "X"), (ORANGE, "v")]
STYLES += [(SKY, "P"), (GREY, "<"), (BLUE, ">")]


def value(cell: str, part: int) -> float | None:
    """The number in a part of a cell: the first of "1.1 to 1.2", or none."""
    parts = cell.split(" / ")
    found = re.search(r"\d+(\.\d+)?", parts[part]) if part < len(parts) else None
    return float(found[0]) if found else None


def paint(axes: Any, table: report.Table, panel: Any) -> None:
    """A line per row of the table, a point per column, a little below the one before."""
    title, columns, part, baseline = panel
    rows = [row["cells"] for row in table["rows"]]
    for i, column in enumerate(columns):
        colour, marker = STYLES[i % len(STYLES)]
        below = 0.14 * (i - (len(columns) - 1) / 2)
        found = [(value(cells.get(column, ""), part), -y - below) for y, cells in enumerate(rows)]
        points = [point for point in found if point[0] is not None]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, marker, color=colour, markeredgecolor="black", label=column)
    if baseline is not None:
        axes.axvline(baseline, color=RED, linestyle="--", linewidth=1.5)
    else:
        axes.set_xlim(0, 1.05 * axes.dataLim.xmax)
    axes.set_yticks([-y for y in range(len(rows))], [next(iter(cells.values())) for cells in rows])
    tidy(axes, title)


def draw(folder: Path) -> None:
    """Draw all of them."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for file, table in report.drawn(report.read(report.PAGES)):
        panels = table["panels"]
        figure = Figure(figsize=(9, 1.6 + 0.34 * len(table["rows"])), layout="constrained")
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        quantities: dict[str, Any] = {}
        for axes, panel in zip(all_axes, panels, strict=True):
            quantity = panel[0].partition(":")[0]
            if quantity in quantities:
                axes.sharex(quantities[quantity])
            quantities[quantity] = axes
            paint(axes, table, panel)
        handles, labels = all_axes[0].get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(folder / file)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
