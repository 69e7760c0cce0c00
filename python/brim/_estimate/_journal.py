"""Changes that are taken back, whatever happens in between: failures and interrupts too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MISSING: Any = object()
"""Stands for an attribute that is not there."""


class Journal:
    """Steps that put things back, in reverse order of their notes.

    A step is noted before its change is made, and does nothing where nothing changed: so there is
    no moment at which an interrupt leaves a change without its step, and a step may run twice.

    Example:
        >>> import types
        >>> journal, thing = Journal(), types.SimpleNamespace(size=1)
        >>> journal.set(thing, "size", 2)
        >>> journal.put_back()
        >>> thing.size
        1
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._errors: list[BaseException] = []

    def note(self, step: Callable[[], object]) -> None:
        """Put something back with this step. To be noted ahead of the change."""
        self._steps.append(step)

    def set(self, thing: Any, name: str, value: Any) -> None:
        """Change an attribute of a module, a class or an object."""
        before = vars(thing).get(name, MISSING)

        def put_back() -> None:
            if before is MISSING:
                if name in vars(thing):
                    delattr(thing, name)
            elif vars(thing).get(name) is not before:
                setattr(thing, name, before)

        self.note(put_back)
        setattr(thing, name, value)

    def put_back(self) -> None:
        """Take every step, also after one that failed or was interrupted; raise the first error.

        What was interrupted goes on: call it again where an interrupt may have ended it early.
        """
        while self._steps:
            try:
                self._steps[-1]()
            except Exception as error:
                self._errors.append(error)
            except BaseException as interrupt:  # once more, from the beginning of the step
                self._errors.insert(0, interrupt)
                if self._errors.count(interrupt) > 1:  # it is the step's own
                    self._steps.pop()
                continue
            self._steps.pop()
        if self._errors:
            first, self._errors = self._errors[0], []
            raise first
