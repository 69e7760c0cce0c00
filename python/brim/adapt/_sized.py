"""What `batch`, `range` and `chunked` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brim._arguments import flag, positive
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
    specific |= {"initial": positive("initial", initial), "quanta": [positive("q", q)]}
    flag("progress", progress)
    specific["collect"] = flag("collect", collect)

    def decorate(function: Callable[..., object]) -> Any:
        return make(kind, function, options, progress=_bar(function, progress), **specific)

    return decorate


def _bar(function: Callable[..., Any], progress: object) -> Callable[[int], Any] | None:
    if not progress:
        return None
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    return lambda total: tqdm(total=total, desc=name_of(function), leave=False)
