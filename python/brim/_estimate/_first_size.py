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
from brim._estimate._largest import largest_size
from brim.memory import DeviceLike, default_device

_SHARE = 0.99  # of what is there: some kernels take a little that no trace shows
_CHANGED = 0.02  # of what is there
_MOST = 16  # searches for a function: each takes seconds

_log = logging.getLogger("brim")


class _Limit(NamedTuple):
    asked: int
    memory: int  # bytes that could be held then
    size: int | None  # 0 if none fits, None if it is unknown

    def is_out_of_date(self, asked: int, memory: int) -> bool:
        """Whether another search may find another size."""
        if self.size is None:
            return False
        changed = memory - self.memory
        return asked > self.asked or (
            abs(changed) > _CHANGED * memory and not (changed > 0 and self.size >= self.asked)
        )


class FirstSize:
    """Works out, by tracing, the size at which a call starts. The C++ core asks it ahead of a call.

    A function is traced once for each kind of call, and again when a larger size is asked for, or
    when more or less memory is there.

    Args:
        name: the argument that is the size.
        lower: the floor.
        device: where it has to fit.
        q: prefer multiples of this to what just fits.
    """

    def __init__(self, name: str, lower: int, device: DeviceLike, q: int = 1) -> None:
        self._name = name
        self._lower = lower
        self._device = device
        self._q = q
        self._limits: dict[int, _Limit] = {}  # by kind of call
        self._searches = 0
        self._given_up = False

    def __call__(
        self,
        key: int,
        size: int,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> int:
        """The size to start from: the one asked for, or less.

        Args:
            key: the kind of call.
            size: what was asked for.
            function: what is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        if self._given_up or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return size
        device = default_device() if self._device is None else torch.device(self._device)
        stats = _C.memory_stats(device)
        most = stats.allocated + stats.free
        known = self._limits.get(key)
        if known is None or known.is_out_of_date(size, most):
            if self._searches == _MOST:  # by now, measurements tell enough
                self._give_up(function, f"its calls or the memory changed {_MOST} times")
                return size
            self._searches += 1
            try:
                bound = inspect.signature(function).bind(*args, **kwargs)
            except TypeError:  # the call will say so
                return size
            found = self._largest(function, bound, size, most, device)
            known = self._limits[key] = _Limit(size, most, found)
        if not known.size or known.size >= size:
            return size
        multiple = known.size - known.size % self._q
        return multiple if multiple >= self._lower else known.size

    def forget(self, key: int) -> None:
        """Trace calls of this kind anew."""
        self._limits.pop(key, None)

    def clear(self) -> None:
        """Trace everything anew."""
        self._limits.clear()
        self._searches = 0
        self._given_up = False

    def _give_up(self, function: Callable[..., Any], reason: object) -> None:
        self._given_up = True
        _log.info("%s cannot be foreseen: %s", name_of(function), reason)

    def _largest(
        self,
        function: Callable[..., Any],
        bound: inspect.BoundArguments,
        size: int,
        most: int,
        device: torch.device,
    ) -> int | None:
        """The largest size up to this one that fits, 0 if none does; None if it is unknown."""
        arguments = bound.arguments  # in the closure, so that the trace finds them

        def call(size: int) -> Any:
            arguments[self._name] = size
            return function(*bound.args, **bound.kwargs)

        budget, lower = int(_SHARE * most), min(self._lower, size)
        try:
            # Two calls: the next one finds what this one leaves, such as an optimizer's state.
            found = largest_size(
                call,
                "size",
                budget,
                device=device,
                lower=lower,
                upper=size,
                calls=2,
                progress=False,
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
        return found
