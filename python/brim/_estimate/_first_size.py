"""`maximize(..., foresee=True)`: what is traced ahead of a call."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from brim import _C
from brim._arguments import name_of
from brim._estimate._errors import EstimateError, LeftBehindError
from brim._estimate._largest import Traces
from brim.memory import default_device

_CALLS = 8  # of a kind that use its traces: by then, runs show more
_MOST = 16  # searches for a function: each takes seconds
_MOST_TRACES = 12  # of one search

_log = logging.getLogger("brim")


class _Foreseen:
    """What was traced of a kind of call; nothing if that fits, or if it cannot be told."""

    def __init__(self, asked: int, search: _C.TraceSearch | None) -> None:
        self.asked = asked
        self.search = search
        self.calls = 0


class FirstSize:
    """Traces a function on fake tensors ahead of its calls. The C++ core asks it.

    The core works the first size out from it, and goes by what calls took from then on. A function
    is traced for the first call of each kind, and again for a larger size than was asked for then.

    Args:
        name: the argument that is the size.
        options: of the adaptive call.
        traced: what is traced in place of the function.
        around: runs the traces.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        traced: Callable[..., Any] | None = None,
        around: Callable[[Callable[[], int]], int] = lambda trace: trace(),
    ) -> None:
        self._name = name
        self._lower = options.get("lower", 1)
        self._device = options.get("device")
        self._remembers = options.get("remember") != "none"
        self._traced = traced
        self._around = around
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
    ) -> _C.TraceSearch | None:
        """What was traced; None where the size fits, or where earlier calls tell.

        Args:
            key: the kind of call.
            size: what was asked for.
            function: what is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        if self._given_up or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return None
        function = self._traced or function
        known = self._foreseen.get(key)
        if known is None or (known.calls == 0 and size > known.asked):
            if self._searches == _MOST:  # by now, measurements tell enough
                self._give_up(function, f"its calls changed {_MOST} times")
                return None
            self._searches += 1
            try:
                bound = inspect.signature(function).bind(*args, **kwargs)
            except TypeError:  # the call will say so
                return None
            known = self._foreseen[key] = _Foreseen(size, self._search(function, bound, size))
        if known.search is not None:
            known.calls += 1
            if self._remembers and known.calls > _CALLS:
                known.search = None
        return known.search

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

    def _search(
        self, function: Callable[..., Any], bound: inspect.BoundArguments, size: int
    ) -> _C.TraceSearch | None:
        """See `__call__`; None if this size fits, if none does, or if it is unknown."""
        arguments = bound.arguments  # in the closure, so that the trace finds them

        def call(size: int) -> Any:
            arguments[self._name] = size
            return function(*bound.args, **bound.kwargs)

        device = default_device() if self._device is None else torch.device(self._device)
        stats = _C.memory_stats(device)
        lower = min(self._lower, size)
        try:
            # Two calls: the next one finds what this one leaves, such as an optimizer's state.
            traces = Traces(
                call, "size", stats.allocated + stats.free, (), {}, device, lower, size, 2
            )
            found = self._around(lambda: _trace(traces, size))
        except LeftBehindError:  # a real call would go on with tensors that have no values
            raise
        except EstimateError as error:
            self._give_up(function, error)
            return None
        except Exception as error:  # the call itself will raise what is really wrong
            _log.info("%s cannot be foreseen: %s", name_of(function), error)
            return None
        _log.info("%s: %s %d is foreseen to fit", name_of(function), self._name, found)
        return None if found in (0, size) else traces.search


def _trace(traces: Traces, size: int) -> int:
    """Trace until the size that fits is known: 0 if none does.

    Two traces are enough if they consist of the same allocations. If nothing would fit by them, or
    they differ, more follow until one has confirmed what the others foresee.
    """
    search = traces.search
    traces.trace(size)
    while not search.finished and len(traces.needs) < _MOST_TRACES:
        traces.trace(search.next)
        near = len(traces.needs) == 2 or (search.best or 0) >= 0.97 * search.next
        if search.expected is not None and near:
            return search.next
    return search.best or 0
