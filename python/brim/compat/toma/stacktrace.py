"""Where a call came from, as a key: the frames of the stack as plain tuples."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import ParamSpec, TypeVar

__all__ = ["get_simple_traceback", "set_watermark", "watermark"]

P = ParamSpec("P")
R = TypeVar("R")
Frame = tuple[str, int, str, str | None, int | None]

# How many of the outermost frames are left out besides the very first. Each thread has its own.
_watermark: ContextVar[int] = ContextVar("watermark", default=0)


def get_simple_traceback(ignore_top: int = 0) -> tuple[Frame, ...]:
    """The stack, innermost frame first: file, line number, function, line of code, its index.

    Two calls from the same place give equal results, which refer to no frame.

    Args:
        ignore_top: how many frames to leave out at the inner end, besides this function's own.

    Example:
        >>> def here():
        ...     return get_simple_traceback()
        >>> len({here() for _ in range(3)})
        1
    """
    frame: FrameType | None = sys._getframe(1)
    frames: list[Frame] = []
    while frame is not None:
        code, number = frame.f_code, frame.f_lineno
        line = linecache.getline(code.co_filename, number, frame.f_globals)
        frames.append((code.co_filename, number, code.co_name, line or None, 0 if line else None))
        frame = frame.f_back
    return tuple(frames[ignore_top : max(len(frames) - _watermark.get() - 1, ignore_top)])


def _depth() -> int:
    """How many frames there are up to the caller's own."""
    frame = sys._getframe(1)
    depth = 1
    while frame.f_back is not None:
        frame = frame.f_back
        depth += 1
    return depth


@contextmanager
def watermark() -> Iterator[None]:
    """Inside the `with` block, leave out all frames that are outside of the function it is in.

    Example:
        >>> def inner():
        ...     return get_simple_traceback()
        >>> with watermark():
        ...     len(inner())
        2
    """
    # Besides the caller's frame, which stays, there are this one's and that of `with`.
    token = _watermark.set(_depth() - 4)
    try:
        yield
    finally:
        _watermark.reset(token)


def set_watermark(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that all frames outside of it are left out while it runs."""

    @functools.wraps(func)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _watermark.set(_depth() - 1)
        try:
            return func(*args, **kwargs)
        finally:
            _watermark.reset(token)

    return marked
