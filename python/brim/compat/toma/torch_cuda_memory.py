"""CUDA's memory: how much there is, how to release it, and its out-of-memory errors."""

from __future__ import annotations

import gc

import torch

from brim import memory


def gc_cuda() -> None:
    """Collect garbage and release torch's cached CUDA memory.

    Example:
        >>> gc_cuda()
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def get_cuda_total_memory() -> int:
    """Bytes that the current CUDA device has; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def get_cuda_assumed_available_memory() -> int:
    """Bytes that torch has not reserved on the current CUDA device; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return get_cuda_total_memory() - int(torch.cuda.memory_reserved())


def get_cuda_available_memory() -> int:
    """Bytes of the current CUDA device that neither torch nor anything else holds."""
    return get_cuda_assumed_available_memory() - get_cuda_blocked_memory()


def get_cuda_blocked_memory() -> int:
    """Bytes of the current CUDA device held outside torch, as the driver says; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, _ = torch.cuda.mem_get_info()
    return max(get_cuda_assumed_available_memory() - int(free), 0)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Whether an error means that the memory of a CUDA device ran out.

    Example:
        >>> is_cuda_out_of_memory(RuntimeError("CUDA error: out of memory"))
        True
    """
    cause = memory.classify_error(exception)
    is_cuda = cause.device is None or cause.device.type == "cuda"
    return cause.kind == memory.OomKind.device_memory and is_cuda


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Whether a CUDA library had no memory for its workspace.

    Example:
        >>> is_cudnn_snafu(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
        True
    """
    text = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."
    if isinstance(exception, RuntimeError) and text in str(exception):
        return True
    return memory.classify_error(exception).kind == memory.OomKind.library_workspace


def cuda_meminfo() -> None:
    """Print allocated and reserved bytes of the current CUDA device, now and at their peak."""
    if not torch.cuda.is_available():
        return
    for label, held, cached in (
        ("Total", torch.cuda.memory_allocated(), torch.cuda.memory_reserved()),
        ("Max Total", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()),
    ):
        print(f"{label}: {held / 2**30} GB Cached: {cached / 2**30} GB")
