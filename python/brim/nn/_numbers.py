"""Functions for one, two and three dimensions, and their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

__all__ = ["Numbers", "each", "how_many", "over"]

Numbers: TypeAlias = "int | Sequence[int]"
"""One number for all dimensions, or one for each."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def each(name: str, value: Numbers, dimensions: int) -> Sequence[int]:
    """One number per dimension.

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


def over(dimensions: int, function: Callable[Concatenate[int, _P], _R]) -> Callable[_P, _R]:
    """A function for so many dimensions, of one that takes their number first.

    `pool` becomes `pool2d`, also in its docstring.

    Example:
        >>> def pool(dimensions: int, x: float) -> float:
        ...     '''As `torch.pool`.'''
        ...     return x / 2**dimensions
        >>> pool2d = over(2, pool)
        >>> pool2d(1.0), pool2d.__name__, pool2d.__doc__
        (0.25, 'pool2d', 'As `torch.pool2d`.')
    """

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return function(dimensions, *args, **kwargs)

    name = f"{function.__name__}{dimensions}d"
    signature = inspect.signature(function)
    own: dict[str, Any] = {
        "__module__": function.__module__,
        "__name__": name,
        "__qualname__": name,
        "__doc__": (function.__doc__ or "").replace(f"{function.__name__}`", f"{name}`"),
        "__signature__": signature.replace(parameters=[*signature.parameters.values()][1:]),
    }
    for attribute, value in own.items():
        setattr(run, attribute, value)
    return run
