"""What the `from_nn_*` functions share."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def adopt(
    cls: type[ModuleT], argument: str, layer: torch.nn.Module, expected: type[torch.nn.Module]
) -> ModuleT:
    """Make a `cls` with everything that `layer` has: options, tensors, hooks, training flag.

    The tensors are the same objects; parameters or hooks that are set later belong to one alone.

    Raises:
        TypeError: if `layer` is not of the type expected.
        ValueError: if it is parametrized, or lazy and not run yet.

    Example:
        >>> import brim
        >>> layer = torch.nn.Linear(3, 2).eval()
        >>> same = adopt(brim.nn.Linear, "layer", layer, torch.nn.Linear)
        >>> same.weight is layer.weight, same.training
        (True, False)
    """
    if not isinstance(layer, expected):
        raise TypeError(f"{argument} must be a torch.nn.{expected.__name__}, got {layer!r}")
    if parametrize.is_parametrized(layer):
        raise ValueError(f"{argument} is parametrized: remove the parametrization first")
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(f"{argument} is lazy: run it once first")
    made = cls.__new__(cls)
    made.__dict__ = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in layer.__dict__.items()
    }
    return made
