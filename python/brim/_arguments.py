"""Checks of arguments that all modules share. Errors name the argument and the value."""

from __future__ import annotations


def whole(name: str, value: object, least: int = 1, below: int = 2**63) -> int:
    """Check for an int in [least, below). NumPy's ints are allowed, bools are not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r:.100}")
    number = int(value.__index__())
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number >= below:
        raise ValueError(f"{name} must be below 2**{below.bit_length() - 1}, got {number}")
    return number


def flag(name: str, value: object) -> bool:
    """Check for a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r:.100}")
    return value
