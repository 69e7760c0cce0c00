"""Pages for the browser, each one file that needs no network: an estimate, and an audit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

from brim import _C
from brim.nn._audit_text import figures, folded
from brim.plot._audit import COLUMNS
from brim.plot._canvas import BLUE, shortened
from brim.plot._estimate import KINDS, stacked
from brim.plot._svg import Axes, Series, areas, bars, legend, steps

if TYPE_CHECKING:
    from brim._estimate import Estimate
    from brim.nn.audit import Audit, LayerAudit

_MOMENTS = 400  # a place to hover over is then more than two pixels wide
_MOST_BARS = 40
_MOST_MARKS = 6
_BESIDE = "#000000"

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 1.6em 0 .4em; }
svg { width: 100%; height: auto; font-size: 12px; overflow: visible; }
svg .grid { stroke: #ddd; } svg .tick { stroke: #666; } svg .axis { fill: #444; }
svg .limit { stroke: #b03a00; stroke-width: 1.5; stroke-dasharray: 6 4; }
svg .line { fill: none; stroke-width: 2.5; } svg .line:last-of-type { stroke-dasharray: 5 4; }
svg .hover { fill: transparent; }
svg .hover:hover { fill: rgba(0, 0, 0, .1); } .bars tr:hover { background: #eee; }
.bars { width: 100%; font-size: 12px; } .bars td { width: 65%; }
.bars th { font-weight: normal; text-align: right; padding-right: .6em; }
.bars i { display: inline-block; min-width: 1px; height: 1em; margin-right: .5em;
  vertical-align: middle; }
.legend span { margin-right: 1.2em; white-space: nowrap; }
.legend i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; }
#tip { position: fixed; display: none; white-space: pre; pointer-events: none; padding: .5em .7em;
       color: #fff; background: rgba(20, 20, 20, .92); border-radius: 4px; font-size: 12px; }
"""

_SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("mousemove", event => {
  const found = event.target.closest("[data-tip]");
  tip.style.display = found ? "block" : "none";
  if (!found) return;
  tip.textContent = found.dataset.tip;
  const right = event.clientX + 16 + tip.offsetWidth < innerWidth;
  tip.style.left = (right ? event.clientX + 16 : event.clientX - 16 - tip.offsetWidth) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
});
"""


def estimate_page(found: Estimate, beside: Mapping[str, Estimate]) -> str:
    """What is held while a call runs, and by whom at the peak; others are lines beside it."""
    moments = found._timeline(_MOMENTS)
    series = stacked(moments)
    tips = [_moment_tip(found, moment) for moment in moments]
    near = found.capacity is not None and found.capacity < 2 * (found.held_before + found.peak)
    capacity = f"capacity {_C.format_bytes(found.capacity or 0)} (dashed)" if near else ""
    held = _by_place(found)
    assumed = "".join(f"<li>{escape(text)}</li>" for text in found.assumptions)
    lines = [_line(name, each, len(tips)) for name, each in beside.items()]
    heads = [
        f"{name}: peak {_C.format_bytes(each.peak)} above the {_C.format_bytes(each.held_before)} "
        "held before"
        for name, each in beside.items()
    ]
    limit = found.capacity if near else None
    return _page(
        "Memory of one call",
        [*found._head(), *heads],
        [
            ("Held while the call runs", legend([*series, *lines], capacity)),
            ("", areas(series, tips, _of_call(len(tips)), limit, lines)),
            ("Held at the peak, by place in the code", _place_bars(held)),
            ("Assumed", f"<ul>{assumed}</ul>") if assumed else ("", ""),
        ],
    )


def _line(name: str, other: Estimate, places: int) -> Series:
    """All that another call holds, at as many places of it as the chart has."""
    sums = [sum(moment.held) for moment in other._timeline(_MOMENTS)] or [0]
    values = [sums[place * len(sums) // places] for place in range(places)]
    return Series(f"{name}: {_C.format_bytes(max(sums))}", _BESIDE, values)


def audit_page(found: Audit, places: Mapping[str, str]) -> str:
    """What a model keeps as its forward runs, and by which layer."""
    rows = [each for each in found.layers if any(figures(each))]
    lines = [str(part) for part in found._parts()[1:]]
    if not rows:
        return _page("Kept for backward", [*lines, "The model keeps nothing for backward."], [])
    columns = zip(*map(figures, rows), strict=True)
    sums = [
        Series(name, color, list(accumulate(column)))
        for (name, color, _), column in zip(COLUMNS, columns, strict=True)
    ]
    blocks = sorted(folded(found.layers), key=lambda each: -max(figures(each)))[:_MOST_BARS]
    names = [f"{each.name} ({each.type})" for each in blocks]
    groups = [
        Series(name, color, [figures(each)[k] for each in blocks])
        for k, (name, color, _) in enumerate(COLUMNS)
    ]
    tips = [_layer_tip(each, places, sums, i) for i, each in enumerate(rows)]
    return _page(
        "Kept for backward",
        lines,
        [
            ("Kept so far, as the forward runs", legend(sums)),
            ("", steps(sums, tips, _of_layers(rows))),
            ("Kept by layer", legend(groups)),
            ("", bars(names, groups, [_layer_tip(each, places) for each in blocks])),
        ],
    )


def _of_call(moments: int) -> Axes:
    marks = [(share / 100 * moments, f"{share} %") for share in (0, 25, 50, 75, 100)]
    return Axes("allocations and releases of the call, in order", "held", marks)


def _of_layers(rows: Sequence[LayerAudit]) -> Axes:
    """Marks a few layers: their names take space."""
    count = min(len(rows), _MOST_MARKS)
    chosen = [i * len(rows) // count for i in range(count)]
    marks = [(i + 0.5, shortened(rows[i].name, 20)) for i in chosen]
    return Axes("layers, in the order of the forward", "kept so far", marks)


def _page(title: str, lines: Sequence[str], sections: Sequence[tuple[str, str]]) -> str:
    head = "<br>".join(map(escape, lines))
    body = "".join(
        (f"<h2>{escape(name)}</h2>" if name else "") + content for name, content in sections
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{head}</p>{body}"
        f'<div id="tip"></div><script>{_SCRIPT}</script></body></html>\n'
    )


def _moment_tip(found: Estimate, moment: _C.HeldMoment) -> str:
    size = _C.format_bytes
    kinds = [
        f"  {name}: {size(held)}" for name, held in zip(KINDS, moment.held, strict=True) if held
    ]
    place = found._place(moment.allocation)
    lines = [f"held {size(sum(moment.held))}, reserved {size(moment.reserved)}", *kinds]
    return "\n".join([*lines, f"last allocated at {place}"] if place else lines)


def _by_place(found: Estimate) -> list[tuple[str, int, dict[str, int]]]:
    """What is held at the peak: the place, its bytes, and how many allocations of which kind."""
    held: Counter[str] = Counter()
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in found._holders():
        place = one.place or "unknown"
        held[place] += one.bytes
        kinds[place][one.kind.name.replace("_", " ")] += 1
    return [(place, size, kinds[place]) for place, size in held.most_common()]


def _place_bars(held: Sequence[tuple[str, int, dict[str, int]]]) -> str:
    shown = held[:_MOST_BARS]
    names = [place for place, _, _ in shown]
    tips = [
        f"{place}\n{_C.format_bytes(size)}\n"
        + "\n".join(f"{count} × {kind}" for kind, count in kinds.items())
        for place, size, kinds in shown
    ]
    sizes = [size for _, size, _ in shown]
    rest = sum(size for _, size, _ in held[_MOST_BARS:])
    if rest:
        names.append(f"{len(held) - _MOST_BARS} others")
        tips.append(f"{names[-1]}\n{_C.format_bytes(rest)}")
        sizes.append(rest)
    return bars(names, [Series("held", BLUE, sizes)], tips)


def _layer_tip(
    layer: LayerAudit, places: Mapping[str, str], sums: Sequence[Series] = (), at: int = 0
) -> str:
    module = layer.name.split(" · ")[0].split(" × ")[0]
    place = places.get(module, "")
    lines = [layer.name, f"{layer.type} in {place}" if place else layer.type]
    for k, (name, _, _) in enumerate(COLUMNS):
        line = f"{name}: {_C.format_bytes(figures(layer)[k])}"
        lines.append(f"{line}, so far {_C.format_bytes(sums[k].values[at])}" if sums else line)
    return "\n".join(lines)
