"""The error for arguments that are no tensors."""

from __future__ import annotations

import reprlib

from torch import Tensor

__all__ = ["refuse_others"]


def refuse_others(*, optional: tuple[str, ...] = (), **arguments: object) -> None:
    """Raise the error that says which argument is no tensor, if one is not.

    For the handler of an exception: the operators themselves say it in words of their own, and a
    check before each call would cost time.

    Args:
        optional: the names of those that may be None.
        arguments: the arguments by their names.

    Raises:
        TypeError: for the first that is neither a tensor nor takes a tensor's place (torch.fx).

    Example:
        >>> refuse_others(input=[1.0])
        Traceback (most recent call last):
            ...
        TypeError: input must be a Tensor, got [1.0] of type list
        >>> refuse_others(optional=("bias",), bias=None)
    """
    for name, value in arguments.items():
        if isinstance(value, Tensor) or hasattr(type(value), "__torch_function__"):
            continue
        if value is None and name in optional:
            continue
        allowed = "a Tensor or None" if name in optional else "a Tensor"
        raise TypeError(
            f"{name} must be {allowed}, got {reprlib.repr(value)} of type {type(value).__name__}"
        ) from None
