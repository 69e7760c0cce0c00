"""The call site as a key: the frames of the stack as plain tuples."""

from __future__ import annotations

import functools
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

__all__ = ["get_simple_traceback", "set_watermark", "watermark"]

P = ParamSpec("P")
R = TypeVar("R")
Frame = tuple[str, int, str, str | None, int | None]

# How many of the outermost frames are left out, besides the first. Each thread has its own.
_watermark: ContextVar[int] = ContextVar("watermark", default=0)


def get_simple_traceback(ignore_top: int = 0) -> tuple[Frame, ...]:
    """The stack, innermost frame first: file, line number, function, line of code, its index.

    Two calls from the same place give equal results. They hold no reference to a frame.

    Args:
        ignore_top: how many innermost frames to leave out, besides that of this function.

    Example:
        >>> def here():
        ...     return get_simple_traceback()
        >>> len({here() for _ in range(3)})
        1
    """
    frames: list[Frame] = []
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        line = linecache.getline(code.co_filename, number, frame.f_globals)
        frames.append((code.co_filename, number, code.co_name, line or None, 0 if line else None))
    return tuple(frames[ignore_top : max(len(frames) - _watermark.get() - 1, ignore_top)])


def _depth() -> int:
    """The number of frames on the stack, up to the caller's."""
    return len([*traceback.walk_stack(sys._getframe(1))])


@contextmanager
def _leaving_out(frames: int) -> Iterator[None]:
    token = _watermark.set(frames)
    try:
        yield
    finally:
        _watermark.reset(token)


def watermark() -> AbstractContextManager[None]:
    """Inside the `with` block, leave out all frames outside the function that contains it.

    Example:
        >>> def inner():
        ...     return get_simple_traceback()
        >>> with watermark():
        ...     len(inner())
        2
    """
    return _leaving_out(_depth() - 3)  # besides the first, all but this frame and the caller's


def set_watermark(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that all frames outside it are left out while it runs.

    Example:
        >>> @set_watermark
        ... def outermost():
        ...     return len(get_simple_traceback())
        >>> outermost()
        1
    """

    @functools.wraps(func)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _leaving_out(_depth() - 1):
            return func(*args, **kwargs)

    return marked
