"""Checks of arguments: what is wrong is an error at once that names the argument and its value."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any, cast

import torch

from brim import _C


def shown(value: object) -> str:
    """A value in an error: in a few words, whatever it holds.

    Example:
        >>> shown(torch.zeros(8, 4)), shown(torch.nn.Sequential()), shown("text")
        ('a tensor of shape [8, 4]', 'a module Sequential', "'text'")
    """
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return f"a module {type(value).__name__}"
    return f"{value!r:.100}"


_C.provide(shown=shown)


def name_of(function: Any) -> str:
    """The name of a function; of a partial, that of the function inside."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", repr(function))


def whole(name: str, value: object, least: int, below: int = 2**63) -> int:
    """An int from `least` up to, but not including, `below`. NumPy's ints count; bools do not.

    Example:
        >>> whole("rank", -1, 0)
        Traceback (most recent call last):
        ValueError: rank must be at least 0, got -1
    """
    try:
        number = operator.index(cast(Any, None if isinstance(value, bool) else value))
    except TypeError:
        raise TypeError(f"{name} must be an int, got {shown(value)}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number >= below:
        raise ValueError(f"{name} must be below 2**{below.bit_length() - 1}, got {number}")
    return number


def positive(name: str, value: object) -> int:
    """An int of at least 1 that fits 64 bits."""
    return whole(name, value, 1)


def real(name: str, value: object) -> float:
    """A number, which may be NumPy's or a tensor of one element."""
    try:
        return float(cast(Any, None if isinstance(value, (str, bytes, bool)) else value))
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises any of them
        if _C.classify_error(error):
            raise
        raise TypeError(f"{name} must be a number, got {shown(value)}") from None


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that is merely truthy."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_callable(name: str, value: object) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {shown(value)}")


def runs_in_parts(function: object) -> str:
    """What kind of function runs after its call has returned; empty if it does not.

    Example:
        >>> runs_in_parts(lambda: (yield)), runs_in_parts(len)
        ('a generator', '')
    """
    for kind, is_one in (
        ("a coroutine", inspect.iscoroutinefunction),
        ("an async generator", inspect.isasyncgenfunction),
        ("a generator", inspect.isgeneratorfunction),
    ):
        if is_one(function):
            return kind
    return ""


def check_decorated(what: str, function: object, inside: str) -> None:
    """Refuse what a decorator cannot open anew for each call.

    Args:
        what: the decorator, for the error.
        function: what it got.
        inside: what to do in a function that runs after its call has returned.

    Example:
        >>> check_decorated("a budget", 3, "open it inside")
        Traceback (most recent call last):
        TypeError: a budget decorates a function, below @classmethod and @staticmethod, got 3
    """
    if isinstance(function, (type, classmethod, staticmethod)) or not callable(function):
        raise TypeError(
            f"{what} decorates a function, below @classmethod and @staticmethod, got "
            f"{shown(function)}"
        )
    kind = runs_in_parts(function) or runs_in_parts(type(function).__call__)
    if kind:
        raise TypeError(
            f"{shown(function)} is {kind} function, which runs after the call has returned: "
            f"{inside}"
        )


def refused(function: Any, count: int, *, more: bool = False) -> str:
    """The signature of a function that cannot be called with so many arguments; else empty.

    With `more`, others may follow. A function of C may have no signature, and is not judged.

    Example:
        >>> refused(lambda x, y: 0, 1), refused(lambda x, y: 0, 1, more=True)
        ('(x, y)', '')
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        (signature.bind_partial if more else signature.bind)(*[None] * count)
    except TypeError:
        return str(signature)
    return ""


def check_recompute(recompute: str | None) -> None:
    """Refuse any other value."""
    if recompute not in (None, "cheap", "products", "auto"):
        raise ValueError(
            f'recompute must be None, "cheap", "products" or "auto", got {recompute!r}'
        )
