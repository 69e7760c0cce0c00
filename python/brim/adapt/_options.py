"""What a decoration works out once: checks, where arguments are, what is remembered."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from traceback import walk_stack
from typing import Any, Literal

from typing_extensions import TypedDict

from brim import _C
from brim._arguments import check_callable, flag, name_of, positive, runs_in_parts
from brim._C import Attempt, SizeMemory
from brim._state.restorable import Restorable, flat
from brim.adapt._identity import identity
from brim.memory import DeviceLike


class Options(TypedDict, total=False):
    """Options of all adaptive calls; the defaults are right for most.

    Attributes:
        strategy: `"predictive"` (default) works the next size out from the bytes that were held,
            requested and available; `"halving"` and `"bisect"` do not look at them.
        objective: `"memory"` (default) for the largest size that fits, `"throughput"` for the
            smallest one within 2 % of the best rate seen.
        lower: the floor; running out of memory there is final. 1 by default.
        device: where memory is measured; the current accelerator, else the CPU.
        remember: sizes of the function wherever it is called from (`"global"`, default), of each
            place that calls it (`"call_site"`), or not at all (`"none"`).
        capacity: how many kinds of call are remembered, 4096 by default.
        keys: names of the arguments that tell kinds of call apart, instead of the shapes, dtypes
            and devices of all tensors. Their values must be hashable.
        hasher: a function of a mapping of those arguments (all, without `keys`) to an int.
        persist: remember across processes: True for the user's cache directory, or a directory.
        restore_random_state: start a repeated call with the random state of the first attempt
            (default), so that the result does not depend on how many attempts it took.
        restore: what a failed attempt may change and is put back after it, exactly: a module (the
            gradients of its parameters, its buffers), an optimizer (its parameters with their
            gradients, and its state), a tensor (its values and gradient), a learning-rate
            scheduler, a GradScaler, a pair of callables `(save, put_back)` (`put_back(save())`),
            the name of an argument that is one of these, or a list of them. What is there is copied
            ahead of each call.
        host_limit: for calls on the CPU: refuse what the machine and its cgroups do not have
            (default), so that the size shrinks where the system would kill the process.
        ranks: agree on the size with the other ranks of a torch.distributed job: True for the
            default process group, or a group. All ranks make the same calls and use the same size,
            the least that fits on each. The work itself must contain no collective, unless
            `collectives` says so. Without a process group it has no effect.
        per_rank: with `ranks`, each rank keeps its own size; all learn whether all succeeded.
        sync: with `ranks`, `"always"` (default) for one exchange of messages per call,
            `"settled"` for one in 64 calls once the size stays the same; for none in
            `Microbatches`, whose reduction reports failures.
        collectives: with `ranks`, where the work has collectives: `"between"` calls (default), or
            `"inside"` (FSDP, tensor parallel): then sizes start small and grow only as far as is
            known to fit on every rank, and running out of memory is final on all of them.
        observer: called with each `Attempt` after it ended.

    Example:
        >>> import brim
        >>> options = brim.Options(strategy="halving", lower=8)
        >>> brim.run_batch(64, lambda size: size, **options)
        64
    """

    strategy: Literal["predictive", "halving", "bisect"]
    objective: Literal["memory", "throughput"]
    lower: int
    device: DeviceLike
    remember: Literal["global", "call_site", "none"]
    capacity: int
    keys: str | Iterable[str] | None
    hasher: Callable[[Mapping[str, Any]], int] | None
    persist: bool | str | os.PathLike[str]
    restore_random_state: bool
    restore: Restorable | Iterable[Restorable] | None
    host_limit: bool
    ranks: Any
    per_rank: bool
    sync: Literal["always", "settled"]
    collectives: Literal["between", "inside"]
    observer: Callable[[Attempt], object] | None


def inside(function: Any, name: str = "function") -> tuple[Callable[..., Any], str]:
    """The function inside a class or static method, and what it is bound to."""
    binding = {classmethod: "owner", staticmethod: "none"}.get(type(function), "instance")
    inner = function if binding == "instance" else function.__func__
    check_callable(name, inner)
    call = getattr(type(inner), "__call__", None)  # noqa: B004  what it is, not whether
    kind = runs_in_parts(inner) or runs_in_parts(call)
    if kind:
        raise TypeError(
            f"{inner!r} is {kind} function: it runs after the call has returned, and cannot adapt"
        )
    return inner, binding


#: Name, position among positional arguments (-1: keyword only), and the default where there is one.
Slot = tuple[str, int] | tuple[str, int, object]


# After how many of the caller's arguments brim passes how many of its own.
_PASSED = {"batch": (0, 1), "chunked": (1, 2)}


def has_receiver(signature: inspect.Signature) -> bool:
    """Whether it is that of a method. In a class body a function is not bound yet."""
    return next(iter(signature.parameters), "") in ("self", "cls")


def as_called(kind: str, signature: inspect.Signature) -> inspect.Signature:
    """The signature that callers see: without the arguments that brim passes."""
    at, count = _PASSED.get(kind, (0, 0))
    at += has_receiver(signature)
    parameters = list(signature.parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    passed = [p for p in parameters[at : at + count] if p.kind in positional]
    return signature.replace(parameters=[p for p in parameters if p not in passed])


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature; an empty one for a built-in function that has none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.Signature()


def slots_of(signature: inspect.Signature) -> dict[str, Slot]:
    """Where each argument is found, apart from `*args` and `**kwargs`."""
    slots: dict[str, Slot] = {}
    for position, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        place = -1 if parameter.kind is parameter.KEYWORD_ONLY else position
        default = () if parameter.default is parameter.empty else (parameter.default,)
        slots[name] = (name, place, *default)
    return slots


def slot_of(
    function: Callable[..., Any], slots: Mapping[str, Slot], argument: str, name: str
) -> Slot:
    if name not in slots:
        raise ValueError(
            f"{argument}: {name!r} is not an argument of "
            f"{name_of(function)}: it has "
            + (", ".join(slots) or "none by name. Wrap it in a function that has it")
        )
    return slots[name]


def _directory(persist: object) -> Path | None:
    if persist is not True and (not isinstance(persist, (str, os.PathLike)) or not str(persist)):
        raise TypeError(f"persist must be a bool or a directory, got {persist!r}")
    try:
        folder = SizeMemory.default_directory() if persist is True else Path(persist)
        return folder.expanduser().absolute()
    except RuntimeError as error:  # there is no home directory
        reason = str(error).partition("\n")[0]
        warnings.warn(f"persist={persist!r}: nothing is kept. {reason}", stacklevel=2)
        return None


def remembered(options: Options, salt: int) -> SizeMemory | None:
    """The memory that the options ask for; in files it belongs to the function with that salt."""
    remember, persist = options.get("remember", "global"), options.get("persist", False)
    capacity = positive("capacity", options.get("capacity", 4096))
    if remember not in ("global", "call_site", "none"):
        raise ValueError(f"remember must be 'global', 'call_site' or 'none', got {remember!r}")
    if remember == "none":
        if persist:
            raise ValueError("persist asks for sizes to be kept, but remember is 'none'")
        return None
    folder = None if persist is False else _directory(persist)
    # A folder for each function, so that clearing one does not clear the others.
    return SizeMemory(capacity, None if folder is None else folder / f"{salt:016x}")


def _key_slots(
    function: Callable[..., Any], slots: Mapping[str, Slot], options: Options
) -> list[Slot] | None:
    keys, hasher = options.get("keys"), options.get("hasher")
    if hasher is not None:
        check_callable("hasher", hasher)
    if keys is None:
        return None if hasher is None else list(slots.values())
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"keys must be the name of an argument or several, got {keys!r}")
    return [slot_of(function, slots, "keys", name) for name in names]


def _restored(
    kind: str, function: Callable[..., Any], slots: Mapping[str, Slot], given: Options
) -> dict[str, Any]:
    """What `restore` asks for: things, arguments by name, and whether it names the chunk."""
    restore = given.get("restore")
    things = [] if restore is None else flat(restore)
    if not things:
        return {"restore": None}
    names = [name for name in things if isinstance(name, str)]
    chunk = next((n for n in slots if n not in ("self", "cls")), "") if kind == "chunked" else ""
    return {
        "restore": [thing for thing in things if not isinstance(thing, str)],
        "restore_arguments": [
            slot_of(function, slots, "restore", name) for name in names if name != chunk
        ],
        "restores_chunk": chunk in names,
    }


def reduce(adaptive: Any, recipe: Callable[[], Any]) -> object:
    """How an adaptive function is pickled: by its name, as a function is.

    A partial or a callable object has no name and is pickled by value. So is what another process
    cannot import, if cloudpickle asks. Many libraries have a copy of that, so its frame is sought.
    """
    if not hasattr(adaptive, "__qualname__"):
        return _C.AdaptiveFunction, (), recipe
    if adaptive.__module__ == "__main__" or "<locals>" in adaptive.__qualname__:
        for frame, _ in walk_stack(sys._getframe(1)):
            pickler = type(frame.f_locals.get("self") if frame.f_code.co_name == "dump" else None)
            names = [f"{base.__module__}.{base.__name__}".lower() for base in pickler.__mro__]
            if any("cloudpickle" in name for name in names):
                return _C.AdaptiveFunction, (), recipe
    return adaptive.__qualname__


_C.provide(reduce=reduce)

RANK_OPTIONS = ("per_rank", "sync", "collectives")


def rank_setting(given: Options, function: str) -> Any:
    """How the function agrees with other ranks; None where it does not."""
    ranks = given.get("ranks", False)
    chosen = {name: given[name] for name in RANK_OPTIONS if name in given}  # type: ignore[literal-required]
    if ranks is False or ranks is None:
        if chosen:
            raise ValueError(f"{', '.join(chosen)} needs ranks=True or a process group")
        return None
    from brim.dist import RankSetting  # only jobs of several processes need torch.distributed

    return RankSetting(ranks, function, **chosen)


_NAMES = {"batch": "batch size", "range": "step", "chunked": "step"}


def make(
    kind: str,
    function: Callable[..., Any],
    given: Options,
    *,
    memory_of: Callable[[Options, int], SizeMemory | None] = remembered,
    ranks_of: Callable[[Options, str], Any] = rank_setting,
    slots: Mapping[str, Slot] | None = None,
    site: str = "",
    **specific: Any,
) -> Any:
    """Check what is common to all kinds and make the callable.

    Where `site` names the place of a call, sizes are kept for it alone.
    """
    unknown = given.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option(s) {', '.join(sorted(unknown))}: there are "
            f"{', '.join(Options.__annotations__)}"
        )
    recipe = functools.partial(make, kind, function, given, slots=slots, site=site, **specific)
    function, binding = inside(function)
    observer, initial = given.get("observer"), specific.get("initial")
    if observer is not None:
        check_callable("observer", observer)
    signature = inspect.Signature() if slots is not None else signature_of(function)
    if slots is None:
        slots = slots_of(as_called(kind, signature))
    salt = identity(kind, function, site) if given.get("persist") else 0
    lower = positive("lower", given.get("lower", 1))
    if initial is not None and lower > initial:
        raise ValueError(f"lower must not be above the initial size {initial}, got {lower}")
    for name in ("restore_random_state", "host_limit"):
        flag(name, given.get(name, True))
    adaptive = _C.make_adaptive(
        function,
        {
            "kind": kind,
            "name": _NAMES.get(kind),
            "binding": binding,
            "has_receiver": has_receiver(signature),
            "recipe": recipe,
            "memory": memory_of(given, salt),
            "salt": salt,
            "per_call_site": given.get("remember") == "call_site" and not site,
            "log_name": name_of(function),
            **given,
            "ranks": ranks_of(given, f"{kind} {name_of(function)}"),
            "keys": _key_slots(function, slots, given),
            **_restored(kind, function, slots, given),
            "argument_names": [slot[0] for slot in slots.values() if slot[1] >= 0],
            **specific,
        },
    )
    for attribute in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(function, attribute):
            setattr(adaptive, attribute, getattr(function, attribute))
    adaptive.__dict__.update(getattr(function, "__dict__", {}))
    if signature.parameters and kind in _PASSED:
        adaptive.__signature__ = as_called(kind, signature)
    return adaptive
