"""Pages for the browser, each one file that needs no network: an estimate, and an audit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

from brim import _C
from brim.nn._audit_text import figures, folded
from brim.plot._audit import COLUMNS
from brim.plot._canvas import BLUE, Series, shortened
from brim.plot._estimate import KINDS, stacked
from brim.plot._svg import Axes, areas, bars, legend, steps

if TYPE_CHECKING:
    from brim._estimate import Estimate
    from brim.nn.audit import Audit, LayerAudit

_MOMENTS = 400  # a place to hover over is then more than two pixels wide
_MOST_BARS = 40
_MOST_MARKS = 6
_BESIDE = "#000000"
_NOTHING: Mapping[str, Estimate] = MappingProxyType({})

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 1.6em 0 .4em; }
svg .border { stroke: #000; }
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
.whole { display: flex; position: relative; height: 2em; background: #eee; }
.whole i:hover { opacity: .8; }
.whole b { position: absolute; top: -.3em; bottom: -.3em; border-left: 2px dashed #b03a00; }
.remedies td, .remedies th { padding: .2em 1em .2em 0; text-align: left; }
.remedies td:nth-child(n+3):nth-child(-n+6) { white-space: nowrap; }
.remedies .no { color: #b03a00; }
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
    held = _by_place(found)
    heads = [
        f"{name}: peak {_C.format_bytes(each.peak)} above the {_C.format_bytes(each.held_before)} "
        "held before"
        for name, each in beside.items()
    ]
    calls = len(found._begins)
    return page(
        "Memory of one call" if calls == 1 else f"Memory of {calls} calls",
        [*found._head(), *heads],
        [
            held_over_time(found, "capacity", found.capacity, beside),
            ("Held at the peak, by place in the code", _place_bars(held)),
            listed("Assumed", found.assumptions),
        ],
    )


def held_over_time(
    found: Estimate, name: str, limit: int | None, beside: Mapping[str, Estimate] = _NOTHING
) -> tuple[str, str]:
    """What is held while calls run, with a limit by its name, and others as lines."""
    moments, times = found._timeline(_MOMENTS)
    series = stacked(moments)
    tips = [_moment_tip(found, moment) for moment in moments]
    lines = [Series(other, _BESIDE, _sums(each, times)) for other, each in beside.items()]
    if limit is not None and limit > 2 * (found.held_before + found.peak):
        limit = None
    shown = "" if limit is None else f"{name} {_C.format_bytes(limit)}"
    calls = len(found._begins)
    begins = [bisect_left(times, call) for call in range(calls + 1)]
    if calls == 1:
        marks = [(share / 100 * len(tips), f"{share} %") for share in (0, 25, 50, 75, 100)]
    else:
        middles = [(first + end) / 2 for first, end in pairwise(begins)]
        marks = [(middle, f"call {call}") for call, middle in enumerate(middles, 1)]
    axes = Axes("allocations and releases, in order", "held", marks, begins[1:-1])
    return (
        "Held while the call runs" if calls == 1 else "Held while the calls run",
        legend(series, lines, shown) + areas(series, tips, axes, limit, lines),
    )


def _sums(other: Estimate, times: Sequence[float]) -> list[int]:
    """All that another estimate's calls hold at these times."""
    moments, begins = other._timeline(_MOMENTS)
    return [
        sum(moments[bisect_right(begins, time, 1, len(moments)) - 1].held) for time in times[:-1]
    ]


def listed(title: str, texts: Sequence[str]) -> tuple[str, str]:
    """A section of short texts; nothing if there are none."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return (title, f"<ul>{items}</ul>") if items else ("", "")


def audit_page(found: Audit, places: Mapping[str, str]) -> str:
    """What a model keeps as its forward runs, and by which layer."""
    rows = [each for each in found.layers if any(figures(each))]
    lines = [str(part) for part in found._parts()[1:]]
    if not rows:
        return page("Kept for backward", [*lines, "The model keeps nothing for backward."], [])
    columns = zip(*map(figures, rows), strict=True)
    sums = [
        Series(name, color, list(accumulate(column)))
        for (name, color), column in zip(COLUMNS, columns, strict=True)
    ]
    blocks = sorted(folded(found.layers), key=lambda each: -max(figures(each)))[:_MOST_BARS]
    names = [f"{each.name} ({each.type})" for each in blocks]
    groups = [
        Series(name, color, [figures(each)[k] for each in blocks])
        for k, (name, color) in enumerate(COLUMNS)
    ]
    tips = [_layer_tip(each, places, sums, i) for i, each in enumerate(rows)]
    return page(
        "Kept for backward",
        lines,
        [
            ("Kept so far, as the forward runs", legend(sums)),
            ("", steps(sums, tips, _of_layers(rows))),
            ("Kept by layer", legend(groups)),
            ("", bars(names, groups, [_layer_tip(each, places) for each in blocks])),
        ],
    )


def _of_layers(rows: Sequence[LayerAudit]) -> Axes:
    """Marks a few layers: their names take space."""
    count = min(len(rows), _MOST_MARKS)
    chosen = [i * len(rows) // count for i in range(count)]
    marks = [(i + 0.5, shortened(rows[i].name, 20)) for i in chosen]
    return Axes("layers, in the order of the forward", "kept so far", marks)


def page(title: str, lines: Sequence[str], sections: Sequence[tuple[str, str]]) -> str:
    """A file of its own: a title, lines of text, and sections with their titles."""
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
    for k, (name, _) in enumerate(COLUMNS):
        line = f"{name}: {_C.format_bytes(figures(layer)[k])}"
        lines.append(f"{line}, so far {_C.format_bytes(sums[k].values[at])}" if sums else line)
    return "\n".join(lines)
