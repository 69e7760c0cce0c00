"""Charts as text for a page: stacked areas, steps and bars, with a text for each place."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from brim import _C
from brim.plot._canvas import RED, Series, byte_ticks, shortened

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 340, 90, 20, 12, 46

_DASHED = "height:0;width:1.5em;vertical-align:middle;border-top:2px dashed"


class Axes(NamedTuple):
    """What the axes of a chart mean: their names, and marks of the one across."""

    across: str
    up: str
    marks: Sequence[tuple[float, str]]  # a place of the chart, and what it is called
    borders: Sequence[float] = ()  # places between calls


def areas(
    series: Sequence[Series],
    tips: Sequence[str],
    axes: Axes,
    limit: int | None = None,
    lines: Sequence[Series] = (),
) -> str:
    """What is held, one kind on top of the other, and lines over it; `tips[i]` is over place i."""
    sums = [0] * len(tips)
    shapes = []
    for each in series:
        below, sums = sums, [a + b for a, b in zip(sums, each.values, strict=True)]
        shapes.append((each.color, below, sums))
    most = max([*sums, limit or 0, 1, *(value for each in lines for value in each.values)])
    across = [_x(i, len(tips)) for i in range(len(tips) + 1)]
    paths = [
        f'<path fill="{color}" d="M{_steps(across, over, most)} '
        f'L{_steps(across, under, most, backwards=True)} Z"/>'
        for color, under, over in shapes
    ]
    paths += _lines(lines, across, most)
    line = ""
    if limit is not None:
        y = _y(limit, most)
        line = f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
    return _framed(most, "".join(paths) + line, axes, across, tips)


def steps(series: Sequence[Series], tips: Sequence[str], axes: Axes) -> str:
    """What each of several runs has kept so far, as lines."""
    most = max(max(each.values, default=1) for each in series)
    across = [_x(i, len(tips)) for i in range(len(tips) + 1)]
    return _framed(max(most, 1), "".join(_lines(series, across, most)), axes, across, tips)


def bars(names: Sequence[str], series: Sequence[Series], tips: Sequence[str]) -> str:
    """A row for each name, with a bar and a figure for each of the series."""
    most = max([1, *(max(each.values, default=1) for each in series)])
    rows = []
    for i, (name, tip) in enumerate(zip(names, tips, strict=True)):
        cells = "".join(
            f'<div><i style="background:{each.color};width:{80 * each.values[i] / most:.1f}%"></i>'
            f"{_C.format_bytes(each.values[i])}</div>"
            for each in series
        )
        rows.append(f"<tr {_tip(tip)}><th>{escape(shortened(name, 46))}</th><td>{cells}</td></tr>")
    return f'<table class="bars">{"".join(rows)}</table>'


def whole(parts: Sequence[Series], limit: int | None = None) -> str:
    """One bar of several parts, each with one value, beside what they may be in all."""
    most = max(limit or 0, 1, sum(sum(each.values) for each in parts))
    shares = "".join(
        f'<i style="background:{each.color};width:{100 * sum(each.values) / most:.1f}%" '
        f"{_tip(each.name)}></i>"
        for each in parts
    )
    mark = "" if limit is None else f'<b style="left:{100 * limit / most:.1f}%"></b>'
    return f'<div class="whole">{shares}{mark}</div>'


def legend(series: Sequence[Series], lines: Sequence[Series] = (), limit: str = "") -> str:
    """The names beside their colours, for areas, lines over them and a limit."""
    entries = [(f"background:{each.color}", each.name) for each in series]
    entries += [(f"{_DASHED} {each.color}", each.name) for each in lines]
    entries += [(f"{_DASHED} {RED}", limit)] if limit else []
    spans = "".join(f'<span><i style="{look}"></i>{escape(name)}</span>' for look, name in entries)
    return f'<p class="legend">{spans}</p>'


def _x(place: float, count: int) -> float:
    return round(_LEFT + place / max(count, 1) * (_WIDTH - _LEFT - _RIGHT), 2)


def _y(value: float, most: int) -> float:
    return round(_HEIGHT - _BOTTOM - value / most * (_HEIGHT - _TOP - _BOTTOM), 2)


def _steps(
    across: Sequence[float], values: Sequence[int], most: int, *, backwards: bool = False
) -> str:
    points = []
    for i, value in enumerate(values):
        points += [(across[i], _y(value, most)), (across[i + 1], _y(value, most))]
    if backwards:
        points.reverse()
    return " ".join(f"{x},{y}" for x, y in points)


def _lines(series: Sequence[Series], across: Sequence[float], most: int) -> list[str]:
    return [
        f'<path class="line" stroke="{each.color}" d="M{_steps(across, each.values, most)}"/>'
        for each in series
    ]


def _tip(text: str) -> str:
    return f'data-tip="{escape(text, quote=True)}"'


def _framed(
    most: int, inside: str, axes: Axes, across: Sequence[float], tips: Sequence[str]
) -> str:
    """Axes around a chart, and a place to hover over for each tip."""
    left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    places = [
        f'<rect class="hover" x="{first}" y="{_TOP}" width="{last - first:.2f}" '
        f'height="{bottom - _TOP}" {_tip(tip)}/>'
        for first, last, tip in zip(across, across[1:], tips, strict=False)
    ]
    lines = [
        f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>'
        f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(text)}</text>'
        for value, text in byte_ticks(0, most)
        for y in (_y(value, most),)
    ]
    marks = [
        f'<line class="tick" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>'
        f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>'
        for place, text in axes.marks
        for x in (_x(place, len(tips)),)
    ]
    names = (
        f'<text class="axis" x="{(left + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f"{escape(axes.across)}</text>"
        f'<text class="axis" transform="translate(14 {bottom / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(axes.up)}</text>'
    )
    borders = [
        f'<line class="border" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>'
        for x in (_x(place, len(tips)) for place in axes.borders)
    ]
    drawn = "".join([*lines, *marks, names, inside, *borders, *places])
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{drawn}</svg>'
