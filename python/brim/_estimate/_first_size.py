"""`maximize(..., foresee=True)`: calls start at the size that is foreseen to fit."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from brim import _C
from brim._arguments import name_of
from brim._estimate._errors import EstimateError, LeftBehindError
from brim._estimate._largest import search
from brim.memory import DeviceLike, default_device

_MARGIN = 0.01  # of the room for the call: some kernels take a little that no trace shows
_CHANGED = 0.02  # of that room
_MOST = 16  # searches for a function: each takes seconds

_log = logging.getLogger("brim")


class _Foreseen(NamedTuple):
    asked: int
    memory: int  # bytes that could be held then
    room: int  # of these for the call
    sizes: list[tuple[int, int]] | None  # None if all fits, or nothing, or it is unknown

    def is_out_of_date(self, asked: int, memory: int) -> bool:
        """Whether another search may find another size."""
        changed = abs(memory - self.memory) > _CHANGED * self.room
        return asked > self.asked or (changed and self.sizes is not None)


class FirstSize:
    """Works out, by tracing, the size at which a call starts. The C++ core asks it ahead of a call.

    A function is traced for the first call of each kind. From then on the core goes by what calls
    took, and may go beyond what was foreseen. Where it remembers nothing, each call starts here,
    and the function is traced again when more or less memory is there.

    Args:
        name: the argument that is the size.
        lower: the floor.
        device: where it has to fit.
        q: prefer multiples of this to what just fits.
        remembers: whether calls start from what earlier ones took.
    """

    def __init__(
        self, name: str, lower: int, device: DeviceLike, q: int = 1, *, remembers: bool = True
    ) -> None:
        self._name = name
        self._lower = lower
        self._device = device
        self._q = q
        self._remembers = remembers
        self._foreseen: dict[int, _Foreseen] = {}  # by kind of call
        self._searches = 0
        self._given_up = False

    def __call__(
        self,
        key: int,
        size: int,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> list[tuple[int, int]] | None:
        """Sizes and the bytes that each takes: the one asked for, which does not fit, and others.

        The last one is the largest that fits, to start from. None where that is the one asked for,
        or where earlier calls tell.

        Args:
            key: the kind of call.
            size: what was asked for.
            function: what is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        if self._given_up or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return None
        known = self._foreseen.get(key)
        if known is not None and self._remembers and (known.sizes or size <= known.asked):
            return None
        device = default_device() if self._device is None else torch.device(self._device)
        stats = _C.memory_stats(device)
        most = stats.allocated + stats.free
        if known is None or known.is_out_of_date(size, most):
            if self._searches == _MOST:  # by now, measurements tell enough
                self._give_up(function, f"its calls or the memory changed {_MOST} times")
                return None
            self._searches += 1
            try:
                bound = inspect.signature(function).bind(*args, **kwargs)
            except TypeError:  # the call will say so
                return None
            budget = most - int(_MARGIN * stats.free)
            sizes = self._sizes(function, bound, size, budget, device)
            known = self._foreseen[key] = _Foreseen(size, most, stats.free, sizes)
        return known.sizes if known.sizes and known.sizes[-1][0] < size else None

    def forget(self, key: int) -> None:
        """Trace calls of this kind anew."""
        self._foreseen.pop(key, None)

    def clear(self) -> None:
        """Trace everything anew."""
        self._foreseen.clear()
        self._searches = 0
        self._given_up = False

    def _give_up(self, function: Callable[..., Any], reason: object) -> None:
        self._given_up = True
        _log.info("%s cannot be foreseen: %s", name_of(function), reason)

    def _sizes(
        self,
        function: Callable[..., Any],
        bound: inspect.BoundArguments,
        size: int,
        budget: int,
        device: torch.device,
    ) -> list[tuple[int, int]] | None:
        """See `__call__`; None if this size fits, if none does, or if it is unknown."""
        arguments = bound.arguments  # in the closure, so that the trace finds them

        def call(size: int) -> Any:
            arguments[self._name] = size
            return function(*bound.args, **bound.kwargs)

        lower = min(self._lower, size)
        try:
            # Two calls: the next one finds what this one leaves, such as an optimizer's state.
            found, peak_at = search(
                call, "size", budget, (), {}, device, lower, size, 2, progress=False, proves=False
            )
        except LeftBehindError:  # a real call would go on with tensors that have no values
            raise
        except EstimateError as error:
            self._give_up(function, error)
            return None
        except Exception as error:  # the call itself will raise what is really wrong
            _log.info("%s cannot be foreseen: %s", name_of(function), error)
            return None
        _log.info("%s: %s %d is foreseen to fit", name_of(function), self._name, found)
        if found == 0 or found == size:
            return None
        multiple = found - found % self._q
        start = multiple if multiple >= self._lower else found
        return [(each, peak_at(each)) for each in (size, max(start // 2, 1), start)]
