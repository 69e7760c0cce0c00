"""Functions for one, two and three dimensions, and their options."""

from __future__ import annotations

import inspect
import re
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
    """How many numbers an option may have, for errors."""
    return "1 number" if dimensions == 1 else f"1 or {dimensions} numbers"


def over(
    dimensions: int,
    function: Callable[Concatenate[int, _P], _R],
    example: tuple[str, str],
    module: str = "brim.nn.functional",
    suffix: str = "",
) -> Callable[_P, _R]:
    """`pool2d` from `over(2, pool, …)`, where `pool` takes the number of dimensions first.

    The name changes in the docstring too.

    Args:
        dimensions: 1, 2 or 3.
        function: takes them first.
        example: arguments of a call and the shape of its result, for the docstring; in both "8…"
            stands for an 8 for each dimension.
        module: where users import it from.
        suffix: of its name there.
    """

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return function(dimensions, *args, **kwargs)

    name = f"{function.__name__.lstrip('_')}{dimensions}d"
    signature = inspect.signature(function)
    arguments, shape = (
        re.sub(r"(\d+)…", lambda match: ", ".join([match[1]] * dimensions), text)
        for text in example
    )
    text = inspect.getdoc(function) or ""
    text = text.replace(f"{function.__name__}`", f"{name}`")
    text += f"""

Example:
    >>> import torch
    >>> import {module} as F
    >>> F.{name}{suffix}({arguments}).shape
    torch.Size([{shape}])
"""
    own: dict[str, Any] = {
        "__module__": function.__module__,
        "__name__": name,
        "__qualname__": name,
        "__doc__": text,
        "__signature__": signature.replace(parameters=[*signature.parameters.values()][1:]),
    }
    for attribute, value in own.items():
        setattr(run, attribute, value)
    return run
