"""Functions and layers for one, two and three dimensions, and their options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

__all__ = ["Numbers", "each", "how_many", "layer", "over"]

Numbers: TypeAlias = "int | Sequence[int]"
"""One number for all dimensions, or one for each."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Layer = TypeVar("_Layer", bound=type)


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
    function: Callable[Concatenate[int, _P], _R],
    example: tuple[str, str],
    module: str = "brim.nn.functional",
    suffix: str = "",
) -> tuple[Callable[_P, _R], Callable[_P, _R], Callable[_P, _R]]:
    """`pool1d`, `pool2d` and `pool3d` from `pool`, which takes the number of dimensions first.

    The name changes in the docstring too.

    Args:
        function: takes 1, 2 or 3 first.
        example: arguments of a call and the shape of its result, for the docstring; in both "8…"
            stands for an 8 for each dimension.
        module: where users import it from.
        suffix: of its name there.
    """
    signature = inspect.signature(function)
    text = inspect.getdoc(function) or ""
    arguments, shape = example

    def make(dimensions: int) -> Callable[_P, _R]:
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return function(dimensions, *args, **kwargs)

        name = f"{function.__name__.lstrip('_')}{dimensions}d"
        call = f"import {module} as F", f"F.{name}{suffix}({arguments})"
        own: dict[str, Any] = {
            "__module__": function.__module__,
            "__name__": name,
            "__qualname__": name,
            "__doc__": text.replace(f"{function.__name__}`", f"{name}`")
            + _example(dimensions, *call, shape),
            "__signature__": signature.replace(parameters=[*signature.parameters.values()][1:]),
        }
        for attribute, value in own.items():
            setattr(run, attribute, value)
        return run

    return make(1), make(2), make(3)


def layer(kind: _Layer) -> _Layer:
    """Decorates `Pool2d`, whose first base class has the forward for any number of dimensions.

    That class has `_example` too: arguments of the layer and the shapes of its input and output,
    as for `over`.
    """
    own: Any = kind
    arguments, given, shape = own._example
    own._dimensions = int(kind.__name__[-2])
    call = "import brim", f"brim.nn.{kind.__name__}({arguments})(torch.ones({given}))"
    own.__doc__ = (own.__doc__ or "") + _example(own._dimensions, *call, shape)
    return kind


def _example(dimensions: int, imports: str, call: str, shape: str) -> str:
    text = f"""

Example:
    >>> import torch
    >>> {imports}
    >>> {call}.shape
    torch.Size([{shape}])
"""
    return re.sub(r"(\d+)…", lambda match: ", ".join([match[1]] * dimensions), text)
