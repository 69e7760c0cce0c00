"""Python state as it was before a trace: what containers, objects, closures and globals hold."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from brim._state.reach import attributes_of, names_in, slots_of
from brim._state.undoing import MISSING


class Kept:
    """Puts back what Python objects referred to, in place: a trace leaves tensors without values.

    Objects of C and C++ are not covered.

    Args:
        callback: gets each step that puts something back.
    """

    def __init__(self, callback: Callable[[Callable[[], object]], object]) -> None:
        self._note = callback
        self._known: dict[int, object] = {}  # by address, and alive so that addresses stay theirs
        callback(self._known.clear)

    def keep(self, thing: Any, own: bool = True) -> None:
        """Put back what a container, an object, a class, a closure or a cache holds now.

        Args:
            thing: what holds it.
            own: false for what a library has to itself, and perhaps uses in other threads: it is
                put back only if a tensor without values is left in it.
        """
        if id(thing) in self._known:
            return
        self._known[id(thing)] = thing
        if isinstance(thing, (dict, list, set, deque)):
            self._contents(thing, own)
        elif isinstance(thing, types.FunctionType):
            if own:
                self._function(thing)
        elif isinstance(thing, type):
            if own:
                self._class(thing)
        elif isinstance(thing, functools._lru_cache_wrapper):
            misses = thing.cache_info().misses
            self._note(lambda: None if thing.cache_info().misses == misses else thing.cache_clear())
        else:
            self.keep(attributes_of(thing), own)
            for member, _ in slots_of(thing):
                access = (member.__get__, member.__set__, member.__delete__)
                self._place(access, thing, own=own)

    def keep_with_contents(self, thing: dict[str, Any]) -> None:
        """Put back the attributes of an object, and what is in containers among them."""
        self.keep(thing)
        for value in thing.values():
            if isinstance(value, (dict, list, set, deque)):
                self.keep(value)

    def _contents(self, container: Any, own: bool) -> None:
        before = dict(container) if isinstance(container, dict) else list(container)
        then = _parts(container)

        def put_back() -> None:
            now = _parts(container)
            if not own and not any(isinstance(each, FakeTensor) for each in now):
                return
            if len(now) != len(then) or any(map(operator.is_not, now, then)):
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(before)

        self._note(put_back)

    def _function(self, function: types.FunctionType) -> None:
        self.keep(function.__dict__)
        for cell in function.__closure__ or ():
            if id(cell) not in self._known:
                self._known[id(cell)] = cell
                self._place((getattr, setattr, delattr), cell, "cell_contents")
        access = (operator.getitem, operator.setitem, operator.delitem)
        for name in names_in(function.__code__):
            self._place(access, function.__globals__, name)

    def _class(self, kind: type) -> None:
        def attributes() -> dict[str, Any]:
            return {name: each for name, each in vars(kind).items() if not name.startswith("__")}

        before = attributes()

        def put_back() -> None:
            now = attributes()
            for name in now.keys() - before.keys():
                delattr(kind, name)
            for name, value in before.items():
                if now.get(name, MISSING) is not value:
                    setattr(kind, name, value)

        self._note(put_back)

    def _place(self, access: tuple[Callable[..., Any], ...], *at: Any, own: bool = True) -> None:
        """Put back what a slot, a cell or a name refers to.

        Args:
            access: reads, writes and deletes it.
            at: what these are called with first.
            own: as in `keep`.
        """
        read, write, delete = (functools.partial(each, *at) for each in access)
        before = _read(read)

        def put_back() -> None:
            now = _read(read)
            if now is before or not (own or isinstance(now, FakeTensor)):
                return
            with contextlib.suppress(AttributeError):  # C's members may be read-only
                delete() if before is MISSING else write(before)

        self._note(put_back)


def _parts(container: Any) -> list[Any]:
    """What it consists of: keys and values of a dict."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AttributeError, KeyError, ValueError):  # not assigned yet, or deleted
        return MISSING
