"""Options with one number for all dimensions, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Numbers", "each"]

Numbers: TypeAlias = "int | Sequence[int]"
"""One number for all dimensions, or one for each."""


def each(value: Numbers, dimensions: int) -> Sequence[int]:
    """One number a dimension.

    Example:
        >>> each(2, 3), each([1], 2), each((1, 2), 2)
        ((2, 2, 2), (1, 1), (1, 2))
    """
    if type(value) is tuple and len(value) == dimensions:
        return value
    if isinstance(value, Sequence):
        return tuple(value) * dimensions if len(value) == 1 else tuple(value)
    return (value,) * dimensions
