"""From a data set and a piece of work to a sampler under a byte budget, for the samplers' `fit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from brim import _C
from brim.data.base import BatchSamplerBase, warn
from brim.data.sizes import one_column, size_function
from brim.predict import MemoryModel

# A sampler warns if batches may need so much more than measurements of others suggest.
_UNPREDICTABLE = 0.25


class Make(Protocol):
    """Makes a sampler of its sizes, budget and cost; some options may be replaced."""

    def __call__(
        self, sizes: torch.Tensor, maximum: int, cost: Any, **changes: Any
    ) -> BatchSamplerBase: ...


def fit_sampler(
    make: Make,
    dataset: Any,
    work: Callable[[Any], object],
    sizeof: object,
    budget: int | str,
    device: str | torch.device | int | None,
    *,
    cost: str,
    collate_fn: Callable[[list[Any]], Any] | None,
    probes: int,
) -> Any:
    """Measure `work`, and make a sampler whose batches stay under the budget.

    See `SizeAwareBatchSampler.fit`.
    """
    if cost not in ("padded", "sum"):
        raise ValueError(f'cost must be "padded" or "sum" to be fitted, got {cost!r:.100}')
    if len(dataset) == 0:
        raise ValueError("dataset is empty: there is nothing to measure")
    sizes = _all_sizes(dataset, sizeof)
    limit = _C.parse_bytes(budget, _C.memory_stats(device).limit)

    def run(indices: list[int]) -> None:
        samples = [dataset[index] for index in indices]
        work(samples if collate_fn is None else collate_fn(samples))

    def make_trial(maximum: int, model: _C.MemoryModel | None) -> _C.SampleBatching:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the final sampler reports what is left out
            alone = {"seed": 0, "generator": None, "rank": 0, "world_size": 1}
            return make(sizes, maximum, "sum" if model is None else model, **alone)._ready()

    maximum, found, error = _C.fit_batching(
        sizes.contiguous(), run, make_trial, cost == "padded", limit, device, probes
    )
    model = None
    if found is not None:
        model = MemoryModel()
        model._assign(found)
    if error > _UNPREDICTABLE:
        warn(
            f"what the work needs cannot be told from the sizes of the samples: a batch may need "
            f"up to {error:.0%} more than measurements of other batches say. Those that were "
            f"measured stay within the budget; others may not, and many will fill little of it. "
            f"Let sizeof give what memory grows with, or leave room in the budget"
        )
    made: Any = make(sizes, maximum, model if cost == "padded" else "sum")
    made.model = model
    return made


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
    return sizes


def _ask(dataset: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Sizes by index; by sample where the function cannot take an index."""
    try:
        function(0)
    except Exception:
        return [function(dataset[index]) for index in range(len(dataset))]
    return [function(index) for index in range(len(dataset))]
