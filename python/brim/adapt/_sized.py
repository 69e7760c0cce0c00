"""What `batch`, `range` and `chunked` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brim._arguments import flag, name_of, positive, refused, whole
from brim._progress import asked_for
from brim.adapt._options import Options, inside, make


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
            f"@brim.{kind}(1024), with the largest size to try; brim.run_{kind} takes the function "
            "after it"
        )
    specific |= {"initial": positive("initial", initial), "quanta": [positive("q", q)]}
    if "dim" in specific:
        whole("dim", specific["dim"], -(2**63))
    flag("progress", progress)
    specific["collect"] = flag("collect", collect)

    def decorate(function: Callable[..., object]) -> Any:
        _check_arity(kind, function)
        bar = asked_for(name_of(function)) if progress else None
        return make(kind, function, options, progress=bar, **specific)

    return decorate


_CALLED_WITH = {
    "batch": ("batch_size",),
    "range": ("start", "end"),
    "chunked": ("chunk", "start", "end"),
}


def _check_arity(kind: str, function: Any) -> None:
    inner, binding = inside(function)
    passed = _CALLED_WITH[kind]
    if signature := refused(inner, len(passed) + (binding == "owner"), more=True):
        raise TypeError(
            f"brim.{kind} calls the function as f({', '.join(passed)}, …), but {name_of(inner)} "
            f"takes {signature}"
        )
