"""Pictures and pages, which are above all that they show: lower floors reach them here alone."""

from __future__ import annotations

from typing import Any

from brim import _C


def draw(kind: str, *args: Any, **options: Any) -> Any:
    """Call the function of `brim.plot` that draws this kind of thing."""
    from brim import plot  # the one late import: see "Floors" in CONTRIBUTING.md

    return getattr(plot, kind)(*args, **options)


_C.provide(draw=draw)
