"""Where a picture goes, and what all of them have in common: colours and axes in bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from brim import _C
from brim._whole_file import write_whole

# Okabe and Ito's colours, which differ for colour-blind people too. In grey they are dark, middle
# and light; where two areas meet, they differ by a hatch as well.
BLUE, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#A6D5F0", "#7F7F7F"
PALE = "#C3CDD6"  # of what brim is compared with
RED = "#B03A00"  # of limits

_MOST_TICKS = 6
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def check_available() -> None:
    """Check that matplotlib can be imported.

    Raises:
        ImportError: if it cannot; says what to install.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'brim[plot]'") from None


def draw(where: Any, paint: Callable[[Any], None], size: tuple[float, float] = (7.0, 4.2)) -> Any:
    """Paint into an Axes, or into a new Figure, which is also written if `where` is a file.

    Args:
        where: an Axes, a path, or None.
        paint: called with the Axes.
        size: of a new Figure, in inches.

    Returns:
        The Figure.
    """
    check_available()
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    if isinstance(where, Axes):
        paint(where)
        return where.figure
    figure = Figure(figsize=size, layout="constrained")
    paint(figure.subplots())
    if where is not None:
        save(figure, where, 150)
    return figure


def save(figure: Any, where: Any, dpi: int) -> None:
    """Write a picture into a file, or into whatever else matplotlib can write to."""
    if not isinstance(where, (str, PathLike)):
        figure.savefig(where, dpi=dpi)
        return
    path = Path(where)
    kind = path.suffix[1:]  # from Python 3.14 on, that of "name." is a dot
    if not kind:
        kind = figure.canvas.get_default_filetype()
        path = path.with_name(f"{path.name.rstrip('.')}.{kind}")
    write_whole(path, lambda out: figure.savefig(out, dpi=dpi, format=kind))


def bytes_on(axis: Any) -> None:
    """Label an axis that holds bytes with round numbers of the unit that suits what it shows."""
    from matplotlib.ticker import Locator

    if axis.get_scale() == "log":
        axis.set_major_formatter(lambda value, _: _in_unit(value, _unit_of(value)))
        return

    class Ticks(Locator):  # type: ignore[misc]
        def __call__(self) -> list[int]:
            return list(ticks())

    def ticks() -> dict[int, str]:
        return dict(byte_ticks(*sorted(axis.get_view_interval())))

    axis.set_major_locator(Ticks())
    axis.set_major_formatter(lambda value, _: ticks().get(value, ""))


def bytes_up(axes: Any, most: float, name: str) -> None:
    """An axis upwards in bytes, from 0 to a little more than `most`."""
    axes.set_ylabel(name)
    axes.set_ylim(0, 1.1 * most)
    bytes_on(axes.yaxis)


class Series(NamedTuple):
    """Values in bytes, one for each place or row."""

    name: str
    color: str
    values: Sequence[int]


def bars_across(axes: Any, names: Sequence[str], series: Sequence[Series]) -> None:
    """A row for each name, the first at the top: a bar with its bytes for each of the series."""
    height = 0.84 / len(series)
    for k, (label, color, values) in enumerate(series):
        places = [i + (k - (len(series) - 1) / 2) * height for i in range(len(names))]
        bars = axes.barh(places, values, height, color=color, edgecolor="white", label=label)
        axes.bar_label(bars, map(_C.format_bytes, values), padding=3, fontsize="small")
    axes.set_xlim(0, 1.2 * max([1, *(max(each.values, default=1) for each in series)]))
    rows_down(axes, names)


def rows_down(axes: Any, names: Sequence[str], above: float = 0.5) -> None:
    """Names of rows from the top down; no axis across, as each bar tells its bytes."""
    axes.grid(visible=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -above)


def progress_across(axes: Any, name: str, calls: int = 1) -> None:
    """An axis from 0 to 1 for one call; with more, up to their number, with lines between them."""
    from matplotlib.ticker import PercentFormatter

    axes.set_xlim(0, calls)
    which = "the" if calls == 1 else "each"
    axes.set_xlabel(f"progress of {which} {name}, in allocations and releases")
    if calls == 1:
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        return
    for call in range(1, calls):
        axes.axvline(call, color="black", linewidth=1)
    middles = [call + 0.5 for call in range(calls)]
    axes.set_xticks(middles, [f"call {call + 1}" for call in range(calls)])


def byte_ticks(low: float, high: float) -> list[tuple[int, str]]:
    """Whole numbers of a unit from `low` to `high` bytes, each with its text.

    Example:
        >>> byte_ticks(0, 473 * 2**10)[:3]
        [(0, '0'), (102400, '100 KiB'), (204800, '200 KiB')]
        >>> [text for _, text in byte_ticks(0, 1.9 * 2**30)]
        ['0', '500 MiB', '1000 MiB', '1500 MiB']
    """
    unit = _unit_of((high - low) / 4)  # one or two ticks would be too few
    step = next(
        step * 10**power * unit[1]
        for power in itertools.count()
        for step in (1, 2, 5)
        if high - low < _MOST_TICKS * step * 10**power * unit[1]
    )
    values = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    return [(value, _in_unit(value, unit)) for value in values]


def _unit_of(most: float) -> tuple[str, int]:
    return next((name, unit) for name, unit in _UNITS if most >= unit or unit == 1)


def _in_unit(value: float, unit: tuple[str, int]) -> str:
    return f"{value / unit[1]:g} {unit[0]}" if value else "0"


def shortened(name: str, most: int) -> str:
    """The end of a name that is longer than `most` characters."""
    return name if len(name) <= most else f"…{name[1 - most :].lstrip('. ')}"


def budget_on(axes: Any, budget: float, name: str = "budget") -> None:
    """A dashed line at a limit."""
    label = f"{name} {_C.format_bytes(round(budget))}"
    axes.axhline(budget, color=RED, linestyle="--", linewidth=1.5, label=label)


def legend_below(axes: Any, more: Sequence[Any] = (), columns: int = 4) -> None:
    """A legend below the picture, where it hides nothing."""
    from matplotlib.transforms import ScaledTranslation

    handles = [*axes.get_legend_handles_labels()[0], *more]
    texts = [axes.get_xlabel(), max((t.get_text() for t in axes.get_xticklabels()), key=len)]
    lines = sum(1 + text.count("\n") for text in texts if text) if axes.xaxis.get_visible() else 0
    inches = 0.1 + 0.2 * lines
    below = ScaledTranslation(0, -inches, axes.get_figure().dpi_scale_trans)
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=axes.transAxes + below,
        ncols=min(len(handles), columns),
        frameon=False,
        fontsize="small",
    )


def tidy(axes: Any, title: str) -> None:
    """A title, a faint grid, and no frame at the top and on the right."""
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
