"""Blocks of code that leave a model, and torch, as they were: also where Ctrl-C falls into them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _python_dispatch

from brim import _C

__all__ = ["Undoing", "undo_modes", "undo_modules"]

Undoing = _C.Undoing


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
    """Put back the classes, attributes and hooks of a model's modules."""
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            attributes = vars(module)
            tables = [(each, dict(each)) for each in attributes.values() if isinstance(each, dict)]
            put_back = functools.partial(_put_back, module, type(module), dict(attributes), tables)
            undo.callback(put_back)


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
