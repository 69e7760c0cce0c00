"""Hashes of calls: those with the same hash share the values that fitted."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

__all__ = ["KeyHasher", "flatten_variadic_keyword_arguments", "hashable_key"]


def hashable_key(value: Any) -> Any:
    """What is hashed for a value: of a tensor its shape, dtype and device, else the value."""
    if isinstance(value, torch.Tensor):
        return "torch.Tensor", tuple(value.shape), value.dtype, value.device
    return value


class KeyHasher:
    """Hashes some of the arguments of a call, by their names."""

    @staticmethod
    def normalize_keys(keys: Collection[str] | str | None) -> Collection[str]:
        """The names as a collection; `keys` may be one name or None."""
        if keys is None:
            return []
        return [keys] if isinstance(keys, str) else keys

    def __init__(self, keys: Collection[str] | str | None) -> None:
        self.keys = self.normalize_keys(keys)

    def __call__(self, kwargs: Mapping[str, Any]) -> int:
        """The hash of the values of the keys; a missing key counts as None."""
        return hash(tuple(hashable_key(kwargs.get(key)) for key in self.keys))


def flatten_variadic_keyword_arguments(bound_arguments: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments by name, including those in a `**kwargs` parameter."""
    flat: dict[str, Any] = {}
    parameters = bound_arguments.signature.parameters
    for name, value in bound_arguments.arguments.items():
        is_variadic = parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        flat.update(value if is_variadic else {name: value})
    return flat
