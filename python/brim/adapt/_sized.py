"""What `batch`, `range` and `chunked` have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from brim._arguments import flag, positive, whole
from brim._progress import asked_for
from brim.adapt._options import Options, has_receiver, inside, make, name_of


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
    try:
        signature = inspect.signature(inner)
    except (TypeError, ValueError):  # a function of C without a signature
        return
    passed = _CALLED_WITH[kind]
    receiver = binding == "owner" or (binding == "instance" and has_receiver(signature))
    try:
        signature.bind_partial(*[None] * receiver, *passed)
    except TypeError:
        raise TypeError(
            f"brim.{kind} calls the function with ({', '.join(passed)}) and then what it is called "
            f"with, but {name_of(inner)} takes {signature}"
        ) from None
