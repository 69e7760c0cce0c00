"""Caches of batch sizes: none, one size per function, or one per call site and free memory.

A cache belongs to one function, or to the context that was passed in its place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from brim.compat.toma import cpu_memory
from brim.compat.toma import stacktrace as tst
from brim.compat.toma import torch_cuda_memory as tcm


@dataclass
class Batchsize:
    """A size that is halved when memory runs out. Calls that share it learn from each other."""

    value: int | None = None

    def set_initial_batchsize(self, initial_batchsize: int) -> None:
        """Set the size if there is none yet."""
        if not self.value:
            self.value = initial_batchsize

    def get(self) -> int:
        """The size to try now."""
        return self.value  # type: ignore[return-value]  # None only before it is set

    def decrease_batchsize(self) -> None:
        """Halve the size."""
        assert self.value is not None
        self.value //= 2
        assert self.value > 0


class BatchsizeCache:
    """Base class of caches; `all_instances` has those that called this constructor."""

    all_instances: ClassVar[weakref.WeakValueDictionary[tuple[tst.Frame, ...], BatchsizeCache]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self) -> None:
        BatchsizeCache.all_instances[tst.get_simple_traceback(2)] = self

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """The size to start a call with, `initial_batchsize` if nothing is known."""
        raise NotImplementedError


@dataclass
class NoBatchsizeCache(BatchsizeCache):
    """Remembers nothing: every call starts with the size it is given.

    Example:
        >>> NoBatchsizeCache().get_batchsize(64).get()
        64
    """

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """A new size."""
        return Batchsize(initial_batchsize)


@dataclass
class GlobalBatchsizeCache(BatchsizeCache):
    """Remembers the last size, wherever the function is called from.

    Example:
        >>> cache = GlobalBatchsizeCache()
        >>> cache.get_batchsize(64).decrease_batchsize()
        >>> cache.get_batchsize(64).get()
        32
    """

    batchsize: Batchsize | None = None

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """The one size of this cache."""
        if not self.batchsize:
            self.batchsize = Batchsize(initial_batchsize)
        return self.batchsize


class StacktraceMemoryBatchsizeCache(BatchsizeCache):
    """Remembers the last size for each call site and amount of free memory.

    Example:
        >>> StacktraceMemoryBatchsizeCache().get_batchsize(64).get()
        64
    """

    LRU_CACHE_SIZE: int = 2**16  # sizes
    MEMORY_GRANULARITY: int = 2**28  # bytes: free memory is rounded down to multiples
    TRACK_RAM: bool = True  # whether the CPU's memory counts too

    initial_batchsize: int | None
    get_batchsize_from_cache: Callable[[tuple[tst.Frame, ...], int, int], Batchsize]

    def __init__(self, lru_cache_size: int | None = None) -> None:
        super().__init__()
        self.initial_batchsize = None

        @functools.lru_cache(lru_cache_size or StacktraceMemoryBatchsizeCache.LRU_CACHE_SIZE)
        def get_batchsize_from_cache(
            stacktrace: tuple[tst.Frame, ...], cpu_available_memory: int, gpu_available_memory: int
        ) -> Batchsize:
            return Batchsize(self.initial_batchsize)

        self.get_batchsize_from_cache = get_batchsize_from_cache

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """The size for the caller's call site."""
        stacktrace = tst.get_simple_traceback(2)
        step = self.MEMORY_GRANULARITY
        ram = int(cpu_memory.get_available_cpu_memory() // step) if self.TRACK_RAM else -1
        gpu = int(tcm.get_cuda_assumed_available_memory() // step)
        batchsize = self.get_batchsize_from_cache(stacktrace, ram, gpu)
        batchsize.set_initial_batchsize(initial_batchsize)
        return batchsize
