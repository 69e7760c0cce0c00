"""`maximize(..., foresee=True)`: calls start at the size that is foreseen to fit."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from brim import _C
from brim._C import AdaptiveFunction
from brim.foresee._largest import largest_size
from brim.memory import DeviceLike, default_device

_SHARE = 0.99  # of what is there: some kernels take a little that no trace shows

_CHANGED = 0.02  # of what is there

_log = logging.getLogger("brim")


class _Limit(NamedTuple):
    asked: int
    memory: int  # bytes that could be held then
    size: int | None


class Foreseeing:
    """An adaptive function that is traced before the first call with arguments of a kind.

    It is traced again when a larger size is asked for, or when more or less memory is there.

    Args:
        adaptive: what to call, and where all other attributes come from.
        function: what it calls.
        name: the argument that is the size.
        infer: the argument whose length is the size if none is passed.
        lower: the floor.
        device: where it has to fit.
    """

    def __init__(
        self,
        adaptive: AdaptiveFunction[..., Any],
        function: Callable[..., Any],
        name: str,
        infer: str | None,
        lower: int,
        device: DeviceLike,
    ) -> None:
        """Nothing was called yet."""
        self._adaptive = adaptive
        self._function = function
        self._signature = inspect.signature(function)
        self._name = name
        self._infer = infer
        self._lower = lower
        self._device = device
        self._limits: dict[Any, _Limit] = {}
        self.__wrapped__ = function
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, at first with a size that was worked out."""
        args, kwargs = self._foreseen(args, kwargs)
        return self._adaptive(*args, **kwargs)

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """Call it and return the result and the attempts."""
        args, kwargs = self._foreseen(args, kwargs)
        return self._adaptive.record(*args, **kwargs)

    def clear(self) -> None:
        """Forget all sizes."""
        self._limits.clear()
        self._adaptive.clear()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind it as a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Whatever else an adaptive function has."""
        return getattr(self._adaptive, name)

    def _foreseen(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with a size of at most what is foreseen to fit."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        size = given.pop(self._name)
        if size is None and self._infer is not None:
            size = len(given[self._infer])
        if isinstance(size, bool) or not isinstance(size, int):
            return args, kwargs
        device = default_device() if self._device is None else torch.device(self._device)
        stats = _C.memory_stats(device)
        most = stats.allocated + stats.free
        kind = tuple(map(_kind, given.values()))
        known = self._limits.get(kind)
        if known is None or known.asked < size or abs(most - known.memory) > _CHANGED * most:
            known = _Limit(size, most, self._largest(bound, size, most, device))
            self._limits[kind] = known
        if known.size is None or known.size >= size:
            return args, kwargs
        bound.arguments[self._name] = known.size
        return bound.args, bound.kwargs

    def _largest(
        self, bound: inspect.BoundArguments, size: int, most: int, device: torch.device
    ) -> int | None:
        """The largest size up to this one that fits; None if that cannot be told."""

        def call(size: int) -> Any:
            bound.arguments[self._name] = size
            return self._function(*bound.args, **bound.kwargs)

        budget, lower = int(_SHARE * most), min(self._lower, size)
        name = self._function.__qualname__
        try:
            # Two calls: the next one finds what this one leaves, such as an optimizer's state.
            found = largest_size(
                call, "size", budget, device=device, lower=lower, upper=size, calls=2
            )
        except Exception as error:  # the call itself will raise what is really wrong
            _log.info("%s cannot be foreseen: %s", name, error)
            return None
        _log.info("%s: %s %d is foreseen to fit", name, self._name, found)
        return found or None


def _kind(value: Any) -> Any:
    """What tells arguments apart: of a tensor its shape, dtype and device."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, str(value.device)
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)
