"""The page of an explanation: why memory ran out, who holds it, and what would help."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from brim import _C
from brim.plot._canvas import BLUE, ORANGE, PALE, Series
from brim.plot._estimate import COLORS
from brim.plot._svg import bars, legend, whole
from brim.plot.pages import held_over_time, listed, page

if TYPE_CHECKING:
    from brim._explain import Explanation

_HATCHED = f"repeating-linear-gradient(-45deg, {ORANGE} 0 3px, #fff 3px 7px)"


def explanation_page(found: Explanation) -> str:
    """The cause, what is held and by whom, the remedies, and the memory of the replayed calls."""
    sections = []
    if found.held:
        sections += [
            ("Held when it failed", _kinds(found)),
            ("By place in the code", _holders(found)),
        ]
    if found.remedies:
        sections.append(("What would help", _table(found)))
    if found.estimate is not None:
        title, chart = held_over_time(found.estimate, "limit", found.limit)
        sections.append((f"{title}, as replayed", chart))
    sections.append(listed("Notes", found.notes))
    title = "Memory ran out" if found.cause else "What a call needs"
    return page(title, [str(part) for part in found._head()], sections)


def _kinds(found: Explanation) -> str:
    """One bar: what is held by kind, what else is in use, and what was asked for in vain."""
    sizes = {**found.by_kind, "not known": found.in_use - sum(found.by_kind.values())}
    parts = [(name, COLORS.get(name, PALE), size) for name, size in sizes.items()]
    parts.append(("asked for", _HATCHED, found.requested))
    series = [
        Series(f"{name}: {_C.format_bytes(size)}", color, [size])
        for name, color, size in parts
        if size > 0
    ]
    near = found.limit < 2 * (found.in_use + found.requested)
    text = f"limit {_C.format_bytes(found.limit)}" if near else ""
    return legend(series, limit=text) + whole(series, found.limit if near else None)


def _holders(found: Explanation) -> str:
    names = [
        f"{one.where or 'place not known'} ({one.kind.name.replace('_', ' ')}"
        + (", grows)" if one.grows else ")")
        for one in found.held
    ]
    tips = [
        f"{name}\n{_C.format_bytes(one.bytes)} in {one.count} block{'s' * (one.count != 1)}"
        for name, one in zip(names, found.held, strict=True)
    ]
    return bars(names, [Series("held", BLUE, [one.bytes for one in found.held])], tips)


def _table(found: Explanation) -> str:
    head, rows = found._remedies()
    cells = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join(
        f'<tr class="{"yes" if one.fits else "no"}">'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row, one in zip(rows, found.remedies, strict=True)
    )
    return f'<table class="remedies"><tr>{cells}</tr>{body}</table>'
