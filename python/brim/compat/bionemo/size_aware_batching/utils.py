"""Peak memory of a workflow on CUDA, and buckets of sizes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch

from brim import _C, memory

__all__: Sequence[str] = ("Buckets", "collect_cuda_peak_alloc", "create_buckets")

Data = TypeVar("Data")
Feature = TypeVar("Feature")
TorchIntegerDataTypes = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


class Buckets(NamedTuple):
    """Buckets of sizes.

    Attributes:
        bucket_boundaries: where buckets begin and the last one ends, ascending. Bucket k holds the
            sizes from boundary k up to, but not with, boundary k + 1.
        bucket_sizes: how many elements each bucket holds.
    """

    bucket_boundaries: torch.Tensor
    bucket_sizes: torch.Tensor


def _peak_of(
    work: Callable[[Data], Feature], data: Data, device: torch.device
) -> tuple[Feature, int] | None:
    """The work's result and the peak, or None if it ran out of memory.

    A frame of its own: the error and all that its frames hold are gone before the clean-up.
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
    """Runs a workflow on each element and records the peak of the memory allocated on a GPU.

    The first elements may show another peak than later ones of the same size, because libraries
    allocate their workspaces then.

    Args:
        dataset: the elements.
        work: what is done with one; its result is kept as the element's feature.
        device: the CUDA device.
        cleanup: called after each element, also after one that failed, before garbage is collected
            and torch's cache is emptied.

    Returns:
        The features and the peaks in bytes, of the same length. An element that ran out of memory
        is in neither, and is reported on stderr; `brim.collect_peaks` keeps it, as a lower bound.

    Raises:
        ValueError: if `device` is not a CUDA device.

    Example:
        >>> collect_cuda_peak_alloc([], len, torch.device("cpu"))
        Traceback (most recent call last):
            ...
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
            # The element too: the next one is made before this name is bound again.
            del data
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
    """Divides integer sizes into buckets of limited width that hold enough elements each.

    From the smallest size on, a bucket takes in sizes until it has `min_bucket_count` elements. It
    ends earlier where it would grow wider than `max_width`; gaps are filled with empty buckets.

    Args:
        sizes: integers, one-dimensional.
        max_width: the largest width of a bucket, at least 1.
        min_bucket_count: from how many elements on a bucket is full, at least 1.

    Returns:
        The boundaries in ascending order, and the number of elements in each bucket; int64, on the
        CPU.

    Raises:
        TypeError: if `sizes` is not a tensor.
        ValueError: if `sizes` is empty, not one-dimensional or not of integers, if one of the
            others is not a positive integer, or if there would be more than 2**24 buckets.

    Example:
        >>> buckets = create_buckets(torch.tensor([1, 1, 2, 3, 3, 9]), max_width=4,
        ...                          min_bucket_count=3)
        >>> buckets.bucket_boundaries
        tensor([ 1,  3,  7, 10])
        >>> buckets.bucket_sizes
        tensor([3, 2, 1])
    """
    if not isinstance(sizes, torch.Tensor):
        raise TypeError(f"sizes should be a torch tensor, but got sizes={sizes}")
    if sizes.ndim != 1:
        raise ValueError(f"sizes should be a 1D tensor, but got a shape of {tuple(sizes.shape)}")
    if sizes.dtype not in TorchIntegerDataTypes:
        raise ValueError(f"sizes should be integers, but got sizes.dtype={sizes.dtype}")
    if len(sizes) == 0:
        raise ValueError("sizes should not be empty")
    max_width = _check_positive("max_width", max_width)
    min_bucket_count = _check_positive("min_bucket_count", min_bucket_count)
    # In 64 bits: one above the largest uint8 is 256, not 0.
    return Buckets(*_C.create_buckets(sizes.detach().long().cpu(), max_width, min_bucket_count))
