"""What identifies functions and modules in files: numbers that are the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from brim import _C
from brim._C import AdaptiveFunction

_CONSTANTS = (
    *(bool, float, complex, str, bytes, range, slice, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout),
)
_MOST_ITEMS = 1000  # a longer tuple is data, not part of a program


def _description(value: object, above: tuple[int, ...] = ()) -> str:
    """Text for a value that is the same in every process.

    Constants by value; functions by name, code and what they are bound to (defaults, closures, the
    arguments of a `partial`); all else by type. A list, set or dict is not a constant: a function
    may collect its results in one.
    """
    if id(value) in above:
        return "above"
    above = (*above, id(value))

    def several(*values: object) -> str:
        return f"{type(value).__name__}({','.join(_description(each, above) for each in values)})"

    if isinstance(value, _CONSTANTS):
        return repr(value)
    if isinstance(value, int):
        return hex(value)  # in decimal, Python refuses long ones
    if isinstance(value, (tuple, frozenset)) and len(value) > _MOST_ITEMS:
        return several(len(value))
    if isinstance(value, tuple):
        return several(*value)
    if isinstance(value, frozenset):
        return several(*sorted(_description(each, above) for each in value))
    if isinstance(value, types.CodeType):
        return several(value.co_name, value.co_code, value.co_names, value.co_consts)
    if isinstance(value, functools.partial):
        return several(value.func, value.args, *sorted(value.keywords.items(), key=itemgetter(0)))
    if isinstance(value, AdaptiveFunction):
        return several(value.__wrapped__)
    if isinstance(value, types.MethodType):
        return several(value.__func__, type(value.__self__))
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if isinstance(value, types.FunctionType):
        # The file of the module: a notebook has none, and its code has another name in every run.
        file = value.__globals__.get("__file__", "")
        closure = []
        for cell in value.__closure__ or ():
            try:
                closure.append(cell.cell_contents)
            except ValueError:  # not filled yet
                closure.append(None)
        name = name.replace("__mp_main__", "__main__", 1)
        named = tuple(sorted((value.__kwdefaults__ or {}).items(), key=itemgetter(0)))
        return several(name, file, value.__code__, value.__defaults__, named, tuple(closure))
    if isinstance(value, type) or inspect.isroutine(value):
        return name
    return several(type(value), getattr(type(value), "__call__", None))  # noqa: B004  which one


def identity(kind: str, function: Callable[..., Any], site: str) -> int:
    """A number that identifies a function in files, the same in every process."""
    return _hash(f"{kind}\0{site}\0{_description(function)}")


_structures: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def structure(module: torch.nn.Module) -> int:
    """A hash of a module's classes, `extra_repr`s and parameters, worked out once per module."""
    known = _structures.get(module)
    if known is None:
        words = [
            f"{name}:{type(layer).__module__}.{type(layer).__qualname__}({_configuration(layer)})"
            for name, layer in module.named_modules()
        ]
        for name, tensor in module.named_parameters():
            words.append(f"{name}:{tensor.dtype}{list(tensor.shape)}")
        known = _structures[module] = _hash("\0".join(words), signed=True)
    return known


_C.provide(structure=structure, Module=torch.nn.Module)


def _configuration(layer: torch.nn.Module) -> str:
    try:
        return layer.extra_repr()
    except Exception:  # it is for people, and a layer half made may not have what it prints
        return ""


def _hash(text: str, *, signed: bool = False) -> int:
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=signed)
