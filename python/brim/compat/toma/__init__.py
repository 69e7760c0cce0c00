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
from collections.abc import Callable, Hashable
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


def _cache(cache_type: CacheType | None, context: Hashable) -> BatchsizeCache:
    if cache_type is None:
        on_class = toma.DEFAULT_CACHE_TYPE
        cache_type = DEFAULT_CACHE_TYPE if on_class is StacktraceMemoryBatchsizeCache else on_class
    return get_cache_for_context(cache_type, context)


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


def _cover(part: Callable[[int, int], object], start: int, end: int, step: Batchsize) -> None:
    """Call `part` for parts of the range, from start to end."""
    current = start

    def call(size: int) -> object:
        return part(current, min(current + size, end))

    while current < end:
        current += _fit(_halve_step, step, call)[1]


def _chunks(
    func: Callable[..., object],
    tensor: torch.Tensor,
    dimension: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[int, int], object]:
    def part(start: int, end: int) -> object:
        chunk = tensor.narrow(dim=dimension, start=start, length=end - start)
        return func(chunk, start, end, *args, **kwargs)

    return part


def _document(wrapped: Callable[..., Any], kind: str, **arguments: str) -> None:
    """Say in the docstring which arguments the decorator adds."""
    added = "\n".join(f"    {name}: {text}." for name, text in arguments.items())
    own = wrapped.__doc__ or ""
    wrapped.__doc__ = f"Wrapped in toma.{kind}.\n\nAdditional keyword arguments:\n{added}\n\n{own}"


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
        _cover(lambda a, b: func(a, b, *args, **kwargs), start, end, step)

    @staticmethod
    def chunked(
        func: Callable[..., object], tensor: torch.Tensor, initial_step: int, dimension: int = 0
    ) -> None:
        """Call `func(chunk, start, end)` for chunks of the tensor, cut along `dimension`."""
        step = Batchsize(positive("initial_step", initial_step))
        part = _chunks(func, tensor, dimension, (), {})
        _cover(part, 0, tensor.shape[dimension], step)


class explicit:  # noqa: N801
    """Calls that remember sizes, in a cache for each function or context."""

    @staticmethod
    def batch(
        func: Callable[..., Any],
        initial_batchsize: int,
        *args: Any,
        toma_context: Hashable = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call `func(batchsize, *args, **kwargs)` with the first size that fits.

        Args:
            func: the function.
            initial_batchsize: the size to start with, where none is remembered.
            *args: passed on.
            toma_context: what the cache belongs to instead of the function.
            toma_cache_type: the type of the cache; `DEFAULT_CACHE_TYPE` by default.
            **kwargs: passed on.
        """
        initial = positive("initial_batchsize", initial_batchsize)
        size = _cache(toma_cache_type, toma_context or func).get_batchsize(initial)
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
        """Call `func(start, end, *args, **kwargs)` for parts of the range; see `batch`."""
        initial = positive("initial_step", initial_step)
        step = _cache(toma_cache_type, toma_context or func).get_batchsize(initial)
        _cover(lambda a, b: func(a, b, *args, **kwargs), start, end, step)

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
        """Call `func(chunk, start, end, *args, **kwargs)` for chunks of the tensor; see `batch`.

        The chunks are views, cut along `toma_dimension`, 0 by default.
        """
        dimension = toma_dimension or 0
        initial = positive("initial_step", initial_step)
        step = _cache(toma_cache_type, toma_context or func).get_batchsize(initial)
        part = _chunks(func, tensor, dimension, args, kwargs)
        _cover(part, 0, tensor.shape[dimension], step)


class _Execute:
    """Decorators that run the function at once; the cache belongs to the place in the code."""

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
        context = context or tst.get_simple_traceback(1)

        def execute_batch(func: Callable[[int], Any]) -> Any:
            return explicit.batch(
                func, initial_batchsize, toma_cache_type=cache_type, toma_context=context
            )

        return execute_batch

    @staticmethod
    def range(
        start: int,
        end: int,
        initial_step: int,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Callable[[Callable[[int, int], object]], None]:
        """Run `func(start, end)` for parts of the range."""
        context = context or tst.get_simple_traceback(1)

        def execute_range(func: Callable[[int, int], object]) -> None:
            explicit.range(
                func, start, end, initial_step, toma_cache_type=cache_type, toma_context=context
            )

        return execute_range

    @staticmethod
    def chunked(
        tensor: torch.Tensor,
        initial_step: int | None = None,
        dimension: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Callable[[Callable[[torch.Tensor, int, int], object]], None]:
        """Run `func(chunk, start, end)` for chunks of the tensor."""
        context = context or tst.get_simple_traceback(1)

        def execute_chunked(func: Callable[[torch.Tensor, int, int], object]) -> None:
            explicit.chunked(
                func,
                tensor,
                initial_step,  # type: ignore[arg-type]  # None is refused there, by name
                toma_dimension=dimension,
                toma_cache_type=cache_type,
                toma_context=context,
            )

        return execute_chunked


class toma:  # noqa: N801
    """Decorators; `toma.execute` has those that run the function at once.

    The caches, `explicit` and `simple` are here too, as the library's documents write them.
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

        A call may have `toma_initial_batchsize` and `toma_context` for the two of the decorator.

        Example:
            >>> @toma.batch(initial_batchsize=512)
            ... def run(batchsize, text):
            ...     return f"{text} {batchsize}"
            >>> run("with")
            'with 512'
        """
        if func is None:
            return functools.partial(
                toma.batch,
                initial_batchsize=initial_batchsize,
                cache_type=cache_type,
                context=context,
            )

        @functools.wraps(func)
        def wrapped(
            *args: Any,
            toma_initial_batchsize: int | None = None,
            toma_context: Hashable = None,
            **kwargs: Any,
        ) -> Any:
            return explicit.batch(
                func,
                toma_initial_batchsize or initial_batchsize,  # type: ignore[arg-type]
                *args,
                toma_cache_type=cache_type,
                toma_context=toma_context or context,
                **kwargs,
            )

        _document(
            wrapped,
            "batch",
            toma_initial_batchsize="the size to start with",
            toma_context="what the remembered size belongs to",
        )
        return wrapped

    @staticmethod
    def range(
        func: Callable[..., object] | None = None,
        *,
        initial_step: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Any:
        """Decorate `func(start, end, ...)`; a call covers the range in parts.

        A call may have `toma_initial_step` and `toma_context` for the two of the decorator.
        """
        if func is None:
            return functools.partial(
                toma.range, initial_step=initial_step, cache_type=cache_type, context=context
            )

        @functools.wraps(func)
        def wrapped(
            start: int,
            end: int,
            *args: Any,
            toma_initial_step: int | None = None,
            toma_context: Hashable = None,
            **kwargs: Any,
        ) -> None:
            explicit.range(
                func,
                start,
                end,
                toma_initial_step or initial_step,  # type: ignore[arg-type]
                *args,
                toma_cache_type=cache_type,
                toma_context=toma_context or context,
                **kwargs,
            )

        _document(
            wrapped,
            "range",
            toma_initial_step="the step to start with",
            toma_context="what the remembered step belongs to",
        )
        return wrapped

    @staticmethod
    def chunked(
        func: Callable[..., object] | None = None,
        *,
        initial_step: int | None = None,
        dimension: int | None = None,
        cache_type: CacheType | None = None,
        context: Hashable = None,
    ) -> Any:
        """Decorate `func(chunk, start, end, ...)`; a call with a tensor covers it in chunks.

        A call may have `toma_initial_step`, `toma_dimension` and `toma_context` for those of the
        decorator.
        """
        if func is None:
            return functools.partial(
                toma.chunked,
                initial_step=initial_step,
                dimension=dimension,
                cache_type=cache_type,
                context=context,
            )

        @functools.wraps(func)
        def wrapped(
            tensor: torch.Tensor,
            *args: Any,
            toma_initial_step: int | None = None,
            toma_dimension: int | None = None,
            toma_context: Hashable = None,
            **kwargs: Any,
        ) -> None:
            explicit.chunked(
                func,
                tensor,
                toma_initial_step or initial_step,  # type: ignore[arg-type]
                *args,
                toma_dimension=dimension if toma_dimension is None else toma_dimension,
                toma_cache_type=cache_type,
                toma_context=toma_context or context,
                **kwargs,
            )

        _document(
            wrapped,
            "chunked",
            toma_initial_step="the step to start with",
            toma_dimension="the dimension to cut",
            toma_context="what the remembered step belongs to",
        )
        return wrapped
