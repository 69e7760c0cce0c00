"""The CPU's memory: how much is left, a limit on it, and the errors that say it ran out."""

from __future__ import annotations

from brim import memory

__all__ = ["get_available_cpu_memory", "is_out_of_cpu_memory", "set_cpu_memory_limit"]


def get_available_cpu_memory() -> int:
    """Bytes that this process can still take: the least that machine, container and limits leave.

    Example:
        >>> get_available_cpu_memory() > 0
        True
    """
    return memory.memory_stats("cpu").free


def set_cpu_memory_limit(num_gigabytes: float) -> None:
    """Limit the process' address space for good (RLIMIT_AS); a limit can be lowered, never raised.

    `brim.budget(…, device="cpu")` limits what tensors take, for a `with` block.
    """
    try:
        import resource
    except ImportError:  # Windows knows no such limit
        return
    limit = int(num_gigabytes * 2**30)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Whether an error says that the CPU's memory ran out.

    Example:
        >>> is_out_of_cpu_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: …"))
        True
    """
    return memory.classify_error(exception).kind == memory.OomKind.host_memory
