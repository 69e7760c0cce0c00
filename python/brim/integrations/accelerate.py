"""The face of accelerate's `find_executable_batch_size`, on brim's search. Needs no accelerate."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from brim import memory
from brim._arguments import name_of, whole
from brim.adapt import batch
from brim.adapt._options import inside

__all__ = ["find_executable_batch_size"]


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate `function(batch_size, ...)` to be called with the largest batch size that fits.

    In place of `accelerate.utils.find_executable_batch_size`. The next size is worked out from what
    the failed attempt held and asked for, not tried step by step; it is remembered for calls with
    tensors of the same shapes, and grows again when more memory is free. A call that fits collects
    no garbage and flushes no cache.

    Args:
        function: takes the batch size as its first argument. If None, a decorator is returned.
        starting_batch_size: the largest size, tried first.
        reduce_batch_size_fn: returns the next size after a failure, instead of brim's search.

    Raises:
        TypeError: if the call passes so many arguments that the batch size must be among them.
        RuntimeError: if no size from `starting_batch_size` down to 1 fits.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, steps):
        ...     return f"{steps} steps of {batch_size}"
        >>> train(10)
        '10 steps of 64'
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    function, _ = inside(function)
    size = whole("starting_batch_size", starting_batch_size, 0)
    most = _most_positional(function)
    search = batch(size)(function) if size and reduce_batch_size_fn is None else None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        if most is not None and len(args) >= most:
            raise TypeError(
                f"{name_of(function)} gets its batch size from find_executable_batch_size: call it "
                f"without, with at most {most - 1} positional argument(s), got {len(args)}"
            )
        reason = ""
        while size > 0:
            attempt = search or batch(size, lower=size, remember="none")(function)
            try:
                return attempt(*args, **kwargs)
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                reason = f". {error}"
            if reduce_batch_size_fn is None:
                break
            size = whole("what reduce_batch_size_fn returns", reduce_batch_size_fn(), 0)
        raise RuntimeError(
            f"no executable batch size found for {name_of(function)}, reached zero{reason}"
        )

    return run


def _most_positional(function: Callable[..., Any]) -> int | None:
    """How many positional arguments a function takes; None where that is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in function without a signature
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
