"""`brim.largest_size`: the largest size that fits a budget, without running anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from brim import _C
from brim._arguments import check_recompute, name_of, positive
from brim._estimate._errors import EstimateError
from brim._estimate._estimate import Traced, one_at_a_time, traced
from brim._estimate._target import bytes_of, options_of, stats_of, target_device
from brim._progress import progress as bar
from brim.memory import DeviceLike

_MOST_GROWTH = 64  # from one trace to the next: what does not matter at small sizes may beyond
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
    recompute: str | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> int:
    """Find the largest size with which `fn(*args, name=size, **kwargs)` fits, without running it.

    Traces the function as `brim.estimate` does, three or four times mostly. Two show how each
    allocation grows, and with it what the allocator does at other sizes. The answer was traced
    itself, so the allocator's rounding and cache are part of it, and so was the next size, which
    does not fit. Beyond that, larger sizes may fit again where memory does not grow with the size.

    Layers with `recompute="auto"` give values up before a size does not fit. The search traces
    calls that give up all they can. What it finds is confirmed by traces that give up only as much
    as the budget asks for.

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
        recompute: trace inside of `brim.saving(recompute)`, as in `estimate`.
        progress: whether to show a bar on a terminal if it takes long.
        **kwargs: other keyword arguments.

    Returns:
        The size; 0 if even `lower` does not fit.

    Raises:
        EstimateError: if the function cannot be traced, or if its memory does not depend on the
            size and no `upper` is given.
        ValueError: if `lower`, `upper`, `budget` or `recompute` is wrong.

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
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of an argument, got {name!r:.100}")
    if name in kwargs:
        raise ValueError(
            f"{name} is the size that is searched, and must not be given, got {kwargs[name]!r}"
        )
    _check_name(fn, name)
    check_recompute(recompute)
    traces = Traces(fn, name, budget, args, kwargs, device, lower, most, calls, recompute)
    with bar("largest_size", "trace", enabled=progress) as step:
        size = most if upper is not None else lower
        while not traces.search.finished:
            traces.trace(size)
            step(f"{name} {size}")
            if upper is None and size >= _NO_GROWTH * lower and len({*traces.needs.values()}) == 1:
                raise EstimateError(
                    f"the memory of {name_of(fn)} does not depend on {name} (from "
                    f"{min(traces.needs)} to {size}), so no size is the largest. Give upper"
                )
            size = min(traces.search.next, _MOST_GROWTH * max(traces.needs))
        best = traces.search.best or 0
        return _confirmed(traces, best, lower, most, step) if traces.can_give_up else best


def _confirmed(
    traces: Traces, best: int, lower: int, upper: int, step: Callable[[str], None]
) -> int:
    """The largest size that fits where no more is given up than the budget asks for.

    Calls that give up everything need more than these where values are computed again that others
    hold anyway, and the other way round where they do not get that far. Both differ by little, so
    the sizes next to `best` are tried first.
    """

    def fits(size: int) -> bool:
        step(f"{size}")
        return traces.rehearse(size)

    low, high, stride = lower - 1, upper + 1, 1  # it fits; it does not
    size = min(max(best, lower), upper)
    while high - low > 1:
        if fits(size):
            low = size
        else:
            high = size
        # Away from `best` in growing strides, until both ends are known; then by halves.
        if low < lower:
            size = max(high - stride, lower)
        elif high > upper:
            size = min(low + stride, upper)
        else:
            size = (low + high) // 2
        stride *= 2
    return low if low >= lower else 0


class Traces:
    """Traces of a function at several sizes, and the search for the largest that fits.

    Args:
        fn: the function, and the other arguments as `largest_size` takes them.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        budget: int | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: DeviceLike,
        lower: int,
        upper: int,
        calls: int,
        recompute: str | None = None,
    ) -> None:
        target = target_device(device)
        self._call = fn, name, args, kwargs
        self._limit, stats = bytes_of("budget", budget, target), stats_of(target)
        self._others = 0 if stats is None else stats.allocated  # held now
        self._outside = 0  # what the call does not use, and so does not see
        self._settings: dict[str, Any] = {"device": target, "calls": calls, "recompute": recompute}
        self.can_give_up = False  # layers with recompute="auto"
        self.search = _C.TraceSearch(options_of(target, None)[0], lower, upper)
        self.needs: dict[int, int] = {}  # bytes in all, by size

    def trace(self, size: int) -> bool:
        """Whether a size fits if all is given up that can be computed again."""
        made = self._traced(size, room=0)
        found = made.estimate
        self.can_give_up |= made.can_give_up
        self._outside = max(self._outside, self._others - found.held_before)
        self.needs[size] = found.held_before + found.peak
        trace, _, start = found._replayed
        return self.search.record(size, trace, start, self._capacity())

    def rehearse(self, size: int) -> bool:
        """Whether a size fits as it would be called."""
        return bool(self._traced(size).estimate.fits)

    def _capacity(self) -> int:
        return max(self._limit - self._outside, 1)

    def _traced(self, size: int, room: int | None = None) -> Traced:
        fn, name, args, kwargs = self._call
        kwargs = {**kwargs, name: size}
        with one_at_a_time:
            return traced(fn, args, kwargs, capacity=self._capacity(), room=room, **self._settings)


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
