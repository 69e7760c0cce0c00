"""Adaptive calls of a function that is not decorated."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Hashable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
from typing_extensions import Unpack

from brim._arguments import name_of
from brim._C import SizeMemory
from brim.adapt._options import RANK_OPTIONS, Options, rank_setting, remembered
from brim.adapt._sized import sized

P = ParamSpec("P")
R = TypeVar("R")


@functools.lru_cache(2048)
def _made_once(
    make: Callable[[Options, Any], Any], of: object, options: tuple[tuple[str, Any], ...], more: Any
) -> Any:
    return make(Options(**dict(options)), more)  # type: ignore[typeddict-item]


def _once(
    kind: str,
    function: Callable[..., Any],
    options: Options,
    initial: object,
    q: object,
    **specific: Any,
) -> Any:
    """What the decorator would make, for one call, with the memory of earlier calls of this code.

    The code, not the function: a lambda is a new object on every call.
    """
    site = ""
    if options.get("remember") == "call_site":
        caller = sys._getframe(2)
        site = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    inner = function.func if isinstance(function, functools.partial) else function
    code = getattr(inner, "__code__", None) or name_of(inner)

    def made_once(make: Any, code: object, names: Collection[str], more: object) -> Any:
        chosen = tuple((name, value) for name, value in options.items() if name in names)
        if not all(isinstance(value, Hashable) for _, value in chosen):
            return make(options, more)  # which says what is wrong
        return _made_once(make, (kind, site, code), chosen, more)

    def memory_of(_: Options, salt: int) -> SizeMemory | None:
        names = ("persist", "capacity", "remember")
        memory: SizeMemory | None = made_once(remembered, None if salt else code, names, salt)
        return memory

    def ranks_of(_: Options, name: str) -> Any:
        return made_once(rank_setting, code, ("ranks", *RANK_OPTIONS), name)

    specific |= {"memory_of": memory_of, "ranks_of": ranks_of, "site": site}
    return sized(kind, initial, q, options, **specific)(function)


def run_batch(
    initial: int,
    function: Callable[Concatenate[int, P], R],
    /,
    *args: Any,
    q: int = 1,
    **options: Unpack[Options],
) -> R:
    """Call `function(size, *args)` now, with the largest size up to `initial` that fits.

    Example:
        >>> import brim
        >>> brim.run_batch(512, lambda size: size * 2)
        1024
    """
    result: R = _once("batch", function, options, initial, q)(*args)
    return result


@overload
def run_range(
    start: int,
    end: int,
    initial: int,
    function: Callable[..., object],
    /,
    *args: Any,
    q: int = 1,
    progress: bool = False,
    collect: Literal[False] = False,
    **options: Unpack[Options],
) -> None: ...


@overload
def run_range(
    start: int,
    end: int,
    initial: int,
    function: Callable[..., R],
    /,
    *args: Any,
    q: int = 1,
    progress: bool = False,
    collect: Literal[True],
    **options: Unpack[Options],
) -> list[R]: ...


def run_range(
    start: int,
    end: int,
    initial: int,
    function: Callable[..., Any],
    /,
    *args: Any,
    q: int = 1,
    progress: bool = False,
    collect: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Call `function(begin, stop, *args)` now for parts of the range, at most `initial` long.

    With `collect`, returns a list of what the function returned for each part.

    Example:
        >>> import brim
        >>> sum(brim.run_range(0, 10, 4, lambda start, end: end - start, collect=True))
        10
    """
    made = _once("range", function, options, initial, q, progress=progress, collect=collect)
    return made(start, end, *args)


@overload
def run_chunked(
    tensor: torch.Tensor,
    initial: int,
    function: Callable[..., object],
    /,
    *args: Any,
    dim: int = 0,
    q: int = 1,
    progress: bool = False,
    collect: Literal[False] = False,
    **options: Unpack[Options],
) -> None: ...


@overload
def run_chunked(
    tensor: torch.Tensor,
    initial: int,
    function: Callable[..., R],
    /,
    *args: Any,
    dim: int = 0,
    q: int = 1,
    progress: bool = False,
    collect: Literal[True],
    **options: Unpack[Options],
) -> list[R]: ...


def run_chunked(
    tensor: torch.Tensor,
    initial: int,
    function: Callable[..., Any],
    /,
    *args: Any,
    dim: int = 0,
    q: int = 1,
    progress: bool = False,
    collect: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Call `function(chunk, start, end, *args)` now for chunks, at most `initial` long.

    With `collect`, returns a list of what the function returned for each chunk.

    Example:
        >>> import brim, torch
        >>> total = torch.zeros(10)
        >>> brim.run_chunked(total, 4, lambda chunk, start, end: chunk.add_(1))
        >>> total.sum()
        tensor(10.)
    """
    made = _once(
        "chunked", function, options, initial, q, progress=progress, collect=collect, dim=dim
    )
    return made(tensor, *args)
