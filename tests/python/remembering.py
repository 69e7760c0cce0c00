"""A function whose calls fit up to size 5, for the tests of what adaptive calls remember."""

from __future__ import annotations

from typing import Any

import torch

import brim


def check(size: int, most: int) -> int:
    """Fail as an allocator would, above `most`."""
    if size > most:
        raise torch.OutOfMemoryError("CPU out of memory.")
    return size


def first_size(function: Any, *args: Any, **kwargs: Any) -> int:
    """The size that a call tries first: what it remembers."""
    _, tries = function.record(*args, **kwargs)
    size: int = tries[0].size
    return size


def make(**options: Any) -> Any:
    @brim.maximize("size", strategy="halving", **options)
    def function(x: object, size: int = 64, *, mode: str = "a", other: object = None) -> int:
        return check(size, 5)

    return function


X = torch.zeros(3, 4)
