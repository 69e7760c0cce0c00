"""The one way to put things back: also where Ctrl-C falls into the block, or into its end.

`with Undoing() as undo:` opens a block. Whatever is to be put back at its end is registered ahead
of the change: `undo.callback(step)`, or one of the functions here. All steps run, the last first,
past errors and interrupts; the first error is raised. A step sets a value, so it may run twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import _python_dispatch

from brim import _C

Undoing = _C.Undoing

MISSING: Any = object()
"""Stands for an attribute that is not there."""


def set_attribute(undo: Undoing, thing: Any, name: str, value: Any) -> None:
    """Change an attribute of a module, a class or an object until the block ends.

    Example:
        >>> import types
        >>> thing = types.SimpleNamespace(size=1)
        >>> with Undoing() as undo:
        ...     set_attribute(undo, thing, "size", 2)
        >>> thing.size
        1
    """
    before = vars(thing).get(name, MISSING)

    def put_back() -> None:
        if before is MISSING:
            if name in vars(thing):
                delattr(thing, name)
        elif vars(thing).get(name) is not before:
            setattr(thing, name, before)

    undo.callback(put_back)
    setattr(thing, name, value)


def set_variable(undo: Undoing, variable: ContextVar[bool], value: bool) -> None:
    """Change a context variable until the block ends."""
    undo.callback(functools.partial(variable.set, variable.get()))
    variable.set(value)


def undo_modes(undo: Undoing) -> None:
    """Put back torch's own notes of which dispatch modes are on, beside the modes themselves."""
    notes: dict[str, Any] = vars(_python_dispatch)
    before = {
        name: value
        for name, value in notes.items()
        if name.startswith("_is_in_") and isinstance(value, bool)
    }
    undo.callback(functools.partial(notes.update, before))
    noted = "_is_in_any_mode_without_ignore_compile_internals"  # from torch 2.12 on, in C++ too
    tell = notes.get("set_is_in_mode_without_ignore_compile_internals")
    if tell is not None and noted in before:
        undo.callback(functools.partial(tell, before[noted]))


def undo_modules(undo: Undoing, model: torch.nn.Module) -> None:
    """Put back the classes, attributes, hooks and buffers of a model's modules."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            undo.callback(functools.partial(set_buffers, module, dict(module._buffers.items())))
            continue
        attributes = vars(module)
        tables = [(each, dict(each)) for each in attributes.values() if isinstance(each, dict)]
        undo.callback(functools.partial(_put_back, module, type(module), dict(attributes), tables))


def set_buffers(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    """Give a module others of these names. Those of a ScriptModule are a view that is read-only."""
    if isinstance(module, torch.jit.ScriptModule):
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    else:
        module._buffers.update(buffers)


def _put_back(
    module: torch.nn.Module,
    kind: type[torch.nn.Module],
    attributes: dict[str, Any],
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]],
) -> None:
    if type(module) is not kind:
        module.__class__ = kind
    vars(module).clear()
    vars(module).update(attributes)
    for table, entries in tables:  # parameters, buffers, children, hooks
        if table.keys() != entries.keys() or any(table[key] is not entries[key] for key in table):
            table.clear()
            table.update(entries)
