"""Where in the user's code an allocation is made: file, line and module."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from brim._users_code import users_file


def _users(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    """The lines among these that are neither torch's, brim's nor Python's."""
    for frame, line in frames:
        name = users_file(frame.f_code.co_filename)
        if name is not None:
            yield f"{name}:{line}"


def current_line() -> str:
    """The innermost line of code that is neither torch's nor brim's."""
    return next(_users(traceback.walk_stack(sys._getframe(1))), "")


def line_of(error: BaseException) -> str:
    """The innermost such line of an exception's traceback."""
    lines = list(_users(traceback.walk_tb(error.__traceback__)))
    return lines[-1] if lines else ""


class ModuleStack:
    """Which module runs now, followed by torch's global hooks.

    Args:
        on_call: called with each module before its forward.
        is_here: whether the calling thread is the one to follow: the hooks are those of all.
    """

    def __init__(self, on_call: Any, is_here: Callable[[], bool]) -> None:
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[torch.nn.Module] = []
        self._on_call = on_call
        self._is_here = is_here

    def name(self, module: torch.nn.Module) -> str:
        """The path of a module in the outermost one it was found in, else its class."""
        return self._names.get(module) or type(module).__name__

    def add(self, root: torch.nn.Module) -> None:
        """Learn the names of a module's parts."""
        for name, module in root.named_modules():
            self._names.setdefault(module, name)

    def place(self) -> str:
        """The line, and the module if one runs."""
        line = current_line()
        return f"{line} {self.name(self._stack[-1])}" if self._stack else line

    def follow(self) -> None:
        """Follow calls of all modules, until torch's hooks are put back."""
        torch_module.register_module_forward_pre_hook(self._enter)
        torch_module.register_module_forward_hook(self._leave, always_call=True)

    def _enter(self, module: torch.nn.Module, inputs: object) -> None:
        if self._is_here():
            self._on_call(module)
            self._stack.append(module)

    def _leave(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        while self._stack and self._is_here():
            if self._stack.pop() is module:
                break

    # Some layers do not call a part that has no hooks. These hooks do not count.
    vars(_enter)["of_estimate"] = vars(_leave)["of_estimate"] = True
