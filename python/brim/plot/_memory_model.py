"""A memory model: what was measured, what it predicts, and what fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from brim import _C
from brim.plot._canvas import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    SKY,
    budget_on,
    bytes_on,
    bytes_up,
    draw,
    legend_below,
    tidy,
)
from brim.plot._sizes import seconds_on, size_axis

if TYPE_CHECKING:
    from brim.predict import MemoryModel

_POINTS = 200
_FURTHEST = 2.0**40  # a size beyond it means that memory hardly grows
# Of the map of two sizes: points in each direction, and the space around what it shows.
_SHADES = 100
_MARGIN, _ABOVE = 1.1, 2


def memory_model(
    model: MemoryModel,
    where: Any = None,
    *,
    budget: float | None = None,
    seconds: Mapping[tuple[float, ...], float] | None = None,
) -> Any:
    """Draw measured peaks against the size, the model through them, and what fits a budget.

    For sizes (n, length) the axes are these two, the predicted peak is a shade, and a line shows
    how many samples of each length fit the budget.

    Args:
        model: a fitted model.
        where: an Axes of matplotlib, a file to write, or None.
        budget: bytes, drawn as a line, with the largest size that fits.
        seconds: how long each size took; not drawn for sizes (n, length).

    Returns:
        The Figure.

    Raises:
        ValueError: if the model is not fitted.
    """
    if not model.fitted:
        raise ValueError("model must be fitted to be drawn")
    if model.kind == "batch":
        return draw(where, lambda axes: _paint_batches(axes, model, budget))
    return draw(where, lambda axes: _paint(axes, model, budget, seconds or {}))


def _paint(
    axes: Any,
    model: MemoryModel,
    budget: float | None,
    seconds: Mapping[tuple[float, ...], float],
) -> None:
    sizes, peaks = [each.n for each in model.samples], [each.peak for each in model.samples]
    furthest = max(sizes)
    chosen = 0
    if budget is not None:
        budget_on(axes, budget)
        peaks.append(budget)
        chosen = model.largest_size(budget)
        chosen = chosen if chosen < _FURTHEST else 0
        furthest = max(furthest, chosen)
    _lines(axes, model, min(sizes), max(sizes), furthest)
    _samples(axes, model, lambda sample: (sample.n, sample.peak))
    if chosen:
        axes.plot(
            chosen,
            model.safe_peak(chosen),
            "*",
            color=ORANGE,
            markersize=16,
            markeredgecolor="black",
            label=f"largest size that surely fits: {chosen}",
        )
    tidy(axes, "Memory against size")
    if size_axis(axes.xaxis, [*sizes, furthest], "size"):
        axes.set_yscale("log", base=2)
        axes.set_ylabel("peak memory")
        bytes_on(axes.yaxis)
    else:
        axes.set_xlim(0)
        bytes_up(axes, max(peaks), "peak memory")
    legend_below(axes, seconds_on(axes, [(size[0], each) for size, each in seconds.items()]), 3)


def _samples(
    axes: Any, model: MemoryModel, place: Callable[[_C.MemorySample], tuple[float, float]]
) -> None:
    """Points where something was measured, and crosses where memory ran out."""
    for failed, style, label in ((False, "o", "measured"), (True, "x", "out of memory above")):
        some = [place(sample) for sample in model.samples if sample.out_of_memory is failed]
        if some:
            look = {"color": RED, "markeredgewidth": 2} if failed else {"markeredgecolor": "white"}
            look = {"color": BLUE, "markersize": 8, **look}
            axes.plot(*zip(*some, strict=True), style, label=label, **look)


def _lines(axes: Any, model: MemoryModel, first: float, last: float, furthest: float) -> None:
    """The model, dashed beyond what was measured, and the most that a size can need."""
    line = _spread(first, max(furthest, first), _POINTS)
    inside = [x for x in line if x < last] + [last]
    beyond = [last] + [x for x in line if x > last]
    peaks, most = list(map(model.peak, line)), list(map(model.safe_peak, line))
    if any(high > 1.05 * low for low, high in zip(peaks, most, strict=True)):
        axes.fill_between(line, peaks, most, color=SKY, linewidth=0, label="may need at most")
    axes.plot(inside, list(map(model.peak, inside)), color=BLUE, label="foreseen")
    if furthest > 1.05 * last:
        dashed = list(map(model.peak, beyond))
        axes.plot(
            beyond, dashed, color=BLUE, linestyle="--", label="foreseen beyond what was measured"
        )


def _paint_batches(axes: Any, model: MemoryModel, budget: float | None) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    counts, lengths = zip(*((each.n, each.length) for each in model.samples), strict=True)
    across = _spread(min(lengths) / _MARGIN, max(lengths) * _MARGIN, _SHADES)
    most = [(x, 0 if budget is None else model.largest_batch(x, budget)) for x in across]
    most = [(x, n) for x, n in most if 1 <= n < _FURTHEST]
    highest = max([*counts, *(n for _, n in most)])  # the line is what the picture is about
    up = _spread(min(counts) / _MARGIN, _ABOVE * highest, _SHADES)
    peaks = [[model.peak(n, length) for length in across] for n in up]
    first, last = (math.log2(each) for each in (min(map(min, peaks)), max(map(max, peaks))))
    shades = axes.contourf(
        across,
        up,
        peaks,
        levels=[2.0**level for level in range(math.floor(first), math.ceil(last) + 1)],
        cmap=LinearSegmentedColormap.from_list("shades", ["white", GREY]),
        norm="log",
    )
    bar = axes.figure.colorbar(shades, ax=axes, label="predicted peak memory")
    bytes_on(bar.ax.yaxis)
    if budget is not None and most:
        label = f"most samples within {_C.format_bytes(round(budget))}"
        axes.plot(*zip(*most, strict=True), color=RED, linewidth=2, label=label)
    axes.axhline(max(counts), color="black", linestyle=":", label="not measured above")
    _samples(axes, model, lambda sample: (sample.length, sample.n))
    tidy(axes, "Memory against samples and length")
    axes.grid(visible=False)
    size_axis(axes.xaxis, lengths, "length")
    size_axis(axes.yaxis, [*counts, highest], "samples")
    axes.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    legend_below(axes, columns=2)


def _spread(first: float, last: float, count: int) -> list[float]:
    """Numbers spread evenly on a logarithmic scale."""
    return [first * (last / first) ** (i / (count - 1)) for i in range(count)]
