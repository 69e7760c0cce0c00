"""From a data set and a piece of work to a memory model, for the samplers' `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brim import _C
from brim._sample_sizes import one_column, size_function
from brim.predict import MemoryModel, collect_peaks

# Batches of up to so many samples are candidates; probing stops long before where memory ends.
_MOST_SAMPLES = 2**16


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
) -> tuple[MemoryModel, torch.Tensor]:
    """Probe `work` with batches of the data set. See `SizeAwareBatchSampler.fit`.

    Returns:
        the model, and the sizes of all samples.
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

    limit = _C.parse_bytes(budget, _C.memory_stats(device).limit)
    if cost == "padded":
        places = torch.linspace(0, 1, 5).mul(len(sizes) - 1).round().long()
        lengths = sorted({max(int(size), 1) for size in ascending[places]})
        counts = [2**k for k in range(_MOST_SAMPLES.bit_length())]
        candidates: list[Any] = [(count, length) for length in lengths for count in counts]
        model = MemoryModel.probe(run_padded, candidates, device, budget=limit, probes=probes)
        _check(model, run_padded, lengths, len(sizes), limit, device)
    else:
        # Only totals that some samples have: a model of others would be off by the difference.
        counts = [2**k for k in range(_MOST_SAMPLES.bit_length())]
        samples = {int(sizes[first(count)].sum()): count for count in counts}
        totals = sorted(total for total in samples if total > 0)
        model = MemoryModel.probe(
            lambda total: run(first(samples[total])), totals, device, budget=limit, probes=probes
        )
    return model, sizes


def _check(
    model: MemoryModel,
    run: Callable[[int, int], None],
    lengths: list[int],
    most: int,
    limit: int,
    device: str | torch.device | int | None,
) -> None:
    """Measure the fullest batches that the model allows, and learn from them.

    Probes are spread over all sizes. Whether batches fit is decided near the budget, and first of
    all for the longest samples, of which few make a large difference. No batch has more than
    `most` samples.
    """
    for length in (lengths[-1], lengths[len(lengths) // 2], lengths[-1]):
        count = min(max(model.largest_batch(length, limit), 1), most)
        measured = [*model.samples]
        if any((sample.n, sample.length) == (count, length) for sample in measured):
            continue
        peak = collect_peaks(lambda shape: run(*shape), [(count, length)], device)[0]
        model.fit(
            [*((sample.n, sample.length) for sample in measured), (count, length)],
            [*(sample.peak for sample in measured), peak.peak],
            [*(sample.out_of_memory for sample in measured), peak.out_of_memory],
        )


def _all_sizes(dataset: Any, sizeof: object) -> torch.Tensor:
    function = size_function(sizeof)
    given = sizeof if function is None else _ask(dataset, function)
    sizes = one_column("sizes", given)
    if len(sizes) != len(dataset):
        raise ValueError(f"sizeof has {len(sizes)} sizes, and dataset {len(dataset)} samples")
    if sizes.is_floating_point():
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
