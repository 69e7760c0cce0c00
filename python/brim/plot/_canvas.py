"""Where a picture goes, and what all of them have in common: colours and axes in bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from brim import _C

# Okabe and Ito's colours, which differ for colour-blind people too. In grey they are dark, middle
# and light; where two areas meet, they differ by a hatch as well.
BLUE, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#A6D5F0", "#7F7F7F"
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
        figure.savefig(where, dpi=150)
    return figure


def bytes_on(axis: Any, most: float, *, logarithmic: bool = False) -> None:
    """Label an axis that holds bytes with round numbers of the unit that suits them."""
    from matplotlib.ticker import MaxNLocator

    if logarithmic:
        axis.axes.set_yscale("log", base=2)
        axis.set_major_formatter(lambda value, _: _in_unit(value, _unit_of(value)))
        return
    unit = _unit_of(most)

    class Locator(MaxNLocator):  # type: ignore[misc]
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return super().tick_values(vmin / unit[1], vmax / unit[1]) * unit[1]

    axis.set_major_locator(Locator(nbins=_MOST_TICKS, steps=[1, 2, 4, 5, 8, 10]))
    axis.set_major_formatter(lambda value, _: _in_unit(value, unit))


def byte_ticks(most: float) -> list[tuple[int, str]]:
    """Whole numbers of a unit from 0 to `most` bytes, each with its text.

    Example:
        >>> byte_ticks(473 * 2**10)[:3]
        [(0, '0'), (102400, '100 KiB'), (204800, '200 KiB')]
        >>> [text for _, text in byte_ticks(1.9 * 2**30)]
        ['0', '500 MiB', '1000 MiB', '1500 MiB']
    """
    name, unit = _unit_of(most / 4)  # one or two ticks would be too few
    step = next(
        step * 10**power
        for power in itertools.count()
        for step in (1, 2, 5)
        if most < _MOST_TICKS * step * 10**power * unit
    )
    values = range(0, int(most // unit) + 1, step)
    return [(value * unit, f"{value} {name}" if value else "0") for value in values]


def _unit_of(most: float) -> tuple[str, int]:
    return next((name, unit) for name, unit in _UNITS if most >= unit or unit == 1)


def _in_unit(value: float, unit: tuple[str, int]) -> str:
    return f"{value / unit[1]:g} {unit[0]}"


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
    inches = 0.5 if axes.get_xlabel() else 0.3
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
