"""From a data set and a piece of work to a sampler under a byte budget, for the samplers' `fit`."""

from __future__ import annotations

import math
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from brim import _C
from brim.data.base import BatchSamplerBase, warn
from brim.data.sizes import one_column, size_function
from brim.predict import MemoryModel, collect_peaks

# Batches of up to so many samples are probed.
_MOST_SAMPLES = 2**16
# How many lengths stand for those of a data set.
_LENGTHS = 32
# Of a sampler's own batches: so many are measured, extreme ones and after a failure a few more, and
# this many epochs are looked at, of large data sets fewer.
_MOST_MEASURED, _EPOCHS, _MANY_SAMPLES = 32, 4, 200_000
_MOST_ROUNDS = 48  # of making the sampler, and of measuring its batches
# A model with a larger margin is checked on more batches, and one with a large margin is told of.
_NOISY, _UNPREDICTABLE = 0.01, 0.25
# Totals are made larger until this share of the budget is in use, in steps to this share of it, and
# by so many times at once.
_USED, _NEARLY, _GROWTH = 0.96, 0.99, 2.0
_SPREAD = 0.005  # batches of like sizes differ by so much, in the order of their samples
# What is measured may hold at most so many times the budget, else it is out of memory.
_BEYOND = 2
# Of an allocator's losses: batches that fill less than this say nothing about them, so many are run
# at most, and after one that does not fit they are by so much smaller.
_NEARLY_FULL, _MOST_CHECKS, _SMALLER = 0.7, 100, 0.96


class Make(Protocol):
    """Makes a sampler of its sizes, budget and cost; some options may be replaced."""

    def __call__(
        self, sizes: torch.Tensor, maximum: int, cost: Any, **changes: Any
    ) -> BatchSamplerBase: ...


class _Peak(NamedTuple):
    """Bytes that a batch needed; where it ran out of memory, more than that."""

    peak: int
    out_of_memory: bool


class _Batches(NamedTuple):
    """The batches of some epochs: their samples, and of each what its need may depend on."""

    offsets: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    longest: torch.Tensor
    totals: torch.Tensor
    squares: torch.Tensor
    epochs: torch.Tensor

    def samples(self, batch: int) -> list[int]:
        return self.indices[self.offsets[batch] : self.offsets[batch + 1]].tolist()


class _Fit:
    """What the steps of a fit share: samples, work, budget and how to make a sampler."""

    def __init__(
        self,
        make: Make,
        dataset: Any,
        work: Callable[[Any], object],
        sizes: torch.Tensor,
        limit: int,
        device: str | torch.device | int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.make, self.dataset, self.work, self.collate_fn = make, dataset, work, collate_fn
        self.sizes, self.limit, self.device = sizes, limit, device
        # No tensors: on the CPU they would count as memory of the work.
        by_size = torch.argsort(sizes, stable=True)
        self.by_size = array("q", by_size.tolist())
        self.ascending = array("q", sizes[by_size].tolist())
        self.error = 0.0  # by how much a batch needed more than was thought possible
        self.most = min(int(_BEYOND * limit), _C.memory_stats(device).limit)

    def run(self, chosen: Iterable[int]) -> None:
        with _C.Budget(self.most, self.device):
            samples = [self.dataset[index] for index in chosen]
            self.work(samples if self.collate_fn is None else self.collate_fn(samples))

    def measure(self, chosen: Iterable[int]) -> _Peak:
        sample = collect_peaks(self.run, [chosen], self.device)[0]
        # Libraries that run out of memory do not say what they asked for.
        silent = sample.out_of_memory and sample.requested is None
        least = self.limit + 1 if silent else 1
        return _Peak(max(sample.peak, least), sample.out_of_memory)

    def own_batches(self, maximum: int, cost: Any) -> _Batches:
        """The batches that the sampler makes in its first epochs."""
        epochs = max(1, min(_EPOCHS, _MANY_SAMPLES // len(self.sizes)))
        plans = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the sampler itself will tell what is left out
            trial = self.make(
                self.sizes, maximum, cost, seed=0, generator=None, rank=0, world_size=1
            )
            for epoch in range(epochs if trial.shuffle else 1):
                trial.set_epoch(epoch)
                plans.append(trial.plan())
        counts = torch.cat([plan.offsets.diff() for plan in plans])
        indices = torch.cat([plan.indices for plan in plans])
        sizes = self.sizes[indices].double()
        batch = torch.repeat_interleave(counts)

        def each(values: torch.Tensor, how: str) -> torch.Tensor:
            zeros = torch.zeros(len(counts), dtype=torch.float64)
            return zeros.scatter_reduce(0, batch, values, how)

        return _Batches(
            torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            indices,
            counts.double(),
            each(sizes, "amax"),
            each(sizes, "sum"),
            each(sizes**2, "sum"),
            torch.cat([torch.full((len(p.offsets) - 1,), e) for e, p in enumerate(plans)]),
        )

    def reservable(self, maximum: int, cost: Any) -> int:
        """The largest budget of a batch under a limit on what torch's CUDA allocator reserves.

        It rounds and splits blocks, the more the batches differ, so it reserves more than tensors
        hold, and the limit is on that. Full batches of all lengths are run under the limit, smaller
        ones after each that does not fit, until all have fitted twice.
        """

        def full_batches() -> list[list[int]]:
            batches = self.own_batches(maximum, cost)
            needs = batches.totals if cost == "sum" else batches.counts * batches.longest
            full = (needs >= _NEARLY_FULL * needs.max()).nonzero().flatten().tolist()
            full.sort(key=lambda i: float(batches.longest[i]))
            return [batches.samples(i) for i in full[:: max(1, len(full) // 12)]]

        _C.release_cached(self.device)
        with _C.Budget(self.limit, self.device):
            batches, fitted = full_batches(), 0
            for _ in range(_MOST_CHECKS):
                if not batches or fitted == 2 * len(batches):
                    break
                if self.measure(batches[fitted % len(batches)]).out_of_memory:
                    maximum, fitted = int(maximum * _SMALLER), 0
                    batches = full_batches()
                else:
                    fitted += 1
        return maximum

    # ---- n samples padded to the longest ---------------------------------------------------

    def padded_model(self, probes: int) -> MemoryModel:
        def run_padded(count: int, length: int) -> None:
            """`count` samples whose longest is `length`, the others as near as there are."""
            end = bisect_right(self.ascending, length)
            self.run([self.by_size[end - 1 - place % end] for place in range(count)])

        # Evenly over the samples, and over the logarithm of their lengths. Empty ones say nothing
        # about others, and need no more than they do.
        last = len(self.ascending) - 1
        first = min(bisect_right(self.ascending, 0), last)
        low, high = max(self.ascending[first], 1), max(self.ascending[-1], 1)
        shares = [k / (_LENGTHS - 1) for k in range(_LENGTHS)]
        places = [first + round(share * (last - first)) for share in shares]
        places += [bisect_right(self.ascending, low * (high / low) ** share) for share in shares]
        lengths = sorted({max(self.ascending[min(place, last)], 1) for place in places})
        model = MemoryModel()
        most = min(len(self.sizes), _MOST_SAMPLES)
        model._assign(_C.probe_batches(run_padded, lengths, most, self.device, self.limit, probes))
        return model

    def check_padded(self, model: MemoryModel) -> int:
        """Measure the sampler's own extreme batches, and learn from those that need more.

        Returns:
            bytes that the model may predict for a batch.
        """
        usable = self.limit
        measured: set[tuple[float, float]] = set()
        for _ in range(_MOST_ROUNDS):
            batches = self.own_batches(usable, model)
            shapes = list(zip(batches.counts.tolist(), batches.longest.tolist(), strict=True))
            if not shapes:
                return usable
            by_length = sorted(range(len(shapes)), key=lambda i: (shapes[i][1], shapes[i][0]))
            peaks = [model.peak(n, max(length, 1)) for n, length in shapes]
            chosen = [by_length[-1], max(by_length, key=lambda i: shapes[i])]
            chosen.append(max(by_length, key=lambda i: peaks[i]))
            chosen.append(max(by_length, key=lambda i: shapes[i][0] * shapes[i][1]))
            if len(measured) < _MOST_MEASURED:
                spread = 16 if max(model.margin, self.error) > _NOISY else 8
                chosen += by_length[:: max(1, len(by_length) // spread)]
            tried = [((shapes[i][0], max(shapes[i][1], 1)), batches.samples(i)) for i in chosen]
            del batches  # before anything is measured
            over = 0.0  # what a batch needed, as a multiple of the limit
            for shape, samples in tried:
                if shape in measured:
                    continue
                measured.add(shape)
                sample = self.measure(samples)
                thought = model.safe_peak(*shape)
                if sample.out_of_memory or sample.peak > thought:
                    self.error = max(self.error, sample.peak / thought - 1)
                    _add_sample(model, shape, sample)
                if sample.out_of_memory or sample.peak > self.limit:
                    over = math.inf if sample.out_of_memory else sample.peak / self.limit
                    break  # the others are of batches that will not be made
            if over == 0:
                return usable
            if len(measured) >= _MOST_MEASURED // 2:  # learning alone does not do
                usable = int(usable * max(min(_SMALLER, 1 / over), 1 / _GROWTH))
        return usable

    # ---- samples laid one after the other --------------------------------------------------

    def largest_total(self) -> tuple[int, MemoryModel | None]:
        """The largest total for which no batch that the sampler makes can need more than the limit.

        What a batch needs may depend on more than its total: on its longest sample, on the sum of
        squares where attention is inside each sample, on the number of samples. So all batches of
        some epochs are bounded, and those with the highest bounds are measured, for totals that
        grow until the highest bound is all but the limit.

        Returns:
            the total, 0 where not even the smallest sample fits; and a model of totals, None where
            fewer than two were measured.
        """
        bound = _C.NeedBound()
        known: dict[tuple[float, ...], _Peak] = {}

        def learn(samples: list[int], terms: tuple[float, ...]) -> _Peak:
            sample = known[terms] = self.measure(samples)
            thought = bound.at(terms)
            self.error = max(self.error, sample.peak / thought - 1)
            if not sample.out_of_memory:
                bound.add(terms, sample.peak)
            return sample

        smallest, first = self.ascending[0], self.by_size[0]
        self.measure([first])  # makes what later calls find ready
        for count in (1, 2):
            learn([first] * count, _terms(count, smallest, count * smallest, count * smallest**2))
        everything = max(int(self.sizes.sum()), 1)
        total = max(smallest, 1)
        # By single samples at first: all that fit alone are to be in a batch. One twice as long is
        # taken to need at most four times as much.
        peak = max(sample.peak for sample in known.values())
        while total < self.ascending[-1]:
            step = min(_GROWTH, math.sqrt(_GROWTH * self.limit / peak))
            longer = min(max(int(step * total), total + 1), self.ascending[-1])
            index = self.by_size[bisect_right(self.ascending, longer) - 1]
            size = int(self.sizes[index])
            alone = _terms(1, size, size, size**2)
            if alone not in known:
                peak = max(peak, learn([index], alone).peak)
            if peak > self.limit:
                break
            total = longer
        good, bad = 0, everything + 1
        near = 0  # COUNT of batches that were measured near the limit
        used = 0.0  # by batches of the total that is good
        for _ in range(2 * _MOST_MEASURED):
            batches = self.own_batches(total, "sum")
            rows = (batches.counts, batches.longest, batches.totals, batches.squares)
            terms = [_terms(*row) for row in zip(*(row.tolist() for row in rows), strict=True)]
            allowed = 1 + _SPREAD + 1.5 * self.error
            # A sample that was measured alone needs no allowance, or it might be left out.
            expected = [
                known[each].peak if count == 1 and each in known else allowed * bound.at(each)
                for each, count in zip(terms, rows[0].tolist(), strict=True)
            ]
            needs = torch.tensor(expected, dtype=torch.float64)
            # Epochs to come differ from these as these do from each other.
            epochs = sorted(set(batches.epochs.tolist()))
            highest = [float(needs[batches.epochs == epoch].max()) for epoch in epochs]
            most = max(highest, default=used)
            most = 2 * most - min(highest, default=most) if math.isfinite(most) else most
            nearly = _USED * self.limit <= most <= self.limit
            order = needs.argsort(descending=True)[: 4 if nearly else 1].tolist()
            tried = [(batches.samples(i), terms[i]) for i in order if terms[i] not in known]
            del batches, rows, needs  # before anything is measured
            if tried and near < _MOST_MEASURED:
                found = [learn(samples, each) for samples, each in tried]
                if not any(sample.out_of_memory for sample in found):
                    # Far below the limit one batch of each total is enough: where a floor is high
                    # (an optimizer's step), bounds are, and no measurement makes them lower.
                    if _GROWTH * max(sample.peak for sample in found) <= self.limit:
                        total = min(int(_GROWTH * total), everything)
                    else:
                        near += len(found)
                    continue
                near += len(found)
                most = max(most, 1.1 * self.limit)
            if most <= self.limit:
                growth = _GROWTH
                if most > used and good:  # as it grew before
                    growth = 1 + (_NEARLY * self.limit - most) / (most - used) * (1 - good / total)
                growth = max(min(growth, _GROWTH), _NEARLY * self.limit / max(most, 1))
                good, used = total, most
                total = min(
                    int(total * growth), (good + bad) // 2 if bad <= everything else everything
                )
                if nearly or total <= good:
                    break
            else:
                bad = total
                total = max(good, int(total * _NEARLY * self.limit / most), (good + total) // 2)
                if total <= good or total == bad:
                    break
        if max(sample.peak for sample in known.values()) <= 1:
            raise ValueError("the work held no memory on the device: it must be the one it runs on")
        totals = {terms[_TOTAL] for terms, sample in known.items() if not sample.out_of_memory}
        model = MemoryModel() if len(totals - {0.0}) > 1 else None
        if model is not None:
            measured = [
                (terms[_TOTAL], sample) for terms, sample in known.items() if terms[_TOTAL] > 0
            ]
            model.fit(
                [size for size, _ in measured],
                [sample.peak for _, sample in measured],
                [sample.out_of_memory for _, sample in measured],
            )
        return good, model


_TOTAL = 4  # its place among the terms


def _terms(count: float, longest: Any, total: Any, squares: Any) -> tuple[float, ...]:
    """What the need of a batch of samples that are laid one after the other may depend on."""
    count, longest, total = float(count), float(longest), float(total)
    of_count = (count, count**2, count * longest)
    return 1.0, *of_count, total, total**2, float(squares), longest, longest**2


def _add_sample(model: MemoryModel, shape: tuple[float, float], sample: _Peak) -> None:
    known = model.samples
    model.fit(
        [*((each.n, each.length) for each in known), shape],
        [*(each.peak for each in known), sample.peak],
        [*(each.out_of_memory for each in known), sample.out_of_memory],
    )


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
    there_is = _C.memory_stats(device).limit
    limit = _C.parse_bytes(budget, there_is)
    if limit > there_is:
        raise ValueError(
            f"budget must not exceed what the device allows, {_C.format_bytes(there_is)}, got "
            f"{_C.format_bytes(limit)}"
        )
    fit = _Fit(make, dataset, work, sizes, limit, device, collate_fn)
    chosen: Any = "sum"
    model: MemoryModel | None
    if cost == "padded":
        chosen = model = fit.padded_model(probes)
        maximum = fit.check_padded(model)
    else:
        maximum, model = fit.largest_total()
    if torch.device(_C.default_device() if device is None else device).type == "cuda":
        maximum = fit.reservable(maximum, chosen)
    smallest = max(fit.ascending[0], 1)
    fits = maximum >= smallest if cost == "sum" else chosen.largest_batch(smallest, maximum) > 0
    if not fits:
        raise ValueError(
            f"no batch is expected to stay within {_C.format_bytes(limit)}: the smallest sample "
            f"has size {smallest}"
            + ("" if model is None else f", and the measurements gave\n{model}")
        )
    error = max(fit.error, chosen.margin if cost == "padded" else 0.0)
    if error > _UNPREDICTABLE:
        warn(
            f"what the work needs cannot be told from the sizes of the samples: a batch may need "
            f"up to {error:.0%} more than measurements of other batches say. Those that were "
            f"measured stay within the budget; others may not, and many will fill little of it. "
            f"Let sizeof give what memory grows with, or leave room in the budget"
        )
    made: Any = make(sizes, maximum, chosen)
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
