"""A time without torch.compile, which calls in several threads may want at once."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from brim._state.undoing import Undoing


class _Uncompiled:
    """torch has one setting for the process: the first sets it, the last puts it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[object, int] = {}  # by which thread
        self._before: Any = None  # what torch was set to; None while it is not changed

    def begin(self, wish: object) -> None:
        import torch._dynamo.eval_frame as dynamo  # here: it takes a second

        with self._lock:
            if self._before is None:
                self._before = dynamo._stance
                dynamo._stance = dynamo.DynamoStance("force_eager")
            self._wanted[wish] = threading.get_ident()

    def end(self, wish: object) -> None:
        with self._lock:
            self._wanted.pop(wish, None)
            if not self._wanted and self._before is not None:
                import torch._dynamo.eval_frame as dynamo

                dynamo._stance, self._before = self._before, None

    def forked(self) -> None:
        """In a child, other threads are gone, with what they wanted."""
        self._lock = threading.Lock()
        for wish, thread in list(self._wanted.items()):
            if thread != threading.get_ident():
                self.end(wish)
        self.end(object())  # of a thread that had not said yet what it wanted


_uncompiled = _Uncompiled()
os.register_at_fork(after_in_child=_uncompiled.forked)


def run_uncompiled(undo: Undoing) -> None:
    """Until the block ends, functions of torch.compile run as they were written, in all threads.

    Example:
        >>> import torch
        >>> with Undoing() as undo:
        ...     run_uncompiled(undo)
        ...     torch.compile(torch.sin, backend=lambda *_: 1 / 0)(torch.zeros(1))
        tensor([0.])
    """
    wish = object()
    undo.callback(functools.partial(_uncompiled.end, wish))
    _uncompiled.begin(wish)
