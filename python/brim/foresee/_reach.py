"""Modules, optimizers and tensors that a call can reach."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from brim.foresee._kept import attributes_of, names_in, slots_of

_MOST_OBJECTS = 20_000
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype)
HELPERS = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN = (types.SimpleNamespace, argparse.Namespace)
_FOREIGN = ("torch", "builtins", "numpy", "typing", "collections", "logging", "threading")
_LIBRARIES = tuple({os.path.join(folder, "") for folder in sysconfig.get_paths().values()})


class Reachable:
    """What a function's code, closure, instance and arguments lead to.

    Attributes:
        modules: with all their parts.
        optimizers: with their state.
        tensors: that are not in those.
        helpers: schedulers and gradient scalers.
        state: functions, containers and other objects, each with whether it is the user's own: not
            of a library, nor reached through one.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Search breadth first; what is not found here is found when the call touches it."""
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: list[torch.Tensor] = []
        self.helpers: list[Any] = []
        self.state: list[tuple[Any, bool]] = []
        seen: set[int] = set()
        queue: list[tuple[Any, bool]] = [(each, True) for each in (fn, *args, *kwargs.values())]
        for found, own in queue:  # grows while it is read
            if isinstance(found, _ATOMS) or id(found) in seen:
                continue
            if len(seen) >= _MOST_OBJECTS:
                break
            seen.add(id(found))
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
            elif not _is_foreign(found):
                own = own and not _is_of_library(found)
                self.state.append((found, own))
                queue.extend((each, own) for each in _inside(found))


def _is_foreign(found: Any) -> bool:
    """Whether it holds nothing of the user's."""
    if isinstance(found, (functools.partial, types.MethodType, Mapping, *_CONTAINERS)):
        return False
    if isinstance(found, (types.FunctionType, functools._lru_cache_wrapper)):
        return (found.__module__ or "").startswith(_FOREIGN)
    return type(found).__module__.startswith(_FOREIGN)


def _is_of_library(found: Any) -> bool:
    """Whether its code belongs to Python or to an installed package."""
    if isinstance(found, (functools.partial, types.MethodType, Mapping, *_CONTAINERS, *_PLAIN)):
        return False
    code = found if isinstance(found, types.FunctionType) else type(found)
    file = getattr(sys.modules.get(code.__module__ or ""), "__file__", None)
    return file is not None and file.startswith(_LIBRARIES)


def _kept_by(module: torch.nn.Module) -> Iterator[Any]:
    """What the parts of a module hold besides parameters, buffers and each other, such as hooks."""
    for part in module.modules():
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
        call = getattr(type(found), "__call__", None)  # noqa: B004  the function itself
        if isinstance(call, types.FunctionType):
            yield call


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    for name in names_in(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]
