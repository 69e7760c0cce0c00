"""The face of `toma` 1.1.0: halve a batch size until the call fits.

`batch` calls a function with a batch size, `range` with the start and end of each part of a range,
`chunked` with each chunk of a tensor. Finished parts are not repeated. `toma` has them as
decorators, `toma.execute` runs the function at once, `explicit` and `simple` are plain calls;
`simple` remembers nothing.

Example:
    >>> import torch
    >>> from brim.compat.toma import toma
    >>> @toma.chunked(initial_step=32)
    ... def fill(chunk, start, end, value):
    ...     chunk.fill_(value)
    >>> out = torch.zeros(100)
    >>> fill(out, 2.0)
    >>> out.sum()
    tensor(200.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from brim import memory
from brim._arguments import positive
from brim.compat._halving import Sizes, halving
from brim.compat.toma import batchsize_cache, cpu_memory, stacktrace, torch_cuda_memory
from brim.compat.toma import stacktrace as tst
from brim.compat.toma.batchsize_cache import (
    Batchsize,
    BatchsizeCache,
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    StacktraceMemoryBatchsizeCache,
)
from brim.compat.toma.cpu_memory import is_out_of_cpu_memory
from brim.compat.toma.torch_cuda_memory import gc_cuda, is_cuda_out_of_memory, is_cudnn_snafu

__all__ = [
    "CONTEXT_CACHE_SIZE",
    "DEFAULT_CACHE_TYPE",
    "GlobalBatchsizeCache",
    "NoBatchsizeCache",
    "StacktraceMemoryBatchsizeCache",
    "batchsize_cache",
    "cpu_memory",
    "explicit",
    "gc_cuda",
    "get_cache_for_context",
    "is_cuda_out_of_memory",
    "is_cudnn_snafu",
    "is_out_of_cpu_memory",
    "should_reduce_batch_size",
    "simple",
    "stacktrace",
    "toma",
    "torch_cuda_memory",
]

CacheType = Callable[[], BatchsizeCache]

#: The cache of calls that name none. It may be replaced, here or on the class `toma`.
DEFAULT_CACHE_TYPE: CacheType = StacktraceMemoryBatchsizeCache

#: How many functions and contexts have a cache at a time.
CONTEXT_CACHE_SIZE = 2**14


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether memory ran out, so that a smaller size may succeed.

    Example:
        >>> should_reduce_batch_size(MemoryError()), should_reduce_batch_size(ValueError())
        (True, False)
    """
    return memory.is_out_of_memory(exception) or is_cudnn_snafu(exception)


@functools.lru_cache(CONTEXT_CACHE_SIZE)
def get_cache_for_context(batchsize_cache_type: CacheType, context: Hashable) -> BatchsizeCache:
    """The cache of that type for a function or a context; created on first use.

    Example:
        >>> one = get_cache_for_context(GlobalBatchsizeCache, "mine")
        >>> one is get_cache_for_context(GlobalBatchsizeCache, "mine")
        True
    """
    return batchsize_cache_type()


def _remembered(
    name: str, initial: int, func: object, cache_type: CacheType | None, context: Hashable
) -> Batchsize:
    """The size to start with, from the cache of the function or the context."""
    if cache_type is None:
        on_class = toma.DEFAULT_CACHE_TYPE
        cache_type = DEFAULT_CACHE_TYPE if on_class is StacktraceMemoryBatchsizeCache else on_class
    cache = get_cache_for_context(cache_type, context or func)
    return cache.get_batchsize(positive(name, initial))


# should_reduce_batch_size is looked up at each failure, so that patching it takes effect.
_halve_batchsize = halving(("batchsize",), (1,), lambda error: should_reduce_batch_size(error))
_halve_step = halving(("step",), (1,), lambda error: should_reduce_batch_size(error))


def _fit(
    halve: Callable[..., tuple[Any, Sizes]], size: Batchsize, call: Callable[[int], Any]
) -> tuple[Any, int]:
    """Call with the size, or smaller ones while memory runs out; `size` is lowered accordingly."""

    def attempt(sizes: Sizes) -> Any:
        if sizes[0] < size.get():  # another thread may have lowered it already
            size.decrease_batchsize()
        return call(sizes[0])

    result, (fitted,) = halve(size.get(), attempt)
    return result, fitted


class explicit:  # noqa: N801  the original's name
    """Calls that remember sizes.

    `toma_cache_type` is the type of the cache, `DEFAULT_CACHE_TYPE` if None. The cache belongs to
    `toma_context`, or to the function if that is None. Other arguments are passed on.

    Example:
        >>> explicit.batch(lambda batchsize: batchsize, 64)
        64
    """

    @staticmethod
    def batch(
        func: Callable[..., Any],
        initial_batchsize: int,
        *args: Any,
        toma_context: Hashable = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call `func(batchsize, *args, **kwargs)` with the first size that fits."""
        name = "initial_batchsize"
        size = _remembered(name, initial_batchsize, func, toma_cache_type, toma_context)
        return _fit(_halve_batchsize, size, lambda n: func(n, *args, **kwargs))[0]

    @staticmethod
    def range(
        func: Callable[..., object],
        start: int,
        end: int,
        initial_step: int,
        *args: Any,
        toma_context: Hashable = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> None:
        """Call `func(start, end, *args, **kwargs)` for parts of the range."""
        step = _remembered("initial_step", initial_step, func, toma_cache_type, toma_context)
        current = start

        def call(size: int) -> object:
            return func(current, min(current + size, end), *args, **kwargs)

        while current < end:
            current += _fit(_halve_step, step, call)[1]

    @staticmethod
    def chunked(
        func: Callable[..., object],
        tensor: torch.Tensor,
        initial_step: int,
        *args: Any,
        toma_dimension: int | None = None,
        toma_context: Hashable = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> None:
        """Call `func(chunk, start, end, *args, **kwargs)` for views of the tensor.

        They are cut along `toma_dimension`, 0 by default.
        """
        dim = toma_dimension or 0

        def part(start: int, end: int, *args: Any, **kwargs: Any) -> object:
            return func(tensor.narrow(dim, start, end - start), start, end, *args, **kwargs)

        kwargs |= {"toma_context": toma_context or func, "toma_cache_type": toma_cache_type}
        explicit.range(part, 0, tensor.shape[dim], initial_step, *args, **kwargs)


class simple:  # noqa: N801
    """The same calls, but they remember nothing.

    Example:
        >>> simple.batch(lambda batchsize: batchsize, 64)
        64
    """

    @staticmethod
    def batch(func: Callable[..., Any], initial_batchsize: int, *args: Any, **kwargs: Any) -> Any:
        """Call `func(batchsize, *args, **kwargs)` with the first size that fits.

        Example:
            >>> simple.batch(lambda batchsize, text: f"{text} {batchsize}", 64, "size")
            'size 64'
        """
        return explicit.batch(func, initial_batchsize, *args, **_NOT_REMEMBERED, **kwargs)

    @staticmethod
    def range(
        func: Callable[..., object],
        start: int,
        end: int,
        initial_step: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Call `func(start, end, *args, **kwargs)` for parts of the range.

        Example:
            >>> simple.range(lambda start, end: print(start, end), 0, 10, 4)
            0 4
            4 8
            8 10
        """
        explicit.range(func, start, end, initial_step, *args, **_NOT_REMEMBERED, **kwargs)

    @staticmethod
    def chunked(
        func: Callable[..., object], tensor: torch.Tensor, initial_step: int, dimension: int = 0
    ) -> None:
        """Call `func(chunk, start, end)` for views of the tensor, cut along `dimension`."""
        settings = {"toma_dimension": dimension, **_NOT_REMEMBERED}
        explicit.chunked(func, tensor, initial_step, **settings)


# They share one context: caches per function would keep the functions alive.
_NOT_REMEMBERED: dict[str, Any] = {"toma_cache_type": NoBatchsizeCache, "toma_context": simple}


def _execute(
    run: Callable[..., Any], cache_type: CacheType | None, context: Hashable, *args: Any
) -> Callable[..., Any]:
    """A decorator that runs the function at once; by default its cache belongs to the call site."""
    context = context or tst.get_simple_traceback(2)
    settings = {"toma_cache_type": cache_type, "toma_context": context}
    return lambda func: run(func, *args, **settings)


class _Execute:
    """Decorators that run the function at once."""

    @staticmethod
    def batch(
        initial_batchsize: int, cache_type: CacheType | None = None, context: Hashable = None
    ) -> Callable[[Callable[[int], Any]], Any]:
        """Run `func(batchsize)`; the function's name is bound to the result.

        Example:
            >>> @toma.execute.batch(initial_batchsize=64)
            ... def result(batchsize):
            ...     return batchsize
            >>> result
            64
        """
        return _execute(explicit.batch, cache_type, context, initial_batchsize)

    @staticmethod
    def range(
        start: int,
        end: int,
        initial_step: int,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Callable[[Callable[[int, int], object]], None]:
        """Run `func(start, end)` for parts of the range."""
        return _execute(explicit.range, cache_type, context, start, end, initial_step)

    @staticmethod
    def chunked(
        tensor: torch.Tensor,
        initial_step: int | None = None,
        dimension: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Callable[[Callable[[torch.Tensor, int, int], object]], None]:
        """Run `func(chunk, start, end)` for chunks of the tensor."""
        run = functools.partial(explicit.chunked, toma_dimension=dimension)
        return _execute(run, cache_type, context, tensor, initial_step)


def _decorate(
    func: Callable[..., Any] | None,
    run: Callable[..., Any],
    leading: Sequence[str],
    size_name: str,
    initial: int | None,
    **settings: Any,
) -> Any:
    """Decorate a function with one of the `explicit` calls; without a function, the decorator.

    The arguments `leading` come before the initial size. A call may replace that and the settings.
    """
    if func is None:
        return lambda func: _decorate(func, run, leading, size_name, initial, **settings)

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        size = kwargs.pop(size_name, None)
        first = [*args[: len(leading)]]
        first += [kwargs.pop(name) for name in leading[len(args) :] if name in kwargs]
        first.append(initial if size is None else size)
        for name, value in settings.items():
            if kwargs.get(name) is None:
                kwargs[name] = value
        return run(func, *first, *args[len(leading) :], **kwargs)

    names = (size_name, *settings)
    added = "\n".join(f"    {name}: for the decorator's {name[5:]}." for name in names)
    wrapped.__doc__ = (
        f"Wrapped in toma.{run.__name__}.\n\nAdditional keyword arguments:\n{added}\n\n"
        f"{func.__doc__ or ''}"
    )
    return wrapped


class toma:  # noqa: N801
    """Decorators; those of `toma.execute` run the function at once.

    A call of a decorated function may replace the decorator's arguments, with `toma_` before their
    names.

    Example:
        >>> @toma.batch(initial_batchsize=64)
        ... def run(batchsize):
        ...     return batchsize
        >>> run()
        64
    """

    DEFAULT_CACHE_TYPE: CacheType = StacktraceMemoryBatchsizeCache
    StacktraceMemoryBatchsizeCache = StacktraceMemoryBatchsizeCache
    GlobalBatchsizeCache = GlobalBatchsizeCache
    NoBatchsizeCache = NoBatchsizeCache
    cpu_memory = cpu_memory
    execute = _Execute
    explicit = explicit
    simple = simple

    @staticmethod
    def batch(
        func: Callable[..., Any] | None = None,
        *,
        initial_batchsize: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Any:
        """Decorate `func(batchsize, ...)`, which is then called without the size."""
        settings = {"toma_context": context, "toma_cache_type": cache_type}
        name = "toma_initial_batchsize"
        return _decorate(func, explicit.batch, (), name, initial_batchsize, **settings)

    @staticmethod
    def range(
        func: Callable[..., object] | None = None,
        *,
        initial_step: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Any:
        """Decorate `func(start, end, ...)`; a call covers the range in parts."""
        settings = {"toma_context": context, "toma_cache_type": cache_type}
        leading, name = ("start", "end"), "toma_initial_step"
        return _decorate(func, explicit.range, leading, name, initial_step, **settings)

    @staticmethod
    def chunked(
        func: Callable[..., object] | None = None,
        *,
        initial_step: int | None = None,
        dimension: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Any:
        """Decorate `func(chunk, start, end, ...)`; a call with a tensor covers it in chunks."""
        settings = {"toma_context": context, "toma_cache_type": cache_type}
        settings["toma_dimension"] = dimension
        leading, name = ("tensor",), "toma_initial_step"
        return _decorate(func, explicit.chunked, leading, name, initial_step, **settings)
