"""A plan of batches: how full they are, and how much of them is padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brim.plot._canvas import BLUE, ORANGE, draw, legend_below, tidy
from brim.plot._sizes import size_text

if TYPE_CHECKING:
    from brim._C import PlanReport


def plan(report: PlanReport, where: Any = None) -> Any:
    """Draw histograms of how full batches are, and of how much of them is padding.

    Args:
        report: what `report()` of a sampler returned.
        where: an Axes of matplotlib, a file to write, or None.

    Returns:
        The Figure.
    """
    return draw(where, lambda axes: _paint(axes, report))


def _paint(axes: Any, report: PlanReport) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

    fill, padding = report.fill_histogram, report.padding_histogram
    edges = [5 * i for i in range(len(fill) + 1)]
    axes.stairs(
        fill,
        edges,
        fill=True,
        color=BLUE,
        alpha=0.85,
        label=f"filled: {report.fill:.1%} in all",
    )
    axes.stairs(
        padding,
        edges,
        color=ORANGE,
        linewidth=2,
        hatch="////",
        label=f"padding: {report.padding:.1%} in all",
    )
    tidy(axes, f"{report.batches} batches of {report.batched} samples")
    over = " (last bin: over 100 %)" if fill[-1] else ""
    axes.set_xlabel(f"share of a batch that is filled, or padding{over}")
    axes.set_ylabel("batches")
    axes.set_xlim(0, 105 if fill[-1] else 100)
    axes.xaxis.set_major_formatter(PercentFormatter(symbol=" %"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    legend_below(axes)


def paint_shares(axes: Any, shares: Mapping[str, tuple[float, float]]) -> None:
    """For each plan, of its budget in %: samples, padding, and what stays empty.

    Args:
        axes: what to paint on.
        shares: by name, how full the batches are, and how much of that is padding, from 0 to 1.
    """
    full = [100 * fill for fill, _ in shares.values()]
    samples = [100 * fill * (1 - padding) for fill, padding in shares.values()]
    padding = [a - b for a, b in zip(full, samples, strict=True)]
    look = {"color": "white", "hatch": "////", "edgecolor": ORANGE}
    inside = axes.bar(list(shares), samples, 0.6, color=BLUE, label="samples")
    axes.bar(list(shares), padding, 0.6, samples, label="padding", **look)
    axes.bar_label(inside, fmt="%.1f %%", label_type="center", color="white", fontweight="bold")
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of the budget")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    legend_below(axes)
