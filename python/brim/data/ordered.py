"""Samples one after the other, until the next does not fit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import DistributedSampler, SequentialSampler

from brim import _C
from brim._arguments import whole
from brim.data.base import Batch, BatchSamplerBase, Start, warn, warn_of_left_out
from brim.data.fit import fit_sampler
from brim.data.sizes import (
    Budget,
    Cost,
    Limits,
    Sizes,
    index_tensor,
    is_array,
    oversize_is_error,
    size_function,
    sizes_of,
)

_Data = TypeVar("_Data")
_Logger = Callable[[str], None]


def size_aware_batching(
    dataset: Iterable[_Data],
    sizeof: Callable[[_Data], Any] | Mapping[_Data, Any],
    max_total_size: Budget,
    collate_fn: Callable[[list[_Data]], Any] | None = None,
    info_logger: _Logger | None = None,
    warn_logger: _Logger | None = None,
    *,
    cost: Cost | Sequence[Cost] = "sum",
    oversize: str = "leave_out",
) -> Iterator[Any]:
    """Batch whatever an iterable gives, in its order and without looking ahead.

    A batch is closed when the next sample does not fit. Works for data without a length or an end.

    Args:
        dataset: gives the samples, once.
        sizeof: the size of a sample: a function of it, or a mapping from it.
        max_total_size: the budget of a batch; several at once as a list, and `sizeof` then gives
            as many sizes.
        collate_fn: what to make of a batch; a list of samples where None.
        info_logger: is told at the end how much was batched.
        warn_logger: is told at the end how much was left out; `warnings.warn` where None.
        cost: what a batch costs: `"sum"` of sizes, `"padded"` (n × longest), `"padded_squared"`
            (n × longest²), `"count"`, or a fitted memory model with a budget in bytes.
        oversize: what to do with a sample that exceeds the budget by itself: `"leave_out"` (and
            say so at the end) or `"error"`.

    Yields:
        batches.

    Raises:
        ValueError: for a size that is negative, NaN or infinite, naming the sample.

    Example:
        >>> list(size_aware_batching(["a", "bcd", "ef", "ghij"], len, 5))
        [['a', 'bcd'], ['ef'], ['ghij']]
    """
    limits = Limits(cost, max_total_size)
    function = size_function(sizeof)
    if function is None:
        raise TypeError(f"sizeof must be a callable or a mapping here, got {sizeof!r:.100}")
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be a callable, got {collate_fn!r:.100}")
    if isinstance(dataset, str) or not isinstance(dataset, Iterable):
        raise TypeError(f"dataset must be an iterable of samples, got {dataset!r:.100}")
    stream = _C.SampleStream(
        dataset, function, limits.costs, limits.maxima, oversize_is_error(oversize), 0
    )
    return _run(stream, collate_fn, info_logger, warn_logger)


def _run(
    stream: _C.SampleStream,
    collate_fn: Callable[[list[Any]], Any] | None,
    info_logger: _Logger | None,
    warn_logger: _Logger | None,
) -> Iterator[Any]:
    # A generator of its own, so that wrong arguments are errors of the call above.
    yield from stream if collate_fn is None else map(collate_fn, stream)
    _tell(stream, info_logger, warn_logger)


def _tell(
    stream: _C.SampleStream, info_logger: _Logger | None, warn_logger: _Logger | None
) -> None:
    if stream.left_out:
        first = ", ".join(map(str, stream.left_out[:5])) + (", …" if stream.left_out[5:] else "")
        message = (
            f"{len(stream.left_out)} of {stream.read} samples are left out, over budget: {first}"
        )
        if warn_logger is None:
            warn(message)
        else:
            warn_logger(message)
    if info_logger is not None:
        info_logger(f"{stream.batched} of {stream.read} samples in {stream.batches} batches")


class SizeAwareBatchSampler(BatchSamplerBase):
    """Batches of samples that follow each other, each as large as the budget allows.

    For `batch_sampler=` of a DataLoader. Each iteration is independent of others that are still
    running.

    Args:
        sampler: the order of the samples: `range(n)`, a `SequentialSampler`, indices as a tensor,
            array or list, or any sampler or iterable of indices, which is asked anew for each
            epoch (`set_epoch` is passed on to it).
        sizeof: the sizes themselves by index, as a tensor, an array or a list; or a callable or
            mapping that gives the size of an index. Sizes are kept, not copied. A callable is asked
            as the batches are needed, and for all samples at once where that is needed: by `len`,
            `plan`, `report`, `shuffle`, `as_tensors` and several ranks.
        max_total_size: the budget of a batch. Several budgets at once as a list or tuple; sizes
            then have as many columns (or are tuples).
        cost: what a batch costs: `"sum"` of sizes, `"padded"` (n × longest), `"padded_squared"`
            (n × longest²), `"count"`, or a fitted `MemoryModel`, with a budget in bytes.
        shuffle: put the samples into a random order first.
        seed: decides that order, together with the epoch. Where None it is drawn from `generator`.
        generator: where seeds are drawn from, one for each epoch; torch's default where None.
        rank: which of the ranks this is.
        world_size: how many ranks share the samples. All get the same number of batches.
        oversize: what to do with a sample that exceeds the budget by itself: `"leave_out"` (with
            a warning, and counted in `report()`) or `"error"`.
        as_tensors: give batches as int64 tensors, which is faster than lists.

    Example:
        >>> sampler = SizeAwareBatchSampler(range(5), [2, 2, 2, 2, 2], max_total_size=4)
        >>> list(sampler), len(sampler)
        ([[0, 1], [2, 3], [4]], 3)
    """

    def __init__(
        self,
        sampler: Iterable[int],
        sizeof: Callable[[int], Any] | Mapping[int, Any] | Sizes,
        max_total_size: Budget,
        *,
        cost: Cost | Sequence[Cost] = "sum",
        shuffle: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        rank: int = 0,
        world_size: int = 1,
        oversize: str = "leave_out",
        as_tensors: bool = False,
    ) -> None:
        self._set_up(
            shuffle=shuffle,
            seed=seed,
            generator=generator,
            rank=rank,
            world_size=world_size,
            as_tensors=as_tensors,
        )
        if isinstance(sampler, (str, bytes)) or not isinstance(sampler, Iterable):
            raise TypeError(f"sampler must be a sampler or an iterable of indices, got {sampler!r}")
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            warn(
                "sampler is a DistributedSampler: each rank fills batches of its own samples, so "
                "ranks get different numbers of them, and the one with more waits for the others. "
                "Give all indices, such as range(n), with rank= and world_size="
            )
        self._given: Iterable[int] = sampler
        self.sizeof = sizeof
        self.max_total_size = max_total_size
        self._limits = Limits(cost, max_total_size)
        self._oversize = oversize
        self._refuse = oversize_is_error(oversize)
        self._function = size_function(sizeof)
        self._columns = None if self._function else self._limits.columns(sizeof)
        self._count, self._indices = _known_order(sampler)
        self._order: torch.Tensor | None = None  # of the coming epoch, of a foreign sampler
        self._given_epoch = getattr(sampler, "epoch", None)
        self._told = False  # of samples that are left out
        if self._columns is not None and not self._foreign:
            self._ready()

    @classmethod
    def fit(
        cls,
        dataset: Any,
        work: Callable[[Any], object],
        sizeof: Callable[[Any], Any] | Mapping[int, Any] | Sizes,
        budget: int | str,
        device: str | torch.device | int | None = None,
        *,
        cost: str = "padded",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        probes: int = 7,
        sampler: Iterable[int] | None = None,
        **options: Any,
    ) -> SizeAwareBatchSampler:
        """Measure how much memory the work needs, and make a sampler that stays under a budget.

        Args:
            dataset: the samples, by index.
            work: what is done with a batch, such as a training step. Called with a list of
                samples, or with what `collate_fn` makes of it, some twenty times. It may then
                hold up to twice the budget.
            sizeof: the size of each sample: the sizes themselves, or a function of the index (or
                of the sample, where it cannot take an index).
            budget: bytes that may be held on the device at once, all that is there included, as an
                int or text such as `"20GiB"`.
            device: where; the current accelerator, else the CPU.
            cost: what memory depends on: `"padded"` for n samples padded to the longest, `"sum"`
                for samples laid one after the other.
            collate_fn: makes a batch of a list of samples.
            probes: how many batches are measured first, spread over all sizes (padded only). Others
                follow near the budget, and of the sampler's own.
            sampler: the order of the samples; all in order where None.
            **options: of the sampler.

        Returns:
            a sampler; its attribute `model` is the memory model, and `max_total_size` the budget,
            on CUDA less what torch's allocator loses between blocks. With `cost="sum"` it is the
            largest total of a batch.

        Warns:
            UserWarning: where batches need over 25 % more than measurements of others allow.
        """

        def make(
            sizes: torch.Tensor, maximum: int, cost: Any, **changes: Any
        ) -> SizeAwareBatchSampler:
            order = range(len(sizes)) if sampler is None else sampler
            if changes and _known_order(order) == (None, None):
                # Somebody else's: a copy is asked, so that its own state stays as it is.
                order = index_tensor("sampler", copy.deepcopy(order))
            return cls(order, sizes, maximum, cost=cost, **{**options, **changes})

        return fit_sampler(  # type: ignore[no-any-return]
            make,
            dataset,
            work,
            sizeof,
            budget,
            device,
            cost=cost,
            collate_fn=collate_fn,
            probes=probes,
        )

    model: _C.MemoryModel | None = None

    @property
    def sampler(self) -> Any:
        """The order of the samples as it was given; where it is shuffled, this sampler.

        Lightning and accelerate call `batch_sampler.sampler.set_epoch`.
        """
        return self if self.shuffle else self._given

    # ---- what the batches are made of ------------------------------------------------------

    @property
    def _foreign(self) -> bool:
        """Whether the order is somebody else's, and may be another one each time."""
        return self._count is None and self._indices is None

    def _make(self) -> _C.SampleBatching:
        indices = self._coming_order() if self._foreign else self._indices
        columns = self._columns
        if columns is None:
            columns, indices = self._ask_for_sizes(indices)
        elif indices is None and self._count != len(columns[0]):
            assert self._count is not None
            if self._count > len(columns[0]):
                raise ValueError(
                    f"sampler has {self._count} samples, and sizeof only {len(columns[0])} sizes"
                )
            indices = torch.arange(self._count)
        return _C.ordered_batching(
            columns,
            self._limits.costs,
            self._limits.maxima,
            indices,
            self.shuffle,
            self._oversize,
        )

    def _ask_for_sizes(
        self, indices: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        assert self._function is not None
        if indices is None:
            assert self._count is not None
            everything = sizes_of(self._function, range(self._count))
            return self._limits.columns(everything), None
        different = torch.unique(indices)
        sizes = self._limits.columns(sizes_of(self._function, different.tolist()))
        count = int(different[-1]) + 1 if len(different) else 0
        columns = []
        for of_different in sizes:
            column = torch.zeros(count, dtype=of_different.dtype)
            column[different] = of_different
            columns.append(column)
        return columns, indices

    def _ready(self) -> _C.SampleBatching:
        self._settle()
        if self._batching is None:
            self._batching = self._make()
            if not self._told:
                warn_of_left_out(self._batching.left_out, self._batching.samples)
            self._told = not self._foreign  # who may give others next time
            self._resumed = None  # a stream, which may be of another order than this
        return self._batching

    def _coming_order(self) -> torch.Tensor:
        if self._order is None:
            self._order = index_tensor("sampler", self._given)
            self._given_epoch = getattr(self._given, "epoch", None)  # it may count by itself
        return self._order

    def _settle(self) -> None:
        super()._settle()
        # Somebody may have told the sampler itself which epoch comes.
        if self._foreign and getattr(self._given, "epoch", None) != self._given_epoch:
            self._given_epoch = getattr(self._given, "epoch", None)
            self._order = self._batching = None

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **self._limits.settings()}

    def _sample_count(self) -> int:
        if self._batching is not None:
            return self._batching.samples
        if self._count is not None:
            return self._count
        if self._indices is not None:
            return len(self._indices)
        return len(self._given) if isinstance(self._given, Sized) else -1

    # ---- iterating -------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        """Whether batches are made as they are needed, without asking for all sizes first."""
        asks = self._function is not None or (self._foreign and not isinstance(self._given, Sized))
        return (
            asks
            and self._batching is None
            and self.world_size == 1
            and not self.shuffle
            and not self.as_tensors
        )

    def _forget(self) -> None:
        super()._forget()
        if self._foreign:
            self._order = self._batching = None  # another order next time

    def __len__(self) -> int:
        """The exact number of batches on this rank, of the iteration that runs or of the next."""
        if self._foreign and not isinstance(self._given, Sized):
            raise TypeError("this sampler has no length: the sampler it was made of has none")
        return super().__len__()

    def _open(self, start: Start) -> Iterator[Batch]:
        if self._streams and len(start.cursor) < 2:
            skip = start.cursor[0] if start.cursor else 0
            return _Streaming(self, skip, self._description(start.seed))
        return super()._open(self._in_table(start))

    def _in_table(self, start: Start) -> Start:
        """A place among all samples, as streaming has it, as one among those that fit."""
        if len(start.cursor) != 1:
            return start
        place = start.cursor[0]
        over = self._ready().left_out.get("over budget")
        if over is not None:
            order = self._coming_order() if self._foreign else self._indices
            before = torch.arange(place) if order is None else order[:place]
            place -= int(torch.isin(before, over).sum())
        return Start(start.seed, [place, 1024], [])

    def _coming(self) -> Start:
        start = super()._coming()
        return start if self._batching is None else self._in_table(start)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; passed on to the sampler where it has epochs."""
        super().set_epoch(epoch)
        self._pass_on(self.epoch)

    def _pass_on(self, epoch: int) -> None:
        if self._foreign and callable(getattr(self._given, "set_epoch", None)):
            self._given.set_epoch(epoch)  # type: ignore[attr-defined]
            self._given_epoch = getattr(self._given, "epoch", None)
            self._order = self._batching = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on where the one stood that the state was taken from.

        As for all samplers; one that gives another order each time must be told the epoch, through
        its `set_epoch`, or be put back by its owner.
        """
        kept = self.epoch
        if isinstance(state, Mapping) and "epoch" in state:
            self._pass_on(whole("epoch", state["epoch"], 0))
        try:
            super().load_state_dict(state)
        except Exception:
            self._pass_on(kept)
            raise


class _Streaming:
    """Batches of a sampler that are made as they are needed."""

    def __init__(
        self, owner: SizeAwareBatchSampler, skip: int, description: dict[str, Any]
    ) -> None:
        columns = owner._columns

        def in_columns(index: object) -> list[float]:
            assert columns is not None
            place = whole("sampler's index", index, 0)
            if place >= len(columns[0]):
                raise ValueError(
                    f"sampler's index must be from 0 to {len(columns[0]) - 1}, the samples that "
                    f"have a size, got {place}"
                )
            return [column[place].item() for column in columns]

        self._lock = threading.Lock()
        self._stream = _C.SampleStream(
            owner._given,
            owner._function or in_columns,
            owner._limits.costs,
            owner._limits.maxima,
            owner._refuse,
            skip,
        )
        self._description = description
        self._places = [self._stream.begin]
        self._finished = False
        self._broken = False

    def __iter__(self) -> _Streaming:
        return self

    def __next__(self) -> Batch:
        with self._lock:  # several threads may read one iterator
            try:
                batch: Batch | None = next(self._stream, None)
            except BaseException:
                self._broken = True
                raise
            if batch is None:
                if not self._finished and not self._broken:
                    self._finished = True
                    _tell(self._stream, None, None)
                raise StopIteration
            self._places.append(self._stream.begin)
            return batch

    def begun(self) -> bool:
        return self._finished or self._broken or len(self._places) > 1

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        given = len(self._places) - 1
        batches = given if batches is None else whole("batches", batches, 0)
        if batches > given:
            raise ValueError(
                f"batches must be from 0 to the {given} that were given, got {batches}"
            )
        return {
            **self._description,
            "finished": self._finished and batches == given,
            "cursor": [self._places[batches]],
            "segments": [],
        }


def _known_order(sampler: Iterable[int]) -> tuple[int | None, torch.Tensor | None]:
    """The order of a sampler that always has the same: a count for 0, 1, …, or the indices."""
    if isinstance(sampler, range) and sampler == range(len(sampler)):
        return len(sampler), None
    if type(sampler) is SequentialSampler:
        return len(sampler), None
    if isinstance(sampler, (range, list, tuple)) or is_array(sampler):
        return None, index_tensor("sampler", sampler)
    return None, None
