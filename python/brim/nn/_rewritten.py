"""Methods that call brim's functions where their code names torch's, without a mode around them."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional

from brim import _C
from brim.nn.saving import TABLES

__all__ = ["HOMES", "hides_calls", "redirecting"]

HOMES = frozenset([torch, torch.nn, torch.nn.functional])
"""Where code finds the functions."""


def redirecting(work: FunctionType, recompute: str | None) -> Callable[..., Any]:
    """A copy of a function whose calls of torch's functions are brim's, as in `brim.saving()`.

    Its names are looked up at each call where the function's own are, so that it follows changes.

    Example:
        >>> relu = redirecting(lambda x: torch.relu(x), None)
        >>> relu(torch.ones(2, requires_grad=True)).grad_fn.name()
        'brim::relu_backward'
    """
    names = _Names(work.__globals__, _INSTEAD[recompute])
    own = FunctionType(work.__code__, names, work.__name__, work.__defaults__, work.__closure__)
    own.__kwdefaults__ = work.__kwdefaults__
    return own


class _Names(dict[str, Any]):
    """The globals of a function; empty itself, which makes Python ask for each name."""

    def __init__(self, names: Mapping[str, Any], instead: Mapping[Any, Any]) -> None:
        super().__init__(__name__=names.get("__name__"))  # which warnings look up otherwise
        self._names, self._instead = names, instead

    def __missing__(self, name: str) -> Any:
        value = self._names[name] if name in self._names else vars(builtins)[name]
        try:
            return self._instead.get(value, value)
        except TypeError:  # not hashable
            return value


def _instead(table: Mapping[Any, Callable[..., Any]]) -> Mapping[Any, Any]:
    found: dict[Any, Any] = {**table}
    found |= {home: _C.home(home, found) for home in HOMES}
    return found


_INSTEAD = {level: _instead(table) for level, table in TABLES.items()}


def hides_calls(name: str, names: Mapping[str, Any]) -> bool:
    """Whether code that uses a global name may call functions of torch that it does not name."""
    value = names.get(name, getattr(builtins, name, hides_calls))
    if isinstance(value, ModuleType):
        return value.__name__.split(".")[0] not in ("torch", "math")
    if isinstance(value, type) or not callable(value):
        return isinstance(value, type) and issubclass(value, torch.nn.Module)
    if isinstance(value, BuiltinFunctionType):
        return value in (globals, eval, exec)  # see the names themselves
    is_torchs = (getattr(value, "__module__", None) or "").startswith("torch.")
    return not is_torchs or isinstance(value, torch.nn.Module)
