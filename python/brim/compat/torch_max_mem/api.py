"""torch_max_mem's `api` module on brim's core.

`maximize_memory_utilization` lowers an integer argument until the call fits, and remembers it.
`infer_maximum_batch_size` goes above it: it takes the first value from the length of another
argument.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from brim import memory
from brim.adapt._options import Slot, slots_of
from brim.compat._halving import Sizes, halving
from brim.compat.torch_max_mem._hashing import (  # noqa: F401  the original has all three here
    KeyHasher,
    flatten_variadic_keyword_arguments,
    hashable_key,
)

__all__ = [
    "infer_maximum_batch_size",
    "maximize_memory_utilization",
    "set_memory_budget",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Marks what `infer_maximum_batch_size` returns; see `check_decorator_order`.
INFERS_BATCH_SIZE_ATTRIBUTE = "__torch_max_mem_infers_batch_size__"

#: How many hashes a `MemoryUtilizationMaximizer` remembers by default.
DEFAULT_MAX_CACHE_SIZE = 128

#: A RuntimeError with one of these texts is out of memory, in addition to all that brim recognises
#: (Linux' CPU allocator, XPU, cuBLAS, …). More may be added.
ADDITIONAL_OOM_ERROR_INFIXES = {
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. "
    "This error may appear if you passed in a non-contiguous input.",
    "CUDA out of memory.",
    "nonzero is not supported for tensors with more than INT_MAX elements",
    "Invalid buffer size: ",
    "MPS backend out of memory",
    "DefaultCPUAllocator: not enough memory:",
    "CUDA driver error: device not ready",
}

#: Texts that mean it only together: an assertion inside the caching allocator fails when memory is
#: short, other assertions do not.
ADDITIONAL_OOM_ERROR_INFIX_CONJUNCTIONS: Collection[Collection[str]] = (
    ("INTERNAL ASSERT FAILED", "CUDACachingAllocator"),
)


def upgrade_to_sequence(
    parameter_name: str | Sequence[str], q: int | Sequence[int]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and multiples as tuples of the same length; a single `q` is for all names."""
    names = (parameter_name,) if isinstance(parameter_name, str) else tuple(parameter_name)
    quanta = (q,) if isinstance(q, int) else tuple(q)
    if len(quanta) == 1:
        quanta *= len(names)
    if len(quanta) != len(names):
        raise ValueError(
            f"length of q={quanta} does not match length of parameter_names={names}: "
            f"{len(quanta)} and {len(names)}"
        )
    return names, quanta


def _check_parameter(func: Callable[..., Any], name: str, signature: inspect.Signature) -> None:
    if name not in signature.parameters:
        raise ValueError(
            f"{func} does not have a parameter {name}. "
            f"It has {', '.join(signature.parameters) or 'none'}."
        )


def determine_default_max_value(
    func: Callable[..., Any], parameter_name: str, signature: inspect.Signature
) -> int | None:
    """The parameter's default as an int, or None if it has none."""
    _check_parameter(func, parameter_name, signature)
    parameter = signature.parameters[parameter_name]
    if parameter.annotation not in (inspect.Parameter.empty, int, "int"):
        logger.warning(
            "%s is annotated as %s, but only integers can be lowered; casting to int",
            parameter_name,
            parameter.annotation,
        )
    if parameter.default is inspect.Parameter.empty or parameter.default is None:
        return None
    return int(parameter.default)


def determine_max_value(
    bound_arguments: inspect.BoundArguments, parameter_name: str, default_max_value: int | None
) -> int:
    """The value passed for a parameter, or the default if it is None or was not passed."""
    value = bound_arguments.arguments.get(parameter_name)
    return _max_value(value, parameter_name, default_max_value)


def _max_value(value: object, name: str, default: int | None) -> int:
    if value is None and default is None:
        raise ValueError(f"Neither value nor default value found for {name}")
    if value is not None and not isinstance(value, int):
        raise ValueError(f"{name}={value!r} is neither integer nor None.")
    return value if value is not None else default  # type: ignore[return-value]


def iter_tensor_devices(*args: Any, **kwargs: Any) -> Iterable[torch.device]:
    """The device of each tensor among the arguments, including those inside containers."""
    seen: set[int] = set()  # a container may contain itself
    waiting: list[Any] = [*args, *kwargs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value.device
        elif isinstance(value, (Mapping, list, tuple, set, frozenset)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, Mapping) else value


def create_tensor_checker(safe_devices: Collection[str] | None = None) -> Callable[..., None]:
    """Make a function that logs a warning if an argument is on a device that is not safe.

    A device is safe if running out of memory raises an error. By default only CUDA is: on the CPU
    the kernel may kill the process first, unless `brim.budget` limits it.
    """
    safe = frozenset({"cuda"} if safe_devices is None else safe_devices)
    logger.debug("devices considered safe for memory utilization maximization: %s", sorted(safe))

    def check_tensors(*args: Any, **kwargs: Any) -> None:
        device_types = {device.type for device in iter_tensor_devices(*args, **kwargs)}
        if not device_types <= safe:
            logger.warning(
                "There are tensors on device_types=%s, but only %s are considered safe: elsewhere, "
                "running out of memory may end the process (brim.budget prevents that on the CPU).",
                sorted(device_types),
                sorted(safe),
            )

    return check_tensors


def floor_to_nearest_multiple_of(x: int, q: int) -> int:
    """The largest multiple of `q` up to `x`; `x` itself if it is below `q`."""
    return x if x <= q else x - x % q


def is_oom_error(error: BaseException) -> bool:
    """Whether memory ran out, so that a smaller value may succeed."""
    if memory.is_out_of_memory(error):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(text in message for text in ADDITIONAL_OOM_ERROR_INFIXES) or any(
        all(text in message for text in texts) for texts in ADDITIONAL_OOM_ERROR_INFIX_CONJUNCTIONS
    )


def check_decorator_order(func: Callable[..., Any]) -> None:
    """Raise ValueError for a function that `infer_maximum_batch_size` has decorated already."""
    if getattr(func, INFERS_BATCH_SIZE_ATTRIBUTE, None) is not None:
        raise ValueError(
            f"{func} was decorated in the wrong order: infer_maximum_batch_size finds the value to "
            f"start with, so it has to be the outer one, above maximize_memory_utilization:\n\n"
            f"    @infer_maximum_batch_size()\n"
            f"    @maximize_memory_utilization()\n"
            f"    def {getattr(func, '__name__', 'func')}(...): ...\n"
        )


def set_memory_budget(budget: int, device: int | str | torch.device | None = None) -> float:
    """Limit torch's caching allocator to `budget` bytes of a CUDA device from now on.

    CUDA itself and its libraries need some more. `brim.budget` does the same for a `with` block,
    and on the CPU too.

    Args:
        budget: in bytes, above 0.
        device: the current device by default.

    Returns:
        The budget as a fraction of the device's memory, at most 1.0.

    Example:
        >>> set_memory_budget(0)
        Traceback (most recent call last):
        ValueError: budget=0 must be positive.
    """
    if budget <= 0:
        raise ValueError(f"budget={budget} must be positive.")
    if isinstance(device, str):
        device = torch.device(device)
    if device is None or (isinstance(device, torch.device) and device.index is None):
        device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = min(budget / total, 1.0)
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    logger.debug("device=%s is limited to %.3f of its %d bytes", device, fraction, total)
    return fraction


def _argument(slot: Slot, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value of an argument, its default, or `inspect.Parameter.empty`."""
    name, position, *default = slot
    if 0 <= position < len(args):
        return args[position]
    return kwargs.get(name, default[0] if default else inspect.Parameter.empty)


def _set_argument(slot: Slot, value: int, args: list[Any], kwargs: dict[str, Any]) -> None:
    name, position = slot[:2]
    if 0 <= position < len(args):
        args[position] = value
    else:
        kwargs[name] = value


class _Search(Generic[R]):
    """A function and the parameters to lower; both decorators use it."""

    def __init__(
        self,
        func: Callable[..., R],
        names: tuple[str, ...],
        qs: tuple[int, ...],
        safe_devices: Collection[str] | None,
    ) -> None:
        check_decorator_order(func)
        self.signature = inspect.signature(func)
        self.slots = slots_of(self.signature)
        self._func = func
        self._names = names
        self._defaults = [determine_default_max_value(func, name, self.signature) for name in names]
        self._check_tensors = create_tensor_checker(safe_devices)
        self._halve = halving(
            names,
            qs,
            # Looked up at each failure, so that patching it takes effect.
            lambda error: is_oom_error(error),
            lambda sizes: logger.info(
                "Out of memory with %s", dict(zip(names, sizes, strict=True))
            ),
        )
        kinds = [self.signature.parameters[name].kind for name in names]
        self._positional_only = inspect.Parameter.POSITIONAL_ONLY in kinds

    def __call__(
        self, args: Sequence[Any], kwargs: dict[str, Any], known: Sizes | None = None
    ) -> tuple[R, Sizes, Sizes]:
        """Call with the largest values that fit and do not exceed `known`. Changes `kwargs`.

        Returns the result, the values that fitted, and the values it started with.
        """
        self._check_tensors(*args, **kwargs)
        if self._positional_only:  # such a parameter cannot be added by its name
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        bounds = self._bounds(args, kwargs, known)

        def call(sizes: Sizes) -> R:
            positional = list(args)
            for name, size in zip(self._names, sizes, strict=True):
                _set_argument(self.slots[name], size, positional, kwargs)
            return self._func(*positional, **kwargs)

        cause: Exception | None = None
        if min(bounds) > 0:
            try:
                return *self._halve(*bounds, call), bounds
            except torch.OutOfMemoryError as error:
                cause = error
        if logger.isEnabledFor(logging.DEBUG):
            for device in set(iter_tensor_devices(*args, **kwargs)):
                if device.type == "cuda":
                    logger.debug("%s:\n%s", device, torch.cuda.memory_summary(device))
        raise MemoryError(
            f"Execution did not even succeed with {self._names} all equal to 1."
            if cause is not None
            else f"Execution needs values of 1 or more, got {self._names} = {bounds}."
        ) from cause

    def _bounds(self, args: Sequence[Any], kwargs: Mapping[str, Any], known: Sizes | None) -> Sizes:
        values = [_argument(self.slots[name], args, kwargs) for name in self._names]
        if any(value is inspect.Parameter.empty for value in values):
            self.signature.bind(*args, **kwargs)  # raises the usual TypeError
        if known is None:
            return tuple(map(_max_value, values, self._names, self._defaults))
        # A call without a value starts with the known one.
        return tuple(map(min, map(_max_value, values, self._names, known), known))


def maximize_memory_utilization_decorator(
    parameter_name: str | Sequence[str] = "batch_size",
    q: int | Sequence[int] = 32,
    safe_devices: Collection[str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, tuple[int, ...]]]]:
    """As `MemoryUtilizationMaximizer`, but remembers nothing.

    The decorated function returns its result and the tuple of values that fitted.
    """
    names, qs = upgrade_to_sequence(parameter_name, q)

    def decorate(func: Callable[P, R]) -> Callable[P, tuple[R, tuple[int, ...]]]:
        search = _Search(func, names, qs, safe_devices)

        @functools.wraps(func)
        def maximized(*args: P.args, **kwargs: P.kwargs) -> tuple[R, tuple[int, ...]]:
            return search(args, kwargs)[:2]

        return maximized

    return decorate


def infer_maximum_batch_size(
    parameter_name: str = "batch_size",
    x_parameter_name: str = "x",
    max_value: int | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decorator that sets a parameter to the length of another argument.

    Args:
        parameter_name: the parameter to set if it is None or not passed.
        x_parameter_name: the parameter whose length is taken.
        max_value: limits the inferred value, not one that is passed.

    Raises:
        ValueError: at decoration, if there is no `x_parameter_name`.
        TypeError: at a call without a value for it.

    Example:
        >>> @infer_maximum_batch_size(max_value=100)
        ... def size(x, batch_size=None):
        ...     return batch_size
        >>> size([1, 2, 3]), size([1, 2, 3], batch_size=2)
        (3, 2)
    """

    def decorate(func: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(func)
        _check_parameter(func, x_parameter_name, signature)
        slots = slots_of(signature)
        # Its default does not count. A name that is not in the signature goes into **kwargs.
        target = (parameter_name, slots.get(parameter_name, ("", -1))[1], None)

        def length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            if x_parameter_name in slots:
                x = _argument(slots[x_parameter_name], args, kwargs)
            else:  # *x or **x
                bound = signature.bind_partial(*args, **kwargs)
                x = bound.arguments.get(x_parameter_name, ())
            if x is inspect.Parameter.empty:
                raise TypeError(
                    f"Cannot infer {parameter_name}: {getattr(func, '__name__', func)} did not "
                    f"receive a value for {x_parameter_name}."
                )
            return len(x) if max_value is None else min(len(x), max_value)

        @functools.wraps(func)
        def inferring(*args: P.args, **kwargs: P.kwargs) -> R:
            positional = list(args)
            if _argument(target, args, kwargs) is None:
                _set_argument(target, length(args, kwargs), positional, kwargs)
            return func(*positional, **kwargs)  # type: ignore[arg-type]

        setattr(inferring, INFERS_BATCH_SIZE_ATTRIBUTE, parameter_name)
        return inferring

    return decorate


class MemoryUtilizationMaximizer:
    """A decorator that lowers parameters until the call fits, and starts there the next time.

    `parameter_value` has the values that fitted, for each hash of a call. They only decrease;
    `reset` forgets them. A decorated function raises `MemoryError` if nothing fits. Other errors
    pass through.

    Args:
        parameter_name: the parameter, or several: each is lowered to 1 before the next.
        q: values above it are kept multiples of it; one number, or one per parameter.
        safe_devices: see `create_tensor_checker`.
        hasher: a function of the mapping of all arguments; calls with different hashes have
            separate values. By default all calls have the same hash.
        keys: names of arguments to hash if there is no `hasher`.
        max_cache_size: how many hashes to remember; the least recently used are dropped. None
            means all.

    Example:
        >>> maximizer = MemoryUtilizationMaximizer(q=4)
        >>> @maximizer
        ... def tried(batch_size):
        ...     if batch_size > 5:
        ...         raise torch.cuda.OutOfMemoryError
        ...     return batch_size
        >>> tried(9), list(maximizer.parameter_value.values())
        (4, [(4,)])
    """

    def __init__(
        self,
        parameter_name: str | Sequence[str] = "batch_size",
        q: int | Sequence[int] = 32,
        safe_devices: Collection[str] | None = None,
        hasher: Callable[[Mapping[str, Any]], int] | None = None,
        keys: Collection[str] | str | None = None,
        max_cache_size: int | None = DEFAULT_MAX_CACHE_SIZE,
    ) -> None:
        self.parameter_names, self.qs = upgrade_to_sequence(parameter_name=parameter_name, q=q)
        self.safe_devices = safe_devices
        self.max_cache_size = max_cache_size
        self.parameter_value: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        if hasher is None:
            keys = KeyHasher.normalize_keys(keys)
            intersection = set(keys).intersection(self.parameter_names)
            if intersection:
                logger.warning(
                    "%s are contained in the hashing keys *and* the parameter names: a call with "
                    "another value then starts anew, which is likely not what is wanted.",
                    intersection,
                )
            hasher = KeyHasher(keys)
        self.hasher = hasher

    def reset(self) -> None:
        """Forget all values."""
        self.parameter_value.clear()

    def _hash(self, search: _Search[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        hasher, slots = self.hasher, search.slots
        if type(hasher) is KeyHasher and all(key in slots for key in hasher.keys):
            return hasher({key: _argument(slots[key], args, kwargs) for key in hasher.keys})
        bound = search.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return hasher(flatten_variadic_keyword_arguments(bound))

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function."""
        search = _Search(func, self.parameter_names, self.qs, self.safe_devices)

        @functools.wraps(func)
        def maximized(*args: P.args, **kwargs: P.kwargs) -> R:
            key = self._hash(search, args, kwargs)
            # Threads may call one function. Each operation is whole, and no lock outlives a fork;
            # between them another thread may have forgotten the key.
            known = self.parameter_value.get(key)
            if known is not None:
                with contextlib.suppress(KeyError):
                    self.parameter_value.move_to_end(key)
            result, sizes, bounds = search(args, kwargs, known)
            if known is not None:
                # A requested value that fits says nothing about larger ones. Only a value that had
                # to be lowered changes what is known.
                learned = zip(sizes, bounds, known, strict=True)
                sizes = tuple(s if s < bound else k for s, bound, k in learned)
            self.parameter_value.pop(key, None)
            self.parameter_value[key] = sizes
            most = math.inf if self.max_cache_size is None else self.max_cache_size
            with contextlib.suppress(KeyError):
                while len(self.parameter_value) > most:
                    self.parameter_value.popitem(last=False)
            return result

        return maximized


maximize_memory_utilization = MemoryUtilizationMaximizer
