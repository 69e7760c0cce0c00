"""From a data set and a piece of work to a memory model, for the samplers' `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brim import _C
from brim._sample_sizes import one_column, size_function
from brim.predict import MemoryModel

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

    def run_sum(total: int) -> None:
        """Samples from all over the data set, about `total` in all."""
        order = torch.arange(len(sizes)).mul_(2_654_435_761).remainder_(len(sizes))
        totals = sizes[order].cumsum(0)
        rounds, rest = divmod(total, max(int(totals[-1]), 1))
        last = int(torch.searchsorted(totals, rest, right=True))
        run(torch.cat([order.repeat(rounds), order[: max(last, 1)]]))

    limit = _C.parse_bytes(budget, _C.memory_stats(device).limit)
    if cost == "padded":
        places = torch.linspace(0, 1, 5).mul(len(sizes) - 1).round().long()
        lengths = sorted({max(int(size), 1) for size in ascending[places]})
        counts = [2**k for k in range(_MOST_SAMPLES.bit_length())]
        candidates: list[Any] = [(count, length) for length in lengths for count in counts]
        model = MemoryModel.probe(run_padded, candidates, device, budget=limit, probes=probes)
    else:
        smallest = max(int(ascending[len(sizes) // 2]), 1)
        totals = [smallest * 2**k for k in range(_MOST_SAMPLES.bit_length())]
        model = MemoryModel.probe(run_sum, totals, device, budget=limit, probes=probes)
    return model, sizes


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
