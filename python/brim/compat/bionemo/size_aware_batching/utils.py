"""Peak memory of a workflow on CUDA, and buckets of sizes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from brim import _C, memory
from brim.data import Buckets

__all__: Sequence[str] = ("Buckets", "collect_cuda_peak_alloc", "create_buckets")

Data = TypeVar("Data")
Feature = TypeVar("Feature")
TorchIntegerDataTypes = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def check_numbers(name: str, values: object, *, floats: bool) -> torch.Tensor:
    """Check for a 1D tensor of integers, or with `floats` also of floating point numbers."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} should be a torch tensor, but got {name}={values}")
    if values.ndim != 1:
        raise ValueError(f"{name} should be a 1D tensor, but got a shape of {tuple(values.shape)}")
    if values.dtype not in TorchIntegerDataTypes and not (floats and values.is_floating_point()):
        kind = "integers or floating point numbers" if floats else "integers"
        raise ValueError(f"{name} should contain only {kind}, but got {name}.dtype={values.dtype}")
    return values.detach()


def _peak_of(
    work: Callable[[Data], Feature], data: Data, device: torch.device
) -> tuple[Feature, int] | None:
    """The result and the peak, or None if it ran out of memory.

    A separate function, so that the error and its frames are released before the clean-up.
    """
    try:
        feature = work(data)
        return feature, torch.cuda.memory_stats(device)["allocated_bytes.all.peak"]
    except Exception as error:
        if not memory.is_out_of_memory(error):
            raise
    return None


def collect_cuda_peak_alloc(
    dataset: Iterable[Data],
    work: Callable[[Data], Feature],
    device: torch.device,
    cleanup: Callable[[], None] | None = None,
) -> tuple[list[Feature], list[int]]:
    """Run a workflow on each element and record the peak of the memory allocated on a GPU.

    The first elements may have a higher peak than later ones of the same size, because libraries
    allocate their workspaces then.

    Args:
        dataset: the elements.
        work: called with each element; returns its feature.
        device: a CUDA device; another one is a ValueError.
        cleanup: called after each element, before garbage is collected and torch's cache is
            emptied.

    Returns:
        The features, and the peaks in bytes. An element that ran out of memory is in neither, and
        is reported on stderr; `brim.collect_peaks` keeps it, as a lower bound.

    Example:
        >>> collect_cuda_peak_alloc([1], torch.zeros, torch.device("cpu"))
        Traceback (most recent call last):
        ValueError: device is cpu; collect_cuda_peak_alloc is for CUDA devices only
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device is {device}; collect_cuda_peak_alloc is for CUDA devices only")
    features: list[Feature] = []
    peaks: list[int] = []
    for index, data in enumerate(dataset):
        torch.cuda.reset_peak_memory_stats(device)
        try:
            measured = _peak_of(work, data, device)
        finally:
            del data  # else it would be alive while the next element is made
            if cleanup is not None:
                cleanup()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        if measured is None:
            message = f"Element {index} ran out of memory on {device} and is skipped"
            print(message, file=sys.stderr, flush=True)
        else:
            features.append(measured[0])
            peaks.append(measured[1])
        del measured
    return features, peaks


def _check_positive(name: str, value: object) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} should be a positive integer but got {name}={value}")
    return min(value, torch.iinfo(torch.int64).max)


def create_buckets(sizes: torch.Tensor, max_width: int, min_bucket_count: int) -> Buckets:
    """Divide integer sizes into buckets of limited width that hold enough elements.

    A bucket takes sizes in ascending order until it has `min_bucket_count` elements. It ends
    earlier if it would become wider than `max_width`. Gaps are filled with empty buckets.

    Args:
        sizes: a 1D tensor of integers.
        max_width: the largest width of a bucket, at least 1.
        min_bucket_count: the number of elements at which a bucket is full, at least 1.

    Returns:
        The boundaries, ascending, and the number of elements in each bucket; int64, on the CPU.

    Raises:
        TypeError: if `sizes` is not a tensor.
        ValueError: if an argument is not as described or there would be more than 2**24 buckets.

    Example:
        >>> sizes = torch.tensor([1, 1, 2, 3, 3, 9])
        >>> create_buckets(sizes, max_width=4, min_bucket_count=3).bucket_boundaries
        tensor([ 1,  3,  7, 10])
    """
    column = check_numbers("sizes", sizes, floats=False).long().cpu()
    if len(column) == 0:
        raise ValueError("sizes should not be empty")
    max_width = _check_positive("max_width", max_width)
    min_bucket_count = _check_positive("min_bucket_count", min_bucket_count)
    return Buckets(*_C.create_buckets(column, max_width, min_bucket_count))
