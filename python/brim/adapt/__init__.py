"""Adaptive execution: call a function with the largest size that fits the memory there is.

The decorators only work out, once, where a function's arguments are; the calls themselves run in
the C++ core.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

from typing_extensions import Unpack

from brim._arguments import flag, name_of, positive
from brim._C import AdaptiveFunction, Attempt, RankError, SizeMemory
from brim._estimate import FirstSize
from brim.adapt._attempts import Attempts
from brim.adapt._decorators import (
    BatchDecorator,
    ChunkedDecorator,
    CollectingChunkedDecorator,
    CollectingRangeDecorator,
    RangeDecorator,
)
from brim.adapt._microbatches import Microbatches
from brim.adapt._options import Options, inside, make, signature_of, slot_of, slots_of
from brim.adapt._run import run_batch, run_chunked, run_range
from brim.adapt._sized import sized

# Without `range`: `from brim import *` must leave the builtin of that name alone.
__all__ = [
    "AdaptiveFunction",
    "Attempt",
    "Attempts",
    "Microbatches",
    "Options",
    "RankError",
    "SizeMemory",
    "batch",
    "chunked",
    "maximize",
    "run_batch",
    "run_chunked",
    "run_range",
]

P = ParamSpec("P")
R = TypeVar("R")


def _check_can_be_added(function: Callable[..., Any], names: list[str], infer: str | None) -> None:
    """A value that was not passed is added by keyword, which positional-only arguments refuse."""
    parameters = signature_of(function).parameters
    for name in names:
        parameter = parameters.get(name)
        if parameter is None or parameter.kind is not parameter.POSITIONAL_ONLY:
            continue
        if infer is not None or parameter.default is not parameter.empty:
            raise ValueError(
                f"{name} is positional-only in {name_of(function)} and may be left out: brim could "
                "not pass it on. Remove the default (and infer=), or the `/`"
            )


@overload
def maximize(function: Callable[P, R], /) -> AdaptiveFunction[P, R]: ...


@overload
def maximize(
    *names: str | Sequence[str],
    infer: str | None = None,
    q: int | Mapping[str, int] = 1,
    foresee: bool = False,
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], AdaptiveFunction[P, R]]: ...


def maximize(
    *names: Any,
    infer: str | None = None,
    q: int | Mapping[str, int] = 1,
    foresee: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Decorate a function to use the largest values of some integer arguments that fit.

    The value that the caller passes is the largest to try. When memory runs out, brim computes the
    next value from what was held, requested and available, and repeats the call. The limit is
    remembered for the next call.

    Args:
        *names: the arguments to adapt, `"batch_size"` if none is named. Several are lowered in this
            order, each to its floor before the next; a tuple of names is a group that shrinks
            together.
        infer: an argument whose length is the value if none is passed.
        q: prefer multiples of this, for all or by name.
        foresee: before the first call with arguments of a kind, trace the function on fake tensors
            (`brim.largest_size`) and start at the size that fits. For one name only. Where it
            cannot be traced, the call is as without it, and the log says so at INFO.
        **options: see `Options`.

    Raises:
        ValueError: if the function has no such argument, or `foresee` has several names.
        TypeError: if it is a coroutine or a generator function.

    Example:
        >>> import brim, torch
        >>> @brim.maximize("batch_size", infer="x")
        ... def nearest(x, y, batch_size=None):
        ...     return torch.cat([torch.cdist(part, y).amin(1) for part in x.split(batch_size)])
        >>> nearest(torch.zeros(10, 3), torch.ones(20, 3)).shape
        torch.Size([10])
    """
    if len(names) == 1 and callable(names[0]):
        function, _ = inside(names[0])
        found = list(signature_of(function).parameters)
        if "batch_size" not in found:
            raise ValueError(
                f"@brim.maximize without names adapts batch_size, but {name_of(function)} has "
                f"{', '.join(found) or 'no argument'}: name those to adapt, as in "
                f'@brim.maximize("{(found or ["size"])[-1]}")'
            )
        return maximize("batch_size")(names[0])
    groups = [
        tuple(group) if isinstance(group, Sequence) and not isinstance(group, str) else (group,)
        for group in names or ("batch_size",)
    ]
    flat = [name for group in groups for name in group]
    if not all(isinstance(name, str) for name in flat) or not all(groups):
        raise TypeError(f"names must be strings or groups of strings, got {names!r}")
    if len(set(flat)) != len(flat):
        raise ValueError(f"names has one argument twice: {', '.join(flat)}")
    if isinstance(q, Mapping):
        stray = q.keys() - set(flat)
        if stray:
            raise ValueError(
                f"q has {', '.join(sorted(map(str, stray)))}, which is not among the names "
                f"{', '.join(flat)}"
            )
        quanta = [positive(f"q[{name!r}]", q.get(name, 1)) for name in flat]
    else:
        quanta = [positive("q", q)] * len(flat)
    if infer is not None and not isinstance(infer, str):
        raise TypeError(f"infer must be the name of an argument, got {infer!r}")
    flag("foresee", foresee)
    if foresee and len(flat) != 1:
        raise ValueError(f"foresee takes one name, got {', '.join(flat)}")
    places = itertools.count()
    group_places = [[next(places) for _ in group] for group in groups]

    def decorate(decorated: Callable[P, R]) -> AdaptiveFunction[P, R]:
        function, _ = inside(decorated)
        slots = slots_of(signature_of(function))
        _check_can_be_added(function, flat, infer)
        adaptive: AdaptiveFunction[P, R] = make(
            "maximize",
            decorated,
            options,
            name=", ".join(flat),
            slots=slots,
            parameters=[slot_of(function, slots, "names", name) for name in flat],
            quanta=quanta,
            groups=group_places,
            infer=None if infer is None else slot_of(function, slots, "infer", infer),
            maxima_may_differ=infer is not None,
            foresee=FirstSize(flat[0], options) if foresee else None,
        )
        return adaptive

    return decorate


def batch(initial: int, *, q: int = 1, **options: Unpack[Options]) -> BatchDecorator:
    """Decorate `function(batch_size, ...)` to be called with the largest size that fits.

    Args:
        initial: the largest size, tried first.
        q: prefer multiples of this.
        **options: see `Options`.

    Example:
        >>> import brim
        >>> @brim.batch(512)
        ... def run(batch_size: int, text: str) -> str:
        ...     return f"{text} {batch_size}"
        >>> run("with")
        'with 512'
    """
    decorator: BatchDecorator = sized("batch", initial, q, options)
    return decorator


@overload
def range(  # noqa: A001
    initial: int,
    *,
    q: int = 1,
    progress: bool = False,
    collect: Literal[False] = False,
    **options: Unpack[Options],
) -> RangeDecorator: ...


@overload
def range(  # noqa: A001
    initial: int,
    *,
    q: int = 1,
    progress: bool = False,
    collect: Literal[True],
    **options: Unpack[Options],
) -> CollectingRangeDecorator: ...


def range(  # noqa: A001  the public name
    initial: int,
    *,
    q: int = 1,
    progress: bool = False,
    collect: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Decorate `function(start, end, ...)` to cover a range in parts, each as long as fits.

    A part that succeeded is never repeated. If nothing is remembered, the first parts are short:
    they show how memory grows, and the step then goes to the largest that fits.

    Args:
        initial: the longest part.
        q: prefer multiples of this.
        progress: show a tqdm bar.
        collect: return a list of what the function returned for each part, in order. Tensors in it
            take memory beside the next parts. Without it results are dropped, with a warning.
        **options: see `Options`.

    Example:
        >>> import brim, torch
        >>> out = torch.zeros(100)
        >>> @brim.range(32)
        ... def fill(start: int, end: int, out: torch.Tensor) -> None:
        ...     out[start:end] = 1
        >>> fill(0, 100, out)
        >>> out.sum()
        tensor(100.)
        >>> @brim.range(32, collect=True)
        ... def squares(start: int, end: int) -> torch.Tensor:
        ...     return torch.arange(start, end) ** 2
        >>> torch.cat(squares(0, 5))
        tensor([ 0,  1,  4,  9, 16])
    """
    return sized("range", initial, q, options, progress, collect)


@overload
def chunked(
    initial: int,
    *,
    dim: int = 0,
    q: int = 1,
    progress: bool = False,
    collect: Literal[False] = False,
    **options: Unpack[Options],
) -> ChunkedDecorator: ...


@overload
def chunked(
    initial: int,
    *,
    dim: int = 0,
    q: int = 1,
    progress: bool = False,
    collect: Literal[True],
    **options: Unpack[Options],
) -> CollectingChunkedDecorator: ...


def chunked(
    initial: int,
    *,
    dim: int = 0,
    q: int = 1,
    progress: bool = False,
    collect: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Decorate `function(chunk, start, end, ...)` to cover a tensor in chunks that fit.

    The chunks are views: what is written to them is written to the tensor.

    Args:
        initial: the longest chunk.
        dim: the dimension to cut.
        q: prefer multiples of this.
        progress: show a tqdm bar.
        collect: return a list of what the function returned for each chunk, as in `range`.
        **options: see `Options`.

    Example:
        >>> import brim, torch
        >>> @brim.chunked(32)
        ... def fill(chunk: torch.Tensor, start: int, end: int, value: float) -> None:
        ...     chunk.fill_(value)
        >>> out = torch.zeros(100)
        >>> fill(out, 2.0)
        >>> out.sum()
        tensor(200.)
    """
    return sized("chunked", initial, q, options, progress, collect, dim=dim)
