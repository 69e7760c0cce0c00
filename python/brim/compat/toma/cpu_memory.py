"""The CPU's memory: how much is free, a limit, and its out-of-memory errors."""

from __future__ import annotations

from brim import memory

__all__ = ["get_available_cpu_memory", "is_out_of_cpu_memory", "set_cpu_memory_limit"]


def get_available_cpu_memory() -> int:
    """Bytes that this process can still allocate, within the machine, the container and limits.

    Example:
        >>> get_available_cpu_memory() > 0
        True
    """
    return memory.memory_stats("cpu").free


def set_cpu_memory_limit(num_gigabytes: float) -> None:
    """Limit the address space of the process (RLIMIT_AS). It can be lowered, never raised.

    `brim.budget(…, device="cpu")` limits tensors instead, for a `with` block.

    Example:
        >>> set_cpu_memory_limit(64)  # doctest: +SKIP
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit = int(num_gigabytes * 2**30)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Whether an error means that the CPU's memory ran out.

    Example:
        >>> is_out_of_cpu_memory(MemoryError())
        True
    """
    return memory.classify_error(exception).kind == memory.OomKind.host_memory
