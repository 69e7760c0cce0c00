"""Modules, optimizers and tensors that a call can reach."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

#: What an optimizer's step involves besides the optimizer.
HELPERS = (GradScaler, LRScheduler)

_MOST_OBJECTS = 20_000
_MANY = 1_000  # data rather than parts of the program
_ATOMS = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN = (types.SimpleNamespace, argparse.Namespace)
_TARGETS = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, *HELPERS)
_FOREIGN = {"torch", "builtins", "numpy", "typing", "collections", "logging", "threading"}
_NOT_FOLLOWED = {*_FOREIGN, "brim", *sys.builtin_module_names}
_LIBRARIES = tuple({os.path.join(folder, "") for folder in sysconfig.get_paths().values()})


class Reachable:
    """What a function's code, closure, instance and arguments lead to.

    Attributes:
        modules: with all their parts.
        optimizers: with their state.
        tensors: that are not in those.
        helpers: schedulers and gradient scalers.
        state: functions, containers, classes and other objects, each with whether it is the user's
            own: not of a library, nor reached through one.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Search breadth first, what is in large containers last, and not all of it.

        What is not found here is found when the call touches it.
        """
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: list[torch.Tensor] = []
        self.helpers: list[Any] = []
        self.state: list[tuple[Any, bool]] = []
        seen: dict[int, object] = {}  # by address, and alive so that addresses stay theirs
        queue = deque((each, True) for each in (fn, *args, *kwargs.values()))
        large: deque[tuple[Any, bool]] = deque()
        while queue or large:
            if not queue:
                inside, own = large.popleft()
                queue.extend((each, own) for each in islice(_inside(inside), _MOST_OBJECTS))
                continue
            found, own = queue.popleft()
            if isinstance(found, _ATOMS) or id(found) in seen:
                continue
            if len(seen) >= _MOST_OBJECTS:
                break
            seen[id(found)] = found
            if isinstance(found, torch.Tensor):
                self.tensors.append(found)
            elif isinstance(found, torch.nn.Module):
                self.modules.append(found)
                queue.extend((each, own) for each in _kept_by(found))
            elif isinstance(found, torch.optim.Optimizer):
                self.optimizers.append(found)
            elif isinstance(found, HELPERS):
                self.helpers.append(found)
                queue.extend((each, own) for each in found.__dict__.values())
            elif isinstance(found, type):
                if own and _is_users(found):
                    self.state.append((found, own))
            elif not _is_foreign(found):
                own = own and not _is_of_library(found)
                self.state.append((found, own))
                if isinstance(found, (Mapping, *_CONTAINERS)) and len(found) > _MANY:
                    large.append((found, own))
                else:
                    queue.extend((each, own) for each in _inside(found))


def attributes_of(thing: object) -> dict[str, Any]:
    """An object's `__dict__`, empty if it has none."""
    try:
        found = thing.__dict__
    except Exception:  # it may be a property
        return {}
    return found if isinstance(found, dict) else {}


def slots_of(thing: object) -> Iterator[tuple[types.MemberDescriptorType, Any]]:
    """The attributes of an object that are not in its `__dict__`, each with its value."""
    for base in type(thing).__mro__:
        for member in vars(base).values():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    yield member, member.__get__(thing)


def names_in(code: types.CodeType) -> set[str]:
    """Names that code and the functions within it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(itertools.chain(code.co_names, *map(names_in, inner)))


def _top_level(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_foreign(found: Any) -> bool:
    """Whether it holds nothing of the user's."""
    if isinstance(found, (functools.partial, types.MethodType, Mapping, *_CONTAINERS)):
        return False
    if isinstance(found, (types.FunctionType, functools._lru_cache_wrapper)):
        return _top_level(found.__module__) in _FOREIGN
    return _top_level(type(found).__module__) in _FOREIGN


def _is_of_library(found: Any) -> bool:
    """Whether its code belongs to Python or to an installed package."""
    if isinstance(found, (functools.partial, types.MethodType, Mapping, *_CONTAINERS, *_PLAIN)):
        return False
    code = found if isinstance(found, types.FunctionType) else type(found)
    return _is_library(sys.modules.get(code.__module__ or ""))


def _is_users(kind: type) -> bool:
    module = kind.__module__
    return _top_level(module) not in _NOT_FOLLOWED and not _is_library(sys.modules.get(module))


def _is_library(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and file.startswith(_LIBRARIES)


def _kept_by(module: torch.nn.Module) -> Iterator[Any]:
    """What the parts of a module hold besides parameters, buffers and each other, such as hooks."""
    for part in module.modules():
        yield from _of_class(type(part))
        for name, value in part.__dict__.items():
            empty = isinstance(value, (dict, *_CONTAINERS)) and not value
            if name not in ("_parameters", "_buffers", "_modules") and not empty:
                yield value


def _inside(found: Any) -> Iterator[Any]:
    if isinstance(found, functools.partial):
        yield from (found.func, *found.args, *found.keywords.values())
    elif isinstance(found, types.MethodType):
        yield from (found.__self__, found.__func__)
    elif isinstance(found, types.FunctionType):
        yield from _of_function(found)
    elif isinstance(found, functools._lru_cache_wrapper):
        yield found.__wrapped__
    elif isinstance(found, Mapping):
        yield from found.values()
    elif isinstance(found, _CONTAINERS):
        yield from found
    else:
        yield from attributes_of(found).values()
        yield from (value for _, value in slots_of(found))
        yield from _of_class(type(found))
        call = getattr(type(found), "__call__", None)  # noqa: B004  the function itself
        if isinstance(call, types.FunctionType):
            yield call


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            cells.append(cell.cell_contents)
    yield from cells
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    names = names_in(function.__code__)
    globals_ = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from globals_
    for holder in (*globals_, *cells):
        yield from _named_in(holder, names)


def _of_class(kind: type) -> Iterator[Any]:
    """A class of the user's, and the models and the like that it holds for all of its objects."""
    for base in kind.__mro__:
        if _top_level(base.__module__) not in _FOREIGN:
            yield base
            yield from (value for value in vars(base).values() if isinstance(value, _TARGETS))


def _named_in(holder: Any, names: set[str]) -> Iterator[Any]:
    """What code that uses these names finds in a module or a class of the user's."""
    seen: set[int] = set()
    holders = [holder]
    for each in holders:  # grows while it is read
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            yield from _of_class(each)
        elif isinstance(each, types.ModuleType) and not (
            _top_level(each.__name__) in _NOT_FOLLOWED or _is_library(each)
        ):
            found = [value for name, value in vars(each).items() if name in names]
            yield from found
            holders += found
