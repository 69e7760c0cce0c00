"""What `batch`, `range` and `chunked` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brim._arguments import flag, positive, whole
from brim._progress import asked_for
from brim.adapt._options import Options, make, name_of


def sized(
    kind: str,
    initial: object,
    q: object,
    options: Options,
    progress: object = False,
    collect: object = False,
    **specific: Any,
) -> Any:
    """The decorator of the kinds with one size, which brim passes to the function."""
    if callable(initial):
        raise TypeError(
            f"initial must be an int, got the function {name_of(initial)}: write "
            f"@brim.{kind}(1024), with the largest size to try"
        )
    specific |= {"initial": positive("initial", initial), "quanta": [positive("q", q)]}
    if "dim" in specific:
        whole("dim", specific["dim"], -(2**63))
    flag("progress", progress)
    specific["collect"] = flag("collect", collect)

    def decorate(function: Callable[..., object]) -> Any:
        bar = asked_for(name_of(function)) if progress else None
        return make(kind, function, options, progress=bar, **specific)

    return decorate
