"""Modules, optimizers and tensors that a call can reach."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_MOST_OBJECTS = 20_000
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype)
_HELPERS = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
_FOREIGN = ("torch", "builtins", "numpy", "typing", "collections", "logging", "threading")


class Reachable:
    """What a function's code, closure, instance and arguments lead to.

    Attributes:
        modules: with all their parts.
        optimizers: with their state.
        tensors: that are not in those.
        helpers: schedulers and gradient scalers.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Search breadth first; what is not found here is found when the call touches it."""
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: list[torch.Tensor] = []
        self.helpers: list[Any] = []
        seen: set[int] = set()
        queue: list[Any] = [fn, *args, *kwargs.values()]
        for found in queue:  # grows while it is read
            if isinstance(found, _ATOMS) or id(found) in seen:
                continue
            if len(seen) >= _MOST_OBJECTS:
                break
            seen.add(id(found))
            if isinstance(found, torch.Tensor):
                self.tensors.append(found)
            elif isinstance(found, torch.nn.Module):
                self.modules.append(found)
            elif isinstance(found, torch.optim.Optimizer):
                self.optimizers.append(found)
            elif isinstance(found, _HELPERS):
                self.helpers.append(found)
                queue.extend(found.__dict__.values())
            else:
                queue.extend(_inside(found))


def _inside(found: Any) -> Iterator[Any]:
    if isinstance(found, functools.partial):
        yield from (found.func, *found.args, *found.keywords.values())
    elif isinstance(found, types.MethodType):
        yield from (found.__self__, found.__func__)
    elif isinstance(found, types.FunctionType):
        if not (found.__module__ or "").startswith(_FOREIGN):
            yield from _of_function(found)
    elif isinstance(found, Mapping):
        yield from found.values()
    elif isinstance(found, (list, tuple, set, frozenset)):
        yield from found
    elif not type(found).__module__.startswith(_FOREIGN):
        yield from getattr(found, "__dict__", {}).values()
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
    if "__wrapped__" in function.__dict__:
        yield function.__dict__["__wrapped__"]
    codes = [function.__code__]
    for code in codes:  # grows while it is read
        codes.extend(
            constant for constant in code.co_consts if isinstance(constant, types.CodeType)
        )
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]
