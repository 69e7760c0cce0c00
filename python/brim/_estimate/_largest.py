"""`brim.largest_size`: the largest size that fits a budget, without running anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import isqrt
from typing import Any

from brim import _C
from brim._arguments import name_of, positive
from brim._estimate._errors import EstimateError
from brim._estimate._estimate import bytes_of, estimate, options_of, stats_of, target_device
from brim._estimate._report import Estimate
from brim._progress import progress as bar
from brim.memory import DeviceLike

_MOST_GROWTH = 64  # from one trace to the next: what does not matter at small sizes may beyond
_GUESSES = 3  # in a row
_TURNS = 2
_FIXED = ("parameter", "gradient", "optimizer state", "workspace")  # at any size, as a rule
_NO_GROWTH = 2**15  # times the least size: if that needs the same, memory does not grow


def largest_size(
    fn: Callable[..., Any],
    name: str,
    /,
    budget: int | str,
    *args: Any,
    device: DeviceLike = None,
    lower: int = 1,
    upper: int | None = None,
    calls: int = 1,
    progress: bool = True,
    **kwargs: Any,
) -> int:
    """Find the largest size with which `fn(*args, name=size, **kwargs)` fits, without running it.

    Traces the function as `brim.estimate` does, three or four times mostly. Two show how each
    allocation grows, and with it what the allocator does at other sizes. The answer was traced
    itself, so the allocator's rounding and cache are part of it, and so was the next size, which
    does not fit. Beyond that, larger sizes may fit again where memory does not grow with the size.

    Args:
        fn: what is to fit, such as a training step.
        name: the argument that is the size.
        budget: bytes that the device may hold, as `brim.budget` takes them. What other tensors of
            this process hold is part of it, as far as `brim.memory_stats` knows it: on the CPU
            those made after the first budget, meter or adaptive call, which a budget limits too. A
            percentage is of the device's limit.
        *args: other arguments.
        device: the device; it need not exist.
        lower: the least size that counts.
        upper: the largest size of interest. Without it the search starts at `lower`.
        calls: how many calls in a row have to fit, as in `estimate`.
        progress: whether to show a bar on a terminal if it takes long.
        **kwargs: other keyword arguments.

    Returns:
        The size; 0 if even `lower` does not fit.

    Raises:
        EstimateError: if the function cannot be traced, or if its memory does not depend on the
            size and no `upper` is given.
        ValueError: if `lower`, `upper` or `budget` is wrong.

    Example:
        >>> import brim, torch
        >>> def work(n):
        ...     torch.zeros(n, 1024)
        >>> brim.largest_size(work, "n", "1GiB", device="cpu", upper=1000)
        1000
    """
    return search(
        fn, name, budget, args, kwargs, device, lower, upper, calls, progress=progress, proves=True
    )[0]


def search(
    fn: Callable[..., Any],
    name: str,
    budget: int | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: DeviceLike,
    lower: int,
    upper: int | None,
    calls: int,
    *,
    progress: bool,
    proves: bool,
) -> tuple[int, Callable[[int], int]]:
    """As `largest_size`; without `proves` what two traces of the same allocations say is enough.

    Returns:
        The size, and a function for the bytes that the call takes at a size.
    """
    lower = positive("lower", lower)
    most = 2**40 if upper is None else positive("upper", upper)
    if most < lower:
        raise ValueError(f"upper must not be below lower ({lower}), got {upper}")
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of an argument, got {name!r:.100}")
    if name in kwargs:
        raise ValueError(
            f"{name} is the size that is searched, and must not be given, got {kwargs[name]!r}"
        )
    _check_name(fn, name)
    target = target_device(device)
    limit, stats = bytes_of("budget", budget, target), stats_of(target)
    others = 0 if stats is None else stats.allocated  # held now
    outside = 0  # what the call does not use, and so does not see
    traces: dict[int, Estimate] = {}

    def options() -> _C.AllocatorOptions:
        return options_of(target, max(limit - outside, 1))[0]

    def expected(low: int, high: int) -> int | None:
        """The largest size from `low` to `high` that fits by the traces around or nearest.

        `low - 1` if none does, None where the traces do not consist of the same allocations.
        """
        if len(traces) < 2:
            ((only, found),) = traces.items()
            fixed = sum(found.by_kind.get(kind, 0) for kind in _FIXED)
            growing = found.held_before + found.peak - fixed
            guess = only * (limit - outside - fixed) // growing if growing > 0 else 8 * only
            return max(low, min(guess, high))
        below, above = (
            max((s for s in traces if s < low), default=0),
            min((s for s in traces if s > high), default=0),
        )
        nearest = (
            [below, above]
            if below and above
            else sorted(traces, key=lambda size: max(size, low) / min(size, low))[:2]
        )
        sized = [(traces[size]._replayed[0], size, traces[size]._replayed[2]) for size in nearest]
        return _C.largest_scaled(sized[0], sized[1], options(), low, high)

    def trace(size: int) -> bool:
        """Whether a size fits."""
        nonlocal outside
        settings: dict[str, Any] = {"device": target, "capacity": limit, "calls": calls}
        found = estimate(fn, *args, **settings, progress=False, **kwargs, **{name: size})
        step(f"{name} {size}")
        outside = max(outside, others - found.held_before)
        traces[size] = found
        needs = {each.held_before + each.peak for each in traces.values()}
        if upper is None and size >= _NO_GROWTH * lower and len(needs) == 1:
            raise EstimateError(
                f"the memory of {name_of(fn)} does not depend on {name} (from {min(traces)} to "
                f"{max(traces)}), so no size is the largest. Give upper"
            )
        replayed, _, start = found._replayed
        fits: bool = _C.replay(replayed, options(), start, 0).fits
        return fits and found.held_before + found.peak + outside <= limit

    with bar("largest_size", "trace", enabled=progress) as step:
        first = most if upper is not None else lower
        size = _search(trace, expected, lower, most, first, proves)
    peaks = {traced: found.peak for traced, found in traces.items()}
    return size, lambda size: _peak_at(size, peaks)


def _check_name(fn: Callable[..., Any], name: str) -> None:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # no function, or one of C without a signature
        return
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_name = [each.name for each in parameters if each.kind in kinds]
    if name not in by_name and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise ValueError(
            f"name must be the argument of {name_of(fn)} that is the size: it has "
            f"{', '.join(by_name) or 'none'}, got {name!r}"
        )


def _peak_at(size: int, peaks: dict[int, int]) -> int:
    """On the line through the two traced sizes that are nearest."""
    nearest = sorted(peaks, key=lambda traced: abs(traced - size))
    if size in peaks or len(peaks) == 1:
        return peaks[nearest[0]]
    a, b = nearest[:2]
    return peaks[a] + (peaks[b] - peaks[a]) * (size - a) // (b - a)


def _search(
    trace: Callable[[int], bool],
    expected: Callable[[int, int], int | None],
    lower: int,
    most: int,
    first: int,
    proves: bool,
) -> int:
    """The largest size that fits.

    With `proves` it was traced, and so was the next one, which does not fit.

    Args:
        trace: whether a size fits.
        expected: the largest size of an interval that is expected to fit, if that can be told.
        lower: the least size that counts.
        most: the largest.
        first: the size to begin with.
        proves: whether to go on until that is so; else until traces that agree expect a size.
    """
    low, high = lower - 1, most + 1  # the largest known to fit, and the least above that does not
    candidate, asked, halved = first, 0, 0
    while True:
        low, high = (candidate, high) if trace(candidate) else (low, candidate)
        if high - low <= 1:
            return low if low >= lower else 0
        top = min(high - 1, _MOST_GROWTH * candidate)
        # A good expectation is the answer, and the size after it the proof. Where it was not, what
        # is left is halved; after a few such turns only that.
        guess = expected(low + 1, top) if asked < _GUESSES and halved < _TURNS else None
        if guess is not None and not proves and asked > 0 and max(guess, low) >= lower:
            return max(guess, low)
        if guess is None or (guess <= low and low < lower):
            proves = True  # traces that disagree expect nothing
            candidate, asked, halved = min(_between(max(low, 1), high), top), 0, halved + 1
        else:
            candidate = min(max(guess, low + 1), top)
            asked = 0 if candidate == top < high - 1 else asked + 1


def _between(low: int, high: int) -> int:
    """In the middle, of the exponents if these are far apart."""
    return (low + high) // 2 if high <= 4 * low else isqrt(low * high)
