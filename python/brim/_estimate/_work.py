"""The arithmetic of an operator, by the formulas of torch's FLOP counter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def _formula(func: Any) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry  # here: it takes time to load

    return flop_registry.get(getattr(func, "_overloadpacket", None))


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Of products, convolutions and attention; 0 of all that torch has no formula for."""
    formula = _formula(func)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
