"""The arithmetic of an operator, by the formulas of torch's FLOP counter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def _formula(func: Any) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry  # here: it takes time to load

    return flop_registry.get(getattr(func, "_overloadpacket", None))


def _with_all_heads(tensors: Any) -> list[Any]:
    """Shapes as if no heads shared keys and values: torch before 2.13 has no formula for that."""
    shapes = [each.shape if isinstance(each, torch.Tensor) else each for each in tensors]
    heads = max(shape[1] for shape in shapes if isinstance(shape, torch.Size) and len(shape) == 4)
    return [
        (shape[0], heads, *shape[2:])
        if isinstance(shape, torch.Size) and len(shape) == 4
        else shape
        for shape in shapes
    ]


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Of products, convolutions and attention; 0 of all that torch has no formula for."""
    formula = _formula(func)
    if formula is None:
        return 0
    if func._schema.name.startswith("aten::_scaled_dot_product_"):
        args = _with_all_heads(args)
    return int(formula(*args, **kwargs, out_val=result))
