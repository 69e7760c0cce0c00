"""`maximize(..., foresee=True)`: the first call starts at the size that is expected to fit."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from brim import _C
from brim._C import AdaptiveFunction
from brim.foresee._largest import largest_size
from brim.memory import DeviceLike, default_device

_SHARE = 0.99  # of what is there: some kernels take a little that no trace shows

_log = logging.getLogger("brim")


class Foreseeing:
    """An adaptive function that is traced before the first call with arguments of a kind.

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
        self._seen: set[Any] = set()
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
        self._seen.clear()
        self._adaptive.clear()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind it as a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Whatever else an adaptive function has."""
        return getattr(self._adaptive, name)

    def _foreseen(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with the size that fits if this kind of call is new."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        kind = tuple(_kind(value) for name, value in given.items() if name != self._name)
        size = given.get(self._name)
        if size is None and self._infer is not None:
            size = len(given[self._infer])
        if kind in self._seen or isinstance(size, bool) or not isinstance(size, int):
            return args, kwargs
        self._seen.add(kind)
        device = default_device() if self._device is None else torch.device(self._device)
        stats = _C.memory_stats(device)

        def call(size: int) -> Any:
            bound.arguments[self._name] = size
            return self._function(*bound.args, **bound.kwargs)

        try:
            found = largest_size(
                call,
                "size",
                int(_SHARE * (stats.allocated + stats.free)),
                device=device,
                lower=min(self._lower, size),
                upper=size,
            )
        except Exception as error:  # the call itself will raise what is really wrong
            _log.info("%s cannot be foreseen: %s", self._function.__qualname__, error)
            return args, kwargs
        if found == 0:
            return args, kwargs
        _log.info("%s: %s %d is foreseen to fit", self._function.__qualname__, self._name, found)
        bound.arguments[self._name] = found
        return bound.args, bound.kwargs


def _kind(value: Any) -> Any:
    """What tells arguments apart: of a tensor its shape, dtype and device."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, str(value.device)
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)
