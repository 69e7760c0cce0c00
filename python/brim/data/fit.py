"""From a data set and a piece of work to a sampler under a budget in bytes."""

from __future__ import annotations

import logging
import warnings
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from brim import _C
from brim._arguments import check_callable, refused, shown
from brim._progress import progress as bar
from brim._state.undo import Restore, Undo
from brim._warn import warn
from brim.data.agree import measured_together
from brim.data.base import BatchSamplerBase
from brim.data.fit_attempts import FitAttempt, Observed
from brim.data.ranks import RankSource
from brim.data.sizes import (
    Limits,
    Sizes,
    has_columns,
    index_tensor,
    is_array,
    one_column,
    size_function,
)
from brim.data.states import check_state
from brim.memory import is_out_of_memory
from brim.predict import MemoryModel

_logger = logging.getLogger("brim")

# From this error on, a sampler warns that sizes say little about memory.
_UNPREDICTABLE = 0.25


class _Fitted(NamedTuple):
    """What `fit` found; a part of a sampler's state, as plain values."""

    budget: int
    cost: str
    max_total_size: int
    model: dict[str, Any] | None
    weights: list[float] | None  # of several sizes per sample; padded, those of a PaddedNeed

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> _Fitted:
        """Read the part of a state that `fit` found."""
        check_state(state, {"fitted"})
        return cls(*(state["fitted"][name] for name in cls._fields))


@dataclass(frozen=True)
class FitReport:
    """What `fit` did; `print` shows it.

    Attributes:
        runs: how many times the work ran.
        budget: bytes that the device may hold.
        error: the share by which a batch may need more than measurements of other batches predict.
        restored: what is as it was before; empty if `restore=False` asked for nothing.

    Example:
        >>> print(FitReport(23, 2**30, 0.01, "Linear, SGD and the random state"))
        the work ran 23 times under a budget of 1.00 GiB; error at most 1.0%
        restored: Linear, SGD and the random state
    """

    runs: int
    budget: int
    error: float
    restored: str

    def __str__(self) -> str:
        return (
            f"the work ran {self.runs} times under a budget of {_C.format_bytes(self.budget)}; "
            f"error at most {self.error:.1%}\n"
            f"restored: {self.restored or 'nothing, what the work did stays'}"
        )


class FittedBatchSampler(BatchSamplerBase):
    """A batch sampler that `fit` can make from a budget in bytes.

    Attributes:
        model: the memory model that `fit` found, a `PaddedNeed` of samples that are padded in
            several sizes; None for others.
        weights: what a unit of each of several sizes counts under `cost="sum"`.
        fit_report: what `fit` ran and put back; None if it measured nothing.
    """

    model: _C.MemoryModel | _C.PaddedNeed | None = None
    weights: list[float] | None = None
    fit_report: FitReport | None = None
    _fitted: _Fitted | None = None
    _features: torch.Tensor | None = None  # several sizes per sample, as they were given
    _columns: list[torch.Tensor] | None  # the sizes by which batches are made

    @classmethod
    @abstractmethod
    def _of_sizes(
        cls, sizes: torch.Tensor, maximum: int, options: dict[str, Any], *, trial: bool
    ) -> Self:
        """A sampler over all of these sizes. A trial must not use up what the options hold."""

    @classmethod
    def fit(
        cls,
        dataset: Any,
        work: Callable[[Any], object],
        sizeof: Callable[[Any], Any] | Mapping[int, Any] | Sizes | None = None,
        budget: int | str | None = None,
        device: str | torch.device | int | None = None,
        *,
        cost: str = "padded",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        probes: int = 7,
        state: Mapping[str, Any] | None = None,
        restore: Restore = True,
        observer: Callable[[FitAttempt], object] | None = None,
        progress: bool = True,
        **options: Any,
    ) -> Self:
        """Measure how much memory the work needs, and make a sampler that stays under a budget.

        The work really runs, so a training step trains the model. Afterwards the model, the
        optimizer and the random state are as before, unless `restore=False`.

        In a job of several ranks all call it, with the same samples and options. They measure the
        same batches together, and take what the rank that needs most has measured: all get the
        same batches, which fit on every rank. The work may have collectives inside.
        `rank=0, world_size=1` measures on this rank alone.

        Args:
            dataset: the samples, by index.
            work: what is done with a batch, such as a training step. Called about twenty times,
                forty to seventy for two sizes per sample, with a list of samples, or with what
                `collate_fn` returns for it. It may then hold up to twice the budget.
            sizeof: the size of each sample: the sizes themselves, or a function of the index (or
                of the sample, if it cannot take an index). Samples may have several sizes that
                memory depends on: a column for each, or tuples. With `cost="padded"` samples are
                padded to the longest of each (source and target, height and width; at most four),
                and batches hold samples that are alike in all. With `cost="sum"` (nodes and edges
                of a graph) what each size needs is measured first, and a sample's size is their
                weighted sum.
            budget: bytes that the device may hold at once, including what it holds now, as an int
                or text such as `"20GiB"`.
            device: the current accelerator if None, else the CPU.
            cost: what memory depends on: `"padded"` for samples padded to the longest, `"sum"` for
                samples laid end to end.
            collate_fn: makes a batch of a list of samples.
            probes: how many batches are measured first, spread over all sizes (padded only). More
                follow near the budget, and from the sampler itself.
            state: a `state_dict()` of an earlier sampler that `fit` made with this budget and cost.
                Nothing is measured then: the sampler has its memory model, and resumes there.
            restore: what the work changes and is put back after measuring. True for the modules
                (parameters, gradients, buffers, training mode), optimizers, schedulers and gradient
                scalers that the code, the closure and the attributes of `work` lead to, and for the
                random state of torch, NumPy and `random`. Else these things themselves, as in
                `brim.Options`; False for nothing. Copies take memory of the host; with True none is
                made of parameters that do not require gradients.
            observer: called with each `FitAttempt` after it ended, such as `print`, for a log of
                what takes long. On several ranks each has its own.
            progress: whether to show a bar on a terminal if it takes long.
            **options: keywords of the sampler; for `SizeAwareBatchSampler` also `sampler`, the
                order of the samples.

        Returns:
            A sampler. Its attribute `model` is the memory model (a `PaddedNeed` of several padded
            sizes), and `max_total_size` the budget,
            on CUDA less what torch's allocator loses between blocks. With `cost="sum"` it is the
            largest total of a batch. `weights` has what a unit of each of several sizes counts.
            `print(sampler.fit_report)` tells what ran and what was put back.

        Raises:
            brim.RankError: if another rank fails, or has other samples or options.

        Warns:
            UserWarning: if batches need over 25 % more than measurements of other batches predict;
                or if the work changed parameters that are not put back: frozen ones, or those of a
                module that was not found.

        Example:
            >>> import brim, torch
            >>> from brim.data import PackedBatchSampler
            >>> lengths = torch.arange(1, 101)
            >>> model = torch.nn.Linear(64, 64)
            >>> def step(samples):
            ...     padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
            ...     model(padded).sum().backward()
            >>> texts = [torch.ones(length, 64) for length in lengths.tolist()]
            >>> held = brim.memory_stats("cpu").allocated
            >>> sampler = PackedBatchSampler.fit(texts, step, lengths, held + 2**20, "cpu")
            >>> sampler.fit_report.restored, model.weight.grad
            ('Linear and the random state', None)
        """
        if cost not in ("padded", "sum"):
            raise ValueError(f'cost must be "padded" or "sum" to be fitted, got {shown(cost)}')
        form = f'call {cls.__name__}.fit(dataset, work, sizeof, budget), with a budget as "20GiB"'
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"dataset must have samples by index, got {shown(dataset)}: {form}")
        if state is None:
            check_callable("work", work)
        if observer is not None:
            check_callable("observer", observer)
        if signature := refused(work, 1):
            raise TypeError(f"work must take a batch, as work(batch), but it takes {signature}")
        # They have defaults only for the sake of these sentences.
        if sizeof is None:
            raise TypeError(f"sizeof is missing, the sizes of the samples: {form}")
        if budget is None:
            raise TypeError(f"budget is missing, the bytes that the device may hold: {form}")
        if len(dataset) == 0:
            raise ValueError("dataset is empty: there is nothing to measure")
        ranks = RankSource(options.get("rank"), options.get("world_size"))
        with measured_together(ranks.now(), alone=state is not None) as together:
            return cls._fit(
                *(dataset, work, sizeof, budget, device, cost, collate_fn, probes, state),
                *(restore, observer, progress, options, together),
            )

    @classmethod
    def _fit(
        cls,
        dataset: Any,
        work: Callable[[Any], object],
        sizeof: Any,
        budget: int | str,
        device: str | torch.device | int | None,
        cost: str,
        collate_fn: Callable[[list[Any]], Any] | None,
        probes: int,
        state: Mapping[str, Any] | None,
        restore: Restore,
        observer: Callable[[FitAttempt], object] | None,
        progress: bool,
        options: dict[str, Any],
        together: _C.FitRanks | None,
    ) -> Self:
        given_sizes = _all_sizes(dataset, sizeof)
        several = given_sizes.ndim == 2
        padded_sizes = given_sizes.shape[1] if several and cost == "padded" else 1
        sizes = given_sizes.amax(1) if several and cost == "sum" else given_sizes
        limit = _C.parse_bytes(budget, _C.memory_stats(device).limit, "budget")
        if together is not None:
            shape = "×".join(map(str, given_sizes.shape))
            sizes_id = f"#{_C.fingerprint(given_sizes.flatten()):016x}"
            together.same(f"{cls.__name__}.fit of {shape} sizes {sizes_id}, {cost=}, {probes=}")
            limit = together.least(limit)
        given = options.get("indices")
        if given is not None and not callable(given):  # read several times
            options["indices"] = index_tensor("indices", given)

        def trial(sizes: torch.Tensor, maximum: int, cost: Any, **changes: Any) -> BatchSamplerBase:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the final sampler reports what is left out
                chosen = {**options, "cost": cost, **changes}
                return cls._of_sizes(sizes, maximum, chosen, trial=True)

        def batching(
            maximum: int, model: _C.MemoryModel | _C.PaddedNeed | None
        ) -> _C.SampleBatching:
            alone = {"seed": 0, "generator": None, "rank": 0, "world_size": 1}
            return trial(sizes, maximum, "sum" if model is None else model, **alone)._ready()

        def finish(made: Self, fitted: _Fitted) -> Self:
            made._fitted = fitted
            made.weights = fitted.weights if cost == "sum" else None
            made._features = given_sizes if several else None
            return made

        runs = 0

        def run(indices: list[int]) -> None:
            nonlocal runs
            runs += 1
            samples = [dataset[index] for index in indices]
            if collate_fn is not None:
                work(collate_fn(samples))
                return
            try:
                work(samples)
            except (AttributeError, TypeError) as error:
                if runs == 1 and hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note("there is no collate_fn, so the work got a list of samples")
                raise

        trial(
            torch.ones(len(sizes), dtype=torch.int64), len(sizes), "sum"
        )  # wrong options fail before measuring
        if state is not None:
            fitted = _Fitted.of_state(state)
            # Of several sizes any cost will do until the state brings the right one.
            any_sizes = sizes.amax(1) if sizes.ndim == 2 else sizes
            made = cls._of_sizes(any_sizes, fitted.max_total_size, {**options}, trial=False)
            if sizes.ndim == 2:
                made._columns = made._limits.columns(sizes)
            finish(made, fitted._replace(budget=limit, cost=cost))
            made.load_state_dict(state)
            made._tell_of_left_out()
            return made
        weights = None
        with Undo(restore, work, collate_fn) as undo, bar("fit", "batch", enabled=progress) as step:
            observed = Observed(run, observer, device)

            def measured(indices: list[int]) -> None:
                observed(indices)
                step(f"{len(indices)} samples")

            try:
                if several and cost == "sum":
                    columns = given_sizes.shape[1]
                    flat = given_sizes.flatten()
                    weights = _C.fit_weights(flat, columns, measured, limit, device, together)
                    sizes = _combined(given_sizes, weights)
                maximum, found, error = _C.fit_batching(
                    *(sizes.flatten(), measured, batching, cost == "padded", limit, device, probes),
                    *(together, padded_sizes),
                )
            finally:
                observed.tell()
        # torch's cache stays as it is: in these blocks all batches have fitted.
        report = FitReport(runs, limit, error, "" if restore is False else str(undo))
        _logger.info("%s.fit: %s", cls.__name__, str(report).replace("\n", "; "))
        model: _C.MemoryModel | _C.PaddedNeed | None = None
        if isinstance(found, _C.PaddedNeed):
            model, weights = found, found.weights
        elif found is not None:
            model = own = MemoryModel()
            own._assign(found)
        if error > _UNPREDICTABLE:
            warn(
                "the sizes of the samples do not determine what the work needs: a batch may need "
                f"up to {error:.0%} more than measurements of other batches predict. Measured "
                "batches stay within the budget; others may not, and many will fill little of it. "
                "Let sizeof give what memory grows with, or leave headroom in the budget"
            )
        chosen = model if cost == "padded" else "sum"
        made = cls._of_sizes(sizes, maximum, {**options, "cost": chosen}, trial=False)
        made.model = model
        made.fit_report = report
        plain = model.state_dict() if isinstance(model, MemoryModel) else None
        fitted = _Fitted(limit, cost, maximum, plain, weights)
        if together is not None:  # they have measured the same, so this finds a defect of brim's
            together.same(f"found {maximum} ({zlib.crc32(repr(fitted).encode()):08x})")
        return finish(made, fitted)

    def _description(self, seed: int) -> dict[str, Any]:
        described = super()._description(seed)
        if self._fitted is not None:
            described["fitted"] = self._fitted._asdict()
        return described

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume where the state was taken.

        A sampler that `fit` made takes over the memory model that the state was made with, so that
        a restarted job, which has measured other bytes, continues with the same batches.

        Raises:
            ValueError: if the state is of another sampler, other samples, or other settings that
                batches depend on; the budget of `fit` is one.
        """
        if self._fitted is None:
            return super().load_state_dict(state)
        theirs = _Fitted.of_state(state)
        for name in ("budget", "cost"):
            here, there = getattr(self._fitted, name), getattr(theirs, name)
            if here != there:
                raise ValueError(
                    f"state is of another run: its {name} is {there!r}, here it is {here!r}"
                )
        before = {**self.__dict__}
        try:
            self._take_over(theirs)
            super().load_state_dict(state)
        except Exception:
            self.__dict__.update(before)
            raise

    def _take_over(self, fitted: _Fitted) -> None:
        if (self._features is None) != (fitted.weights is None):
            raise ValueError("state is of another run: its samples have another number of sizes")
        model = _model_of(fitted, self._features)
        self._fitted, self.model = fitted, model
        self.weights = fitted.weights if fitted.cost == "sum" else None
        self.max_total_size = fitted.max_total_size
        cost = model if fitted.cost == "padded" and model is not None else "sum"
        self._limits = Limits.read(cost, fitted.max_total_size, self.max_batch_size)
        if self.weights is not None and self._features is not None:
            self._columns = self._limits.columns(_combined(self._features, self.weights))
        self._batching = self._data = None


def _model_of(fitted: _Fitted, features: torch.Tensor | None) -> MemoryModel | _C.PaddedNeed | None:
    if fitted.cost == "padded" and features is not None and fitted.weights is not None:
        return _C.PaddedNeed(features.shape[1], fitted.weights)
    if fitted.model is None:
        return None
    model = MemoryModel()
    model.load_state_dict(fitted.model)
    return model


def _all_sizes(dataset: Any, sizeof: object) -> torch.Tensor:
    function = size_function(sizeof)
    given = sizeof if function is None else _ask(dataset, function)
    if has_columns(given):
        columns = _columns(given)
        # Column by column in memory, as samplers keep them: on the CPU a copy would count.
        sizes = torch.stack([column.to(columns[0].dtype) for column in columns]).t()
    else:
        sizes = one_column("sizes", given)
    if len(sizes) != len(dataset):
        raise ValueError(f"sizeof has {len(sizes)} sizes, and dataset {len(dataset)} samples")
    if sizes.is_floating_point():
        if not bool(sizes.isfinite().all()):
            place = (~sizes.isfinite()).nonzero()[0].tolist()
            wrong = float(sizes[tuple(place)])
            raise ValueError(f"sizes must be finite, got {wrong} at index {place[0]}")
        whole = sizes.round()
        if not torch.equal(whole, sizes):
            raise ValueError("sizes must be whole numbers to fit a memory model")
        sizes = whole.long()
    return sizes


def _columns(given: Any) -> list[torch.Tensor]:
    count = given.shape[1] if is_array(given) else len(given[0])
    return Limits(["sum"] * count, [1] * count, several=True, measured=count).columns(given)


def _combined(features: torch.Tensor, weights: list[float]) -> torch.Tensor:
    return torch.tensor(_C.combined_sizes(features.flatten(), weights))


def _ask(dataset: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Sizes by index, or by sample if the function cannot take an index."""
    try:
        function(0)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return [function(dataset[index]) for index in range(len(dataset))]
    return [function(index) for index in range(len(dataset))]
