"""The face of `toma` 1.1.0: halve a batch size until the call fits, in three forms.

`batch` calls a function with a batch size, `range` with the start and end of each part of a range,
`chunked` with each chunk of a tensor. In a range, parts that are done stay done. `toma` has them as
decorators, `toma.execute` runs the function at once, `explicit` and `simple` are plain calls, the
latter without a memory.

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

#: The cache of calls that name none. It may be set to another, here or on the class `toma`.
DEFAULT_CACHE_TYPE: CacheType = StacktraceMemoryBatchsizeCache

#: How many functions and contexts have a cache at a time.
CONTEXT_CACHE_SIZE = 2**14


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an error means that memory ran out, so that a smaller size may succeed.

    Example:
        >>> should_reduce_batch_size(RuntimeError("CUDA out of memory."))
        True
        >>> should_reduce_batch_size(ValueError("CUDA out of memory."))
        False
    """
    return (
        memory.is_out_of_memory(exception)
        or is_cuda_out_of_memory(exception)
        or is_cudnn_snafu(exception)
        or is_out_of_cpu_memory(exception)
    )


@functools.lru_cache(CONTEXT_CACHE_SIZE)
def get_cache_for_context(batchsize_cache_type: CacheType, context: Hashable) -> BatchsizeCache:
    """The cache of that type for a function or a context; made when first asked for."""
    return batchsize_cache_type()


def _remembered(
    name: str, initial: int, func: object, cache_type: CacheType | None, context: Hashable
) -> Batchsize:
    """The size to start with, of the function's or the context's cache."""
    if cache_type is None:
        on_class = toma.DEFAULT_CACHE_TYPE
        cache_type = DEFAULT_CACHE_TYPE if on_class is StacktraceMemoryBatchsizeCache else on_class
    cache = get_cache_for_context(cache_type, context or func)
    return cache.get_batchsize(positive(name, initial))


# Patching should_reduce_batch_size takes effect: it is looked up at each failure.
_halve_batchsize = halving(("batchsize",), (1,), lambda error: should_reduce_batch_size(error))
_halve_step = halving(("step",), (1,), lambda error: should_reduce_batch_size(error))


def _fit(
    halve: Callable[..., tuple[Any, Sizes]], size: Batchsize, call: Callable[[int], Any]
) -> tuple[Any, int]:
    """Call with the size, and smaller ones while memory runs out; what was learned is in `size`."""

    def attempt(sizes: Sizes) -> Any:
        if sizes[0] < size.get():  # another thread may have lowered it already
            size.decrease_batchsize()
        return call(sizes[0])

    result, (fitted,) = halve(size.get(), attempt)
    return result, fitted


def _cover(
    func: Callable[..., object], start: int, end: int, step: Batchsize, args: Any, kwargs: Any
) -> None:
    """Call `func(begin, end, ...)` for parts of the range."""
    current = start

    def call(size: int) -> object:
        return func(current, min(current + size, end), *args, **kwargs)

    while current < end:
        current += _fit(_halve_step, step, call)[1]


def _chunks(func: Callable[..., object], tensor: torch.Tensor, dim: int) -> Callable[..., object]:
    """`func(chunk, start, end, ...)` as a function of start and end."""

    def part(start: int, end: int, *args: Any, **kwargs: Any) -> object:
        chunk = tensor.narrow(dim=dim, start=start, length=end - start)
        return func(chunk, start, end, *args, **kwargs)

    return part


class simple:  # noqa: N801  the name of the library's
    """Calls that remember nothing."""

    @staticmethod
    def batch(func: Callable[..., Any], initial_batchsize: int, *args: Any, **kwargs: Any) -> Any:
        """Call `func(batchsize, *args, **kwargs)` with the first size that fits.

        Example:
            >>> simple.batch(lambda batchsize, text: f"{text} {batchsize}", 64, "size")
            'size 64'
        """
        size = Batchsize(positive("initial_batchsize", initial_batchsize))
        return _fit(_halve_batchsize, size, lambda n: func(n, *args, **kwargs))[0]

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
        step = Batchsize(positive("initial_step", initial_step))
        _cover(func, start, end, step, args, kwargs)

    @staticmethod
    def chunked(
        func: Callable[..., object], tensor: torch.Tensor, initial_step: int, dimension: int = 0
    ) -> None:
        """Call `func(chunk, start, end)` for chunks of the tensor, cut along `dimension`."""
        part = _chunks(func, tensor, dimension)
        simple.range(part, 0, tensor.shape[dimension], initial_step)


class explicit:  # noqa: N801
    """Calls that remember sizes, in a cache for each function or context.

    `toma_context` is what the cache belongs to instead of the function, `toma_cache_type` the type
    of the cache, `DEFAULT_CACHE_TYPE` by default. All other arguments are passed on.
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
        _cover(func, start, end, step, args, kwargs)

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
        """Call `func(chunk, start, end, *args, **kwargs)` for chunks of the tensor.

        The chunks are views, cut along `toma_dimension`, 0 by default.
        """
        dim = toma_dimension or 0
        step = _remembered("initial_step", initial_step, func, toma_cache_type, toma_context)
        _cover(_chunks(func, tensor, dim), 0, tensor.shape[dim], step, args, kwargs)


def _execute(
    kind: str, cache_type: CacheType | None, context: Hashable, *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """A decorator that runs the function at once; its cache belongs to the place in the code."""
    kwargs["toma_context"] = context or tst.get_simple_traceback(2)
    kwargs["toma_cache_type"] = cache_type
    run: Callable[..., Any] = getattr(explicit, kind)
    return lambda func: run(func, *args, **kwargs)


class _Execute:
    """Decorators that run the function at once."""

    @staticmethod
    def batch(
        initial_batchsize: int, cache_type: CacheType | None = None, context: Hashable = None
    ) -> Callable[[Callable[[int], Any]], Any]:
        """Run `func(batchsize)`; the name of the function becomes its result.

        Example:
            >>> @toma.execute.batch(initial_batchsize=64)
            ... def result(batchsize):
            ...     return batchsize
            >>> result
            64
        """
        return _execute("batch", cache_type, context, initial_batchsize)

    @staticmethod
    def range(
        start: int,
        end: int,
        initial_step: int,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Callable[[Callable[[int, int], object]], None]:
        """Run `func(start, end)` for parts of the range."""
        return _execute("range", cache_type, context, start, end, initial_step)

    @staticmethod
    def chunked(
        tensor: torch.Tensor,
        initial_step: int | None = None,
        dimension: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Callable[[Callable[[torch.Tensor, int, int], object]], None]:
        """Run `func(chunk, start, end)` for chunks of the tensor."""
        return _execute(
            "chunked", cache_type, context, tensor, initial_step, toma_dimension=dimension
        )


def _decorator(
    func: Callable[..., Any] | None,
    run: Callable[..., Any],
    leading: Sequence[str],
    cache_type: CacheType | None,
    **settings: Any,
) -> Any:
    """Decorate a function with one of the `explicit` calls; without a function, the decorator.

    Args:
        func: what to decorate.
        run: the call.
        leading: the arguments that come before the initial size.
        cache_type: of its cache.
        **settings: what a call can set otherwise, by these names; the initial size is the first.
    """
    if func is None:
        return lambda func: _decorator(func, run, leading, cache_type, **settings)

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        passed = {name: kwargs.pop(name, None) for name in settings}
        initial, *others = (settings[k] if v is None else v for k, v in passed.items())
        first = [*args[: len(leading)]]
        first += [kwargs.pop(name) for name in leading[len(args) :] if name in kwargs]
        chosen = dict(zip(list(settings)[1:], others, strict=True))
        rest = args[len(leading) :]
        return run(func, *first, initial, *rest, toma_cache_type=cache_type, **chosen, **kwargs)

    added = "\n".join(f"    {name}: for the decorator's {name[5:]}." for name in settings)
    wrapped.__doc__ = (
        f"Wrapped in toma.{run.__name__}.\n\nAdditional keyword arguments:\n{added}\n\n"
        f"{func.__doc__ or ''}"
    )
    return wrapped


class toma:  # noqa: N801
    """Decorators; `toma.execute` has those that run the function at once.

    A call of a decorated function may have `toma_initial_batchsize` or `toma_initial_step`,
    `toma_dimension` and `toma_context` for those of the decorator. The caches, `explicit` and
    `simple` are here too, as the library's documents write them.
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
        """Decorate `func(batchsize, ...)`; it is then called without the size.

        Example:
            >>> @toma.batch(initial_batchsize=512)
            ... def run(batchsize, text):
            ...     return f"{text} {batchsize}"
            >>> run("with")
            'with 512'
        """
        settings = {"toma_initial_batchsize": initial_batchsize, "toma_context": context}
        return _decorator(func, explicit.batch, (), cache_type, **settings)

    @staticmethod
    def range(
        func: Callable[..., object] | None = None,
        *,
        initial_step: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Any:
        """Decorate `func(start, end, ...)`; a call covers the range in parts."""
        settings = {"toma_initial_step": initial_step, "toma_context": context}
        return _decorator(func, explicit.range, ("start", "end"), cache_type, **settings)

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
        settings = {
            "toma_initial_step": initial_step,
            "toma_dimension": dimension,
            "toma_context": context,
        }
        return _decorator(func, explicit.chunked, ("tensor",), cache_type, **settings)
