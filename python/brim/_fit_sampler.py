"""From a data set and a piece of work to a memory model, for the samplers' `fit`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from brim import _C
from brim._sample_sizes import one_column, size_function
from brim.predict import MemoryModel, collect_peaks

# Batches of up to so many samples are candidates; probing stops long before where memory ends.
_MOST_SAMPLES = 2**16
# Of an allocator's losses: batches that fill less than this say nothing about them, so many are run
# at most, and after one that does not fit they are by so much smaller.
_NEARLY_FULL, _MOST_CHECKS, _SMALLER = 0.7, 100, 0.96
# Worth a warning: a quarter of the budget would stay empty.
_LARGE_MARGIN = 0.25


def fit_memory_model(
    dataset: Any,
    work: Callable[[Any], object],
    sizeof: object,
    budget: int | str,
    device: str | torch.device | int | None,
    *,
    cost: str,
    collate_fn: Callable[[list[Any]], Any] | None,
    probes: int,
) -> tuple[MemoryModel, torch.Tensor, int]:
    """Probe `work` with batches of the data set. See `SizeAwareBatchSampler.fit`.

    Returns:
        the model, the sizes of all samples, and the bytes that the model may predict for a batch:
        the budget, on CUDA less what torch's allocator loses between blocks.
    """
    if cost not in ("padded", "sum"):
        raise ValueError(f'cost must be "padded" or "sum" to be fitted, got {cost!r:.100}')
    if len(dataset) == 0:
        raise ValueError("dataset is empty: there is nothing to measure")
    sizes = _all_sizes(dataset, sizeof)
    by_size = torch.argsort(sizes, stable=True)
    ascending = sizes[by_size]

    def run(chosen: torch.Tensor) -> None:
        samples = [dataset[int(index)] for index in chosen]
        work(samples if collate_fn is None else collate_fn(samples))

    def run_padded(count: int, length: int) -> None:
        """`count` samples whose longest is `length`, the others as near as there are."""
        end = int(torch.searchsorted(ascending, length, right=True))
        run(by_size[end - 1 - torch.arange(count) % end])

    # Samples from all over the data set, for batches whose total matters.
    order = torch.arange(len(sizes)).mul_(2_654_435_761).remainder_(len(sizes))

    def first(count: int) -> torch.Tensor:
        return order[torch.arange(count) % len(order)]

    there_is = _C.memory_stats(device).limit
    limit = _C.parse_bytes(budget, there_is)
    if limit > there_is:
        raise ValueError(
            f"budget must not exceed what the device allows, {_C.format_bytes(there_is)}, got "
            f"{_C.format_bytes(limit)}"
        )
    if cost == "padded":

        def quantiles(count: int) -> list[int]:
            places = torch.linspace(0, 1, count).mul(len(sizes) - 1).round().long()
            return sorted({max(int(size), 1) for size in ascending[places]})

        lengths = quantiles(5)
        counts = [2**k for k in range(_MOST_SAMPLES.bit_length())]
        candidates: list[Any] = [(count, length) for length in lengths for count in counts]
        model = MemoryModel.probe(run_padded, candidates, device, budget=limit, probes=probes)

        def fullest(length: int, usable: int) -> tuple[int, ...]:
            return min(max(model.largest_batch(length, usable), 1), len(sizes)), length

        # The longest first: of them few make a large difference.
        tried = [lengths[-1], lengths[len(lengths) // 2], lengths[-1]]
        usable = _check(model, run_padded, fullest, tried, quantiles(12), limit, device)
    else:
        # Only totals that some samples have: a model of others would be off by the difference.
        counts = [2**k for k in range(_MOST_SAMPLES.bit_length())]
        samples = {int(sizes[first(count)].sum()): count for count in counts}
        totals = sorted(total for total in samples if total > 0)

        def run_sum(total: int) -> None:
            run(first(samples[total]))

        def fullest_sum(_: int, usable: int) -> tuple[int, ...]:
            most = model.largest_size(usable)
            return (max((total for total in totals if total <= most), default=totals[0]),)

        model = MemoryModel.probe(run_sum, totals, device, budget=limit, probes=probes)
        usable = _check(model, run_sum, fullest_sum, [0], [0], limit, device)
    smallest = max(int(ascending[0]), 1)
    none_fits = (
        model.largest_batch(smallest, usable) == 0
        if cost == "padded"
        else (model.largest_size(usable) < smallest)
    )
    if none_fits:
        raise ValueError(
            f"no batch is expected to stay within {_C.format_bytes(usable)}: the smallest sample "
            f"has size {smallest}, and the measurements gave\n{model}"
        )
    if model.margin > _LARGE_MARGIN:
        warnings.warn(
            f"the memory model fits the measurements badly, so batches may fill little of the "
            f"budget: its margin is {model.margin:.0%}",
            UserWarning,
            stacklevel=3,
        )
    return model, sizes, usable


def _check(
    model: MemoryModel,
    run: Callable[..., None],
    fullest: Callable[[int, int], tuple[int, ...]],
    lengths: list[int],
    mixed: list[int],
    limit: int,
    device: str | torch.device | int | None,
) -> int:
    """Measure the fullest batches that the model allows, and learn from them.

    Probes are spread over all sizes; whether batches fit is decided near the budget.

    Args:
        model: is fitted anew.
        run: works on a batch of a shape.
        fullest: the shape of the fullest batch of a length within so many bytes.
        lengths: what to measure.
        mixed: lengths that batches may have, for CUDA's allocator.
        limit: the budget.
        device: where.

    Returns:
        bytes that may be predicted for a batch.
    """
    for length in lengths:
        shape = fullest(length, limit)
        measured = [*model.samples]
        sizes = [(sample.n, sample.length)[: len(shape)] for sample in measured]
        if shape not in sizes:
            peak = collect_peaks(lambda args: run(*args), [shape], device)[0]
            model.fit(
                [size if len(shape) > 1 else size[0] for size in [*sizes, shape]],
                [*(sample.peak for sample in measured), peak.peak],
                [*(sample.out_of_memory for sample in measured), peak.out_of_memory],
            )
    if torch.device(_C.default_device() if device is None else device).type != "cuda":
        return limit
    full = [n for n in mixed if model.safe_peak(*fullest(n, limit)) >= _NEARLY_FULL * limit]
    return _usable(run, fullest, full, limit, device)


def _usable(
    run: Callable[..., None],
    fullest: Callable[[int, int], tuple[int, ...]],
    lengths: list[int],
    limit: int,
    device: str | torch.device | int | None,
) -> int:
    """How much tensors can hold under a limit on what torch's CUDA allocator reserves.

    It rounds and splits blocks, the more the batches differ, so it reserves more than tensors
    hold, and the limit is on that. Full batches of all lengths are run under the limit, smaller
    ones after each that does not fit, until all have fitted twice.
    """
    usable, fitted = limit, 0
    _C.release_cached(device)
    with _C.Budget(limit, device):
        for length in itertools.islice(itertools.cycle(lengths), _MOST_CHECKS):
            shape = fullest(length, usable)
            if collect_peaks(lambda args: run(*args), [shape], device)[0].out_of_memory:
                usable, fitted = int(usable * _SMALLER), 0
            else:
                fitted += 1
            if fitted == 2 * len(lengths):
                break
    return usable


def _all_sizes(dataset: Any, sizeof: object) -> torch.Tensor:
    function = size_function(sizeof)
    given = sizeof if function is None else _ask(dataset, function)
    sizes = one_column("sizes", given)
    if len(sizes) != len(dataset):
        raise ValueError(f"sizeof has {len(sizes)} sizes, and dataset {len(dataset)} samples")
    if sizes.is_floating_point():
        if not bool(sizes.isfinite().all()):
            index = int((~sizes.isfinite()).nonzero()[0])
            raise ValueError(f"sizes must be finite, got {float(sizes[index])} at index {index}")
        whole = sizes.round()
        if not torch.equal(whole, sizes):
            raise ValueError("sizes must be whole numbers to fit a memory model")
        sizes = whole.long()
    if bool((sizes < 0).any()):
        index = int((sizes < 0).nonzero()[0])
        raise ValueError(f"sizes must not be negative, got {int(sizes[index])} at index {index}")
    return sizes


def _ask(dataset: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Sizes by index; by sample where the function cannot take an index."""
    try:
        function(0)
    except Exception:
        return [function(dataset[index]) for index in range(len(dataset))]
    return [function(index) for index in range(len(dataset))]
