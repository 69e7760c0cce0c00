"""Adaptive execution: call a function with the largest size that fits the memory there is.

The decorators only work out, once, where a function's arguments are; the calls themselves run in
the C++ core.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
from typing_extensions import TypedDict, Unpack

from brim import _C
from brim._C import AdaptiveFunction, Attempt, SizeMemory
from brim.memory import DeviceLike

__all__ = [
    "AdaptiveFunction",
    "Attempt",
    "Options",
    "SizeMemory",
    "batch",
    "chunked",
    "maximize",
    "range",
    "run_batch",
    "run_chunked",
    "run_range",
]

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger("brim")
_builtin_range = range  # this module's own `range` is the adaptive one


class Options(TypedDict, total=False):
    """What all adaptive calls can be told; the defaults are right for most.

    Attributes:
        strategy: `"predictive"` (default) works the next size out from the figures of the failure;
            `"halving"` and `"bisect"` do not look at them.
        objective: `"memory"` (default) for the largest size that fits, `"throughput"` for the
            smallest one within 2 % of the best rate seen.
        lower: the floor; running out of memory there is final. 1 by default.
        device: where memory is measured and random numbers are drawn; the current accelerator,
            else the CPU.
        remember: `"global"` (default) remembers sizes for the function wherever it is called from,
            `"call_site"` for each place separately, `"none"` not at all. What is remembered is a
            limit, by the shapes, dtypes and devices of the tensors passed, and it grows again when
            more memory is free.
        keys: names of the arguments to remember by instead.
        hasher: a function of a mapping of those arguments (all, where `keys` is not given) that
            returns an int.
        persist: keep what is learned across processes: True for the user's cache directory, or a
            directory.
        restore_random_state: start a repeated call with the random state of the first try
            (default), so that the result does not depend on how many tries it took.
        observer: called with each `Attempt` after it ended.
    """

    strategy: Literal["predictive", "halving", "bisect"]
    objective: Literal["memory", "throughput"]
    lower: int
    device: DeviceLike
    remember: Literal["global", "call_site", "none"]
    keys: str | Iterable[str] | None
    hasher: Callable[[Mapping[str, Any]], int] | None
    persist: bool | str | os.PathLike[str]
    restore_random_state: bool
    observer: Callable[[Attempt], object] | None


_DEFAULTS: Options = {
    "strategy": "predictive",
    "objective": "memory",
    "lower": 1,
    "device": None,
    "remember": "global",
    "keys": None,
    "hasher": None,
    "persist": False,
    "restore_random_state": True,
    "observer": None,
}


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = int(value.__index__())
    if not 1 <= number < 2**63:
        raise ValueError(f"{name} must be between 1 and 2^63 - 1, got {number}")
    return number


def _check_function(function: Callable[..., Any]) -> None:
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(
            f"put @{type(function).__name__} above the adaptive decorator, not below it"
        )
    if not callable(function):
        raise TypeError(f"function must be callable, got {function!r}")
    for what, is_one in (
        ("a coroutine", inspect.iscoroutinefunction),
        ("an async generator", inspect.isasyncgenfunction),
        ("a generator", inspect.isgeneratorfunction),
    ):
        if is_one(function):
            raise TypeError(
                f"{function!r} is {what} function: it runs after the call has "
                "returned, and cannot adapt"
            )


_Slot = tuple[str, int, object]


def _slots(function: Callable[..., Any]) -> dict[str, _Slot]:
    """Name, position among positional arguments (-1: keyword only) and default of each argument."""
    slots: dict[str, _Slot] = {}
    position = 0
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            slots[name] = (name, position, parameter.default)
            position += 1
        elif parameter.kind is parameter.KEYWORD_ONLY:
            slots[name] = (name, -1, parameter.default)
    return slots


def _slot(
    function: Callable[..., Any], slots: Mapping[str, _Slot], argument: str, name: str
) -> _Slot:
    if name not in slots:
        raise ValueError(
            f"{argument} names {name!r}, which is not an argument of "
            f"{_name_of(function)}: it has {', '.join(slots)}"
        )
    return slots[name]


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _log(name: str, attempt: Attempt) -> None:
    level = logging.DEBUG if attempt.fitted else logging.INFO
    _logger.log(level, "%s: %r", name, attempt)


def _memory(options: Options) -> SizeMemory | None:
    remember, persist = options["remember"], options["persist"]
    if remember not in ("global", "call_site", "none"):
        raise ValueError(f"remember must be 'global', 'call_site' or 'none', got {remember!r}")
    if remember == "none":
        if persist:
            raise ValueError("persist asks for sizes to be kept, but remember is 'none'")
        return None
    if persist is False:
        return SizeMemory()
    return SizeMemory(
        directory=SizeMemory.default_directory() if persist is True else Path(persist)
    )


def _key_slots(
    function: Callable[..., Any], slots: Mapping[str, _Slot], options: Options
) -> list[_Slot] | None:
    keys, hasher = options["keys"], options["hasher"]
    if hasher is not None and not callable(hasher):
        raise TypeError(f"hasher must be callable, got {hasher!r}")
    if keys is None:
        return None if hasher is None else list(slots.values())
    return [
        _slot(function, slots, "keys", name) for name in ([keys] if isinstance(keys, str) else keys)
    ]


def _make(
    kind: str,
    function: Callable[..., Any],
    given: Options,
    *,
    name: str,
    memory: SizeMemory | None = None,
    slots: Mapping[str, _Slot] | None = None,
    **specific: object,
) -> Any:
    """Check what is common to all kinds and make the callable."""
    unknown = given.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(
            f"unknown option(s) {', '.join(sorted(unknown))}: there are {', '.join(_DEFAULTS)}"
        )
    _check_function(function)
    options: Options = {**_DEFAULTS, **given}
    if options["observer"] is not None and not callable(options["observer"]):
        raise TypeError(f"observer must be callable, got {options['observer']!r}")
    try:
        known = _slots(function) if slots is None else slots
    except ValueError:  # a built-in function without a signature
        known = {}
    own = _name_of(function)
    identity = f"{kind}:{getattr(function, '__module__', '')}:{own}"
    adaptive = _C.make_adaptive(
        function,
        {
            "kind": kind,
            "no_default": inspect.Parameter.empty,
            "strategy": options["strategy"],
            "objective": options["objective"],
            "lower": _positive("lower", options["lower"]),
            "device": options["device"],
            "restore_random_state": bool(options["restore_random_state"]),
            "exact_halving": False,  # the compat faces' own
            "name": name,
            "memory": _memory(options) if memory is None else memory,
            "per_call_site": options["remember"] == "call_site",
            "keys": _key_slots(function, known, options),
            "hasher": options["hasher"],
            "salt": int.from_bytes(
                hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little"
            ),
            "observer": options["observer"],
            "logger": functools.partial(_log, own),
            "log_level": _logger.getEffectiveLevel,
            "collect": gc.collect,
            "parameters": (),
            "quanta": (),
            "groups": (),
            "infer": None,
            "initial": 1,
            "dim": 0,
            "progress": None,
            **specific,
        },
    )
    for attribute in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(function, attribute):
            setattr(adaptive, attribute, getattr(function, attribute))
    adaptive.__dict__.update(getattr(function, "__dict__", {}))
    return adaptive


@overload
def maximize(function: Callable[P, R], /) -> AdaptiveFunction[P, R]: ...


@overload
def maximize(
    *names: str | Sequence[str],
    infer: str | None = None,
    q: int | Mapping[str, int] = 1,
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], AdaptiveFunction[P, R]]: ...


def maximize(
    *names: Any,
    infer: str | None = None,
    q: int | Mapping[str, int] = 1,
    **options: Unpack[Options],
) -> Any:
    """Decorate a function to use the largest values of some integer arguments that fit.

    The value that is passed is the most that is wanted. When memory runs out, the next value is
    worked out from what was held, asked for and allowed, and the call is repeated. The limit is
    remembered for the next call.

    Args:
        *names: the arguments to adapt, `"batch_size"` where none is named. Several are lowered in
            this order, each to its floor before the next; a tuple of names is a group that shrinks
            together.
        infer: an argument whose length is the value where none is passed.
        q: prefer multiples of this, for all or by name.
        **options: see `Options`.

    Raises:
        ValueError: if the function has no such argument.
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
                f"q has {', '.join(sorted(stray))}, which is not among the names {', '.join(flat)}"
            )
        quanta = [_positive(f"q[{name!r}]", q.get(name, 1)) for name in flat]
    else:
        quanta = [_positive("q", q)] * len(flat)
    indices = iter(_builtin_range(len(flat)))

    def decorate(function: Callable[P, R]) -> AdaptiveFunction[P, R]:
        _check_function(function)
        slots = _slots(function)
        adaptive: AdaptiveFunction[P, R] = _make(
            "maximize",
            function,
            options,
            name=", ".join(flat),
            slots=slots,
            parameters=[_slot(function, slots, "names", name) for name in flat],
            quanta=quanta,
            groups=group_indices,
            infer=None if infer is None else _slot(function, slots, "infer", infer),
        )
        return adaptive

    group_indices = [[next(indices) for _ in group] for group in groups]
    return decorate


def batch(
    initial: int, *, q: int = 1, **options: Unpack[Options]
) -> Callable[[Callable[Concatenate[int, P], R]], AdaptiveFunction[P, R]]:
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
    size, quantum = _positive("initial", initial), _positive("q", q)

    def decorate(function: Callable[Concatenate[int, P], R]) -> AdaptiveFunction[P, R]:
        adaptive: AdaptiveFunction[P, R] = _without_first(
            1, _make("batch", function, options, name="batch size", initial=size, quanta=[quantum])
        )
        return adaptive

    return decorate


def range(  # noqa: A001  the public name
    initial: int, *, q: int = 1, progress: bool = False, **options: Unpack[Options]
) -> Callable[
    [Callable[Concatenate[int, int, P], object]], AdaptiveFunction[Concatenate[int, int, P], None]
]:
    """Decorate `function(start, end, ...)` to cover a range in parts, each as long as fits.

    A part that succeeded is never done again. Where nothing is remembered the first parts are
    short: they show how memory grows, and the step then goes to the largest that fits.

    Args:
        initial: the longest part.
        q: prefer multiples of this.
        progress: show a tqdm bar.
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
    """
    step, quantum = _positive("initial", initial), _positive("q", q)

    def decorate(
        function: Callable[Concatenate[int, int, P], object],
    ) -> AdaptiveFunction[Concatenate[int, int, P], None]:
        bar = _bar(function, progress)
        adaptive: AdaptiveFunction[Concatenate[int, int, P], None] = _make(
            "range", function, options, name="step", initial=step, quanta=[quantum], progress=bar
        )
        return adaptive

    return decorate


def chunked(
    initial: int, *, dim: int = 0, q: int = 1, progress: bool = False, **options: Unpack[Options]
) -> Callable[
    [Callable[Concatenate[torch.Tensor, int, int, P], object]],
    AdaptiveFunction[Concatenate[torch.Tensor, P], None],
]:
    """Decorate `function(chunk, start, end, ...)` to cover a tensor in chunks that fit.

    The chunks are views: what is written to them is written to the tensor.

    Args:
        initial: the longest chunk.
        dim: the dimension to cut.
        q: prefer multiples of this.
        progress: show a tqdm bar.
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
    step, quantum = _positive("initial", initial), _positive("q", q)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")

    def decorate(
        function: Callable[Concatenate[torch.Tensor, int, int, P], object],
    ) -> AdaptiveFunction[Concatenate[torch.Tensor, P], None]:
        bar = _bar(function, progress)
        adaptive = _make(
            "chunked",
            function,
            options,
            name="step",
            initial=step,
            dim=dim,
            quanta=[quantum],
            progress=bar,
        )
        visible: AdaptiveFunction[Concatenate[torch.Tensor, P], None] = _without_first(
            2, adaptive, keep=1
        )
        return visible

    return decorate


def _bar(function: Callable[..., Any], progress: bool) -> Callable[[int], Any] | None:
    if not progress:
        return None
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    return lambda total: tqdm(total=total, desc=_name_of(function), leave=False)


def _without_first(count: int, adaptive: Any, keep: int = 0) -> Any:
    """Show the signature that callers see: without the arguments that brim passes."""
    try:
        signature = inspect.signature(adaptive.__wrapped__)
    except ValueError:  # a built-in function
        return adaptive
    parameters = list(signature.parameters.values())
    # In a class body the function is not bound yet: its first argument is the instance.
    keep += 1 if parameters and parameters[0].name in ("self", "cls") else 0
    adaptive.__signature__ = signature.replace(
        parameters=parameters[:keep] + parameters[keep + count :]
    )
    return adaptive


# What `run_*` learned, by the code that was run: a lambda is a new object on every call, but its
# code is not.
_run_memories: OrderedDict[object, SizeMemory] = OrderedDict()
_MOST_RUN_MEMORIES = 1024


def _run_memory(kind: str, function: Callable[..., Any], options: Options) -> SizeMemory | None:
    if options.get("remember") == "none" or options.get("persist"):
        return None  # made, or not, by the decorator
    owner = (kind, getattr(function, "__code__", None) or _name_of(function))
    memory = _run_memories.setdefault(owner, SizeMemory())
    _run_memories.move_to_end(owner)
    while len(_run_memories) > _MOST_RUN_MEMORIES:
        _run_memories.popitem(last=False)
    return memory


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
    memory = _run_memory("batch", function, options)
    adaptive = _make(
        "batch",
        function,
        options,
        name="batch size",
        memory=memory,
        initial=_positive("initial", initial),
        quanta=[_positive("q", q)],
    )
    result: R = adaptive(*args)
    return result


def run_range(
    start: int,
    end: int,
    initial: int,
    function: Callable[..., object],
    /,
    *args: Any,
    q: int = 1,
    progress: bool = False,
    **options: Unpack[Options],
) -> None:
    """Call `function(begin, stop, *args)` now for parts of the range, at most `initial` long.

    Example:
        >>> import brim
        >>> parts = []
        >>> brim.run_range(0, 10, 4, lambda start, end: parts.append(end - start))
        >>> sum(parts)
        10
    """
    memory = _run_memory("range", function, options)
    adaptive = _make(
        "range",
        function,
        options,
        name="step",
        memory=memory,
        initial=_positive("initial", initial),
        quanta=[_positive("q", q)],
        progress=_bar(function, progress),
    )
    adaptive(start, end, *args)


def run_chunked(
    tensor: torch.Tensor,
    initial: int,
    function: Callable[..., object],
    /,
    *args: Any,
    dim: int = 0,
    q: int = 1,
    progress: bool = False,
    **options: Unpack[Options],
) -> None:
    """Call `function(chunk, start, end, *args)` now for chunks, at most `initial` long.

    Example:
        >>> import brim, torch
        >>> total = torch.zeros(10)
        >>> brim.run_chunked(total, 4, lambda chunk, start, end: chunk.add_(1))
        >>> total.sum()
        tensor(10.)
    """
    memory = _run_memory("chunked", function, options)
    adaptive = _make(
        "chunked",
        function,
        options,
        name="step",
        memory=memory,
        initial=_positive("initial", initial),
        dim=dim,
        quanta=[_positive("q", q)],
        progress=_bar(function, progress),
    )
    adaptive(tensor, *args)
