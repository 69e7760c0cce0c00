"""Out of memory on demand, for tests: brim's own and its users'."""

from __future__ import annotations

from brim._C import OomInjector
from brim.memory import DeviceLike

__all__ = ["OomInjector", "inject_oom"]


def inject_oom(at: int = 1, count: int = 1, device: DeviceLike = "cpu") -> OomInjector:
    """Make chosen allocations inside a `with` block fail with `torch.OutOfMemoryError`.

    Args:
        at: the first allocation that fails, counted from 1 at the start of the block, over all
            threads.
        count: how many fail in a row from there.
        device: the CPU, or CUDA (all devices together); on other accelerators, use a small
            `brim.budget`, which fails for real. What layers keep only while there is room
            (`brim.convert(model, recompute="auto")`) is given up first, and the allocation is
            tried, and counted, again.

    Returns:
        A context manager with the counts `allocations` and `failures`.

    Raises:
        ValueError: if `at` or `count` is below 1, or the device is neither the CPU nor CUDA.
        NotImplementedError: on CUDA, if its allocator is not torch's own.

    Example:
        >>> import brim, torch
        >>> with brim.testing.inject_oom(at=2) as injector:
        ...     first = torch.empty(10)
        ...     try:
        ...         second = torch.empty(10)
        ...     except torch.OutOfMemoryError:
        ...         print("failed as planned")
        failed as planned
        >>> injector.failures
        1
    """
    return OomInjector(at, count, device)
