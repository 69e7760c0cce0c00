"""Options with one number for all dimensions, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Numbers", "each", "how_many"]

Numbers: TypeAlias = "int | Sequence[int]"
"""One number for all dimensions, or one for each."""


def each(name: str, value: Numbers, dimensions: int) -> Sequence[int]:
    """One number a dimension.

    Raises:
        ValueError: if there are neither one nor as many numbers as dimensions.

    Example:
        >>> each("stride", 2, 3), each("stride", [1], 2), each("stride", (1, 2), 2)
        ((2, 2, 2), (1, 1), (1, 2))
    """
    if type(value) is tuple and len(value) == dimensions:
        return value
    if type(value) is int or not isinstance(value, Sequence):
        return (value,) * dimensions
    if len(value) not in (1, dimensions):
        raise ValueError(f"{name} must have {how_many(dimensions)}, got {tuple(value)}")
    return tuple(value) * (dimensions if len(value) == 1 else 1)


def how_many(dimensions: int) -> str:
    """The numbers that an option may have, in words.

    Example:
        >>> how_many(1), how_many(2)
        ('1 number', '1 or 2 numbers')
    """
    return "1 number" if dimensions == 1 else f"1 or {dimensions} numbers"
