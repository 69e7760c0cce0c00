"""A memory model: what was measured, what it predicts, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brim.plot._canvas import BLUE, ORANGE, SKY, budget_on, draw, legend_below, tidy
from brim.plot._sizes import seconds_on, sizes_on

if TYPE_CHECKING:
    from brim.predict import MemoryModel

_POINTS = 200
_FURTHEST = 2.0**40  # a size beyond it means that memory hardly grows


def memory_model(
    model: MemoryModel,
    where: Any = None,
    *,
    budget: float | None = None,
    seconds: Mapping[tuple[float, ...], float] | None = None,
) -> Any:
    """Draw measured peaks against the size, the model through them, and what fits a budget.

    Sizes (n, length) are drawn as n × length, without the model's line: it has two arguments.

    Args:
        model: a fitted model.
        where: an Axes of matplotlib, a file to write, or None.
        budget: bytes, drawn as a line, with the largest size that fits.
        seconds: how long each size took.

    Returns:
        The Figure.

    Raises:
        ValueError: if the model is not fitted.
    """
    if not model.fitted:
        raise ValueError("model must be fitted to be drawn")
    return draw(where, lambda axes: _paint(axes, model, budget, seconds or {}))


def _paint(
    axes: Any,
    model: MemoryModel,
    budget: float | None,
    seconds: Mapping[tuple[float, ...], float],
) -> None:
    batch = model.kind == "batch"
    points = [(s.n * (s.length if batch else 1), s.peak, s.out_of_memory) for s in model.samples]
    sizes, peaks = [size for size, _, _ in points], [peak for _, peak, _ in points]
    furthest = max(sizes)
    chosen = 0
    if budget is not None:
        budget_on(axes, budget)
        peaks.append(budget)
        chosen = 0 if batch else model.largest_size(budget)
        chosen = chosen if chosen < _FURTHEST else 0
        furthest = max(furthest, chosen)
    if not batch:
        _lines(axes, model, min(sizes), max(sizes), furthest)
    for failed, style, label in ((False, "o", "measured"), (True, "x", "out of memory above")):
        some = [(size, peak) for size, peak, over in points if over is failed]
        if some:
            color = ORANGE if failed else BLUE
            axes.plot(*zip(*some, strict=True), style, color=color, markersize=7, label=label)
    if chosen:
        axes.plot(
            chosen,
            model.safe_peak(chosen),
            "*",
            color=ORANGE,
            markersize=16,
            markeredgecolor="black",
            label=f"largest size that fits: {chosen}",
        )
    times = [(shape[0] * (shape[1] if batch else 1), each) for shape, each in seconds.items()]
    tidy(axes, "Memory against size")
    sizes_on(axes, [*sizes, furthest], "samples × length" if batch else "size", peaks)
    legend_below(axes, seconds_on(axes, times))


def _lines(axes: Any, model: MemoryModel, first: float, last: float, furthest: float) -> None:
    """The model, dashed beyond what was measured, and its margin."""
    ratio = max(furthest / first, 1.0)
    line = [first * ratio ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    inside = [x for x in line if x < last] + [last]
    beyond = [last] + [x for x in line if x > last]
    peaks, most = list(map(model.peak, line)), list(map(model.safe_peak, line))
    if any(high > 1.05 * low for low, high in zip(peaks, most, strict=True)):
        axes.fill_between(line, peaks, most, color=SKY, linewidth=0, label="margin")
    axes.plot(inside, list(map(model.peak, inside)), color=BLUE, label="model")
    if furthest > 1.05 * last:
        dashed = list(map(model.peak, beyond))
        axes.plot(beyond, dashed, color=BLUE, linestyle="--", label="extrapolated")
