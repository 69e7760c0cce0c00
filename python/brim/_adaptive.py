"""What a decoration works out once: checks, where arguments are, what is remembered."""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from brim import _C
from brim._C import Attempt, SizeMemory
from brim.memory import DeviceLike

_logger = logging.getLogger("brim")


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


def positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = int(value.__index__())
    if not 1 <= number < 2**63:
        raise ValueError(f"{name} must be between 1 and 2^63 - 1, got {number}")
    return number


def check_function(function: Callable[..., Any]) -> None:
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
        if is_one(function) or is_one(getattr(type(function), "__call__", None)):  # noqa: B004  what it is, not whether
            raise TypeError(
                f"{function!r} is {what} function: it runs after the call has "
                "returned, and cannot adapt"
            )


Slot = tuple[str, int, object]


def slots_of(function: Callable[..., Any]) -> dict[str, Slot]:
    """Name, position among positional arguments (-1: keyword only) and default of each argument."""
    slots: dict[str, Slot] = {}
    position = 0
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            slots[name] = (name, position, parameter.default)
            position += 1
        elif parameter.kind is parameter.KEYWORD_ONLY:
            slots[name] = (name, -1, parameter.default)
    return slots


def slot_of(
    function: Callable[..., Any], slots: Mapping[str, Slot], argument: str, name: str
) -> Slot:
    if name not in slots:
        raise ValueError(
            f"{argument}: {name!r} is not an argument of "
            f"{name_of(function)}: it has {', '.join(slots)}"
        )
    return slots[name]


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _log(name: str, attempt: Attempt) -> None:
    level = logging.DEBUG if attempt.fitted else logging.INFO
    _logger.log(level, "%s: %r", name, attempt)


def _memory(options: Options, salt: int) -> SizeMemory | None:
    remember, persist = options["remember"], options["persist"]
    if remember not in ("global", "call_site", "none"):
        raise ValueError(f"remember must be 'global', 'call_site' or 'none', got {remember!r}")
    if remember == "none":
        if persist:
            raise ValueError("persist asks for sizes to be kept, but remember is 'none'")
        return None
    if persist is False:
        return SizeMemory()
    if persist is not True and (not isinstance(persist, (str, os.PathLike)) or not str(persist)):
        raise TypeError(f"persist must be a bool or a directory, got {persist!r}")
    # A folder for each function, so that clearing one does not clear the others.
    folder = SizeMemory.default_directory() if persist is True else Path(persist)
    return SizeMemory(directory=folder / f"{salt:016x}")


def _key_slots(
    function: Callable[..., Any], slots: Mapping[str, Slot], options: Options
) -> list[Slot] | None:
    keys, hasher = options["keys"], options["hasher"]
    if hasher is not None and not callable(hasher):
        raise TypeError(f"hasher must be callable, got {hasher!r}")
    if keys is None:
        return None if hasher is None else list(slots.values())
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"keys must be the name of an argument or several, got {keys!r}")
    return [slot_of(function, slots, "keys", name) for name in names]


def _identity(kind: str, function: Callable[..., Any], site: str) -> int:
    """Tells functions apart in files: by name and code, since two scripts may both have a `knn`."""
    words = [kind, site, getattr(function, "__module__", ""), name_of(function)]
    code = getattr(function, "__code__", None)
    if code is not None:
        words += [code.co_filename, code.co_code.hex(), *code.co_names]
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(errors="replace"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def flag(name: str, value: object) -> bool:
    """A bool, and nothing that merely looks like one."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _word(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    return value


def make(
    kind: str,
    function: Callable[..., Any],
    given: Options,
    *,
    name: str,
    memory: SizeMemory | None = None,
    slots: Mapping[str, Slot] | None = None,
    site: str = "",
    **specific: object,
) -> Any:
    """Check what is common to all kinds and make the callable.

    Where `site` names the place of a call, sizes are kept for it alone.
    """
    unknown = given.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(
            f"unknown option(s) {', '.join(sorted(unknown))}: there are {', '.join(_DEFAULTS)}"
        )
    check_function(function)
    options: Options = {**_DEFAULTS, **given}
    if options["observer"] is not None and not callable(options["observer"]):
        raise TypeError(f"observer must be callable, got {options['observer']!r}")
    try:
        known = slots_of(function) if slots is None else slots
    except ValueError:  # a built-in function without a signature
        known = {}
    own = name_of(function)
    salt = _identity(kind, function, site)
    lower, initial = positive("lower", options["lower"]), specific.get("initial")
    if isinstance(initial, int) and lower > initial:
        raise ValueError(f"lower must not be above the initial size {initial}, got {lower}")
    adaptive = _C.make_adaptive(
        function,
        {
            "kind": kind,
            "no_default": inspect.Parameter.empty,
            "strategy": _word("strategy", options["strategy"]),
            "objective": _word("objective", options["objective"]),
            "lower": lower,
            "device": options["device"],
            "restore_random_state": flag("restore_random_state", options["restore_random_state"]),
            "exact_halving": False,  # the compat faces' own
            "name": name,
            "memory": _memory(options, salt) if memory is None else memory,
            "per_call_site": options["remember"] == "call_site" and not site,
            "keys": _key_slots(function, known, options),
            "hasher": options["hasher"],
            "salt": salt,
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
