"""The page of an explanation: why memory ran out, who holds it, and what would help."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from brim import _C
from brim.plot._canvas import BLUE
from brim.plot._estimate import stacked
from brim.plot._svg import Series, areas, bars, legend
from brim.plot.pages import _MOMENTS, _moment_tip, _of_call, _page

if TYPE_CHECKING:
    from brim._explain import Explanation


def explanation_page(found: Explanation) -> str:
    """The cause, a bar of each holder, the remedies, and the memory of the replayed call."""
    size = _C.format_bytes
    title = "Memory ran out" if found.cause else "What a call needs"
    lines = [str(part) for part in found._head()]
    sections = [("", _style())]
    if found.held:
        names = [
            f"{one.where or 'place not known'} ({one.kind.name.replace('_', ' ')}"
            + (", grows)" if one.grows else ")")
            for one in found.held
        ]
        tips = [
            f"{name}\n{size(one.bytes)} in {one.count} block{'s' * (one.count != 1)}"
            for name, one in zip(names, found.held, strict=True)
        ]
        held = Series("held", BLUE, [one.bytes for one in found.held])
        sections.append(("Held when it failed", bars(names, [held], tips)))
    if found.remedies:
        sections.append(("What would help", _table(found)))
    if found.estimate is not None:
        moments = found.estimate._timeline(_MOMENTS)
        series = stacked(moments)
        tips = [_moment_tip(found.estimate, moment) for moment in moments]
        near = found.limit < 2 * (found.need or 0)
        limit = found.limit if near else None
        head = legend(series, f"limit {size(found.limit)} (dashed)" if near else "")
        sections.append(("Held while the second of two replayed calls runs", head))
        sections.append(("", areas(series, tips, _of_call(len(tips)), limit, [])))
    if found.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
        sections.append(("Notes", f"<ul>{notes}</ul>"))
    return _page(title, lines, sections)


def _style() -> str:
    return (
        "<style>.remedies td, .remedies th { padding: .2em 1em .2em 0; text-align: left; } "
        ".remedies .no { color: #b03a00; }</style>"
    )


def _table(found: Explanation) -> str:
    head, rows = found._remedies()
    cells = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join(
        f'<tr class="{"yes" if fits else "no"}">'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row, fits in zip(rows, (one.fits for one in found.remedies), strict=True)
    )
    return f'<table class="remedies"><tr>{cells}</tr>{body}</table>'
