"""`brim.largest_size`: the largest size that fits a budget, without running anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brim import _C
from brim._arguments import positive
from brim.foresee._estimate import _target, estimate
from brim.memory import DeviceLike
from brim.predict import MemoryModel

_MOST_TRACES = 12
_MOST_GROWTH = 64  # from one trace to the next
_FULL = 0.995  # of the budget: another trace would gain too little


def largest_size(
    fn: Callable[..., Any],
    name: str,
    budget: int | str,
    /,
    *args: Any,
    device: DeviceLike = None,
    lower: int = 1,
    upper: int | None = None,
    calls: int = 1,
    **kwargs: Any,
) -> int:
    """Find the largest size with which `fn(*args, name=size, **kwargs)` fits, without running it.

    Traces the function as `brim.estimate` does, mostly three to five times. The answer was traced
    itself, so the allocator's rounding and cache are part of it. If memory does not grow with the
    size step by step, a larger size may fit too.

    Args:
        fn: what is to fit, such as a training step.
        name: the argument that is the size.
        budget: bytes that the device may hold, as `brim.budget` takes them; what other tensors of
            this process hold is part of it. A percentage is of the device's limit.
        *args: other arguments.
        device: the device; it need not exist.
        lower: the least size that counts.
        upper: the largest size of interest. Without it the search starts at `lower`.
        calls: how many calls in a row have to fit, as in `estimate`.
        **kwargs: other keyword arguments.

    Returns:
        The size; 0 if even `lower` does not fit.

    Raises:
        EstimateError: if the function cannot be traced.
        ValueError: if `lower`, `upper` or `budget` is wrong.

    Example:
        >>> import brim, torch
        >>> def work(n):
        ...     torch.zeros(n, 1024)
        >>> brim.largest_size(work, "n", "1GiB", device="cpu", upper=1000)
        1000
    """
    lower = positive("lower", lower)
    most = 2**40 if upper is None else positive("upper", upper)
    if most < lower:
        raise ValueError(f"upper must not be below lower ({lower}), got {upper}")
    target = _target(device)
    limit, others = _limits(budget, target)

    def need(size: int) -> int:
        found = estimate(
            fn, *args, device=target, capacity=limit, calls=calls, **{name: size}, **kwargs
        )
        outside = max(0, others - found.held_before)
        return (
            found.reserved + outside
            if target.type == "cuda"
            else (found.held_before + found.peak + outside)
        )

    return _search(need, limit, lower, most, most if upper is not None else lower)


def _limits(budget: int | str, target: torch.device) -> tuple[int, int]:
    """Bytes that may be held, and that are held now."""
    try:
        stats = _C.memory_stats(target)
    except (ValueError, RuntimeError):  # a device that is not there
        return _C.parse_bytes(budget, None), 0
    return _C.parse_bytes(budget, stats.limit), stats.allocated


def _search(need: Callable[[int], int], limit: int, lower: int, most: int, first: int) -> int:
    """The largest size found within the limit; each candidate comes from a model of the others."""
    needs: dict[int, int] = {}
    candidate = first
    while True:
        needs[candidate] = need(candidate)
        fitting = [size for size, held in needs.items() if held <= limit]
        failing = [size for size, held in needs.items() if held > limit]
        low, high = max(fitting, default=lower - 1), min(failing, default=most + 1)
        if high - low <= 1 or low == most:
            break
        if fitting and (needs[low] >= _FULL * limit or len(needs) >= _MOST_TRACES):
            break
        candidate = _next(needs, limit, low, high, lower)
    return max(low, 0) if low >= lower else 0


def _next(needs: dict[int, int], limit: int, low: int, high: int, lower: int) -> int:
    """The largest size between that the model expects to fit."""
    if len(needs) == 1:
        only = next(iter(needs))
        guess = only * limit // max(needs[only], 1) // 2 if high == only else 8 * only
    elif len(needs) >= _MOST_TRACES and low < lower:
        guess = lower  # the last hope
    else:
        model = MemoryModel().fit(list(needs), [max(held, 1) for held in needs.values()])
        guess, above = low, high
        while above - guess > 1:
            middle = (guess + above) // 2
            guess, above = (middle, above) if model.peak(middle) <= limit else (guess, middle)
    if low >= lower and max(needs) == low:
        guess = min(guess, _MOST_GROWTH * low)  # what does not matter at small sizes may beyond
    return max(low + 1, min(guess, high - 1))
