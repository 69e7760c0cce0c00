"""Samples in a given order: a batch ends before the sample that does not fit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.utils.data import DistributedSampler, SequentialSampler
from typing_extensions import Self, Unpack

from brim import _C
from brim._arguments import check_callable, shown, whole
from brim._warn import warn
from brim.data.advice import left_out_message
from brim.data.base import Batch, SamplerOptions
from brim.data.fit import FittedBatchSampler
from brim.data.ranks import RankSource
from brim.data.sizes import (
    Budget,
    Cost,
    Limits,
    Sizes,
    check_oversize,
    index_tensor,
    is_array,
    size_function,
)
from brim.data.states import PositionedIterator, Start

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
    cost: Cost | Sequence[Cost] = "padded",
    max_batch_size: int | None = None,
    oversize: str = "leave_out",
) -> Iterator[Any]:
    """Batch the samples of an iterable, in order and without looking ahead.

    A batch ends before the sample that does not fit. The data needs no length and no end.

    Args:
        dataset: the samples, read once.
        sizeof: the size of a sample: a function of it, or a mapping from it. With several budgets
            it gives one size for each.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`.
        collate_fn: makes a batch of a list of samples; a batch is the list if None.
        info_logger: called at the end with how much was batched.
        warn_logger: called at the end with how much was left out; `warnings.warn` if None.
        cost: what a batch costs; see `BatchSamplerBase`.
        max_batch_size: the most samples in a batch, beside the budget.
        oversize: what to do with a sample that exceeds the budget by itself; see
            `BatchSamplerBase`. Samples left out are reported at the end.

    Yields:
        batches.

    Raises:
        ValueError: for a size that is negative, NaN or infinite, naming the sample.

    Example:
        >>> list(size_aware_batching(["a", "bcd", "ef", "ghij"], len, 6))
        [['a', 'bcd'], ['ef'], ['ghij']]
    """
    limits = Limits.read(cost, max_total_size, max_batch_size)
    function = size_function(sizeof)
    if function is None:
        raise TypeError(f"sizeof must be a callable or a mapping here, got {shown(sizeof)}")
    for name, given in (
        ("collate_fn", collate_fn),
        ("info_logger", info_logger),
        ("warn_logger", warn_logger),
    ):
        if given is not None:
            check_callable(name, given)
    if isinstance(dataset, str) or not isinstance(dataset, Iterable):
        raise TypeError(f"dataset must be an iterable of samples, got {shown(dataset)}")
    stream = _stream(dataset, function, limits, check_oversize(oversize), 0)

    # A generator of its own, so that wrong arguments are errors of this call.
    def batches() -> Iterator[Any]:
        yield from stream if collate_fn is None else map(collate_fn, stream)
        _tell_of_left_out(stream, warn if warn_logger is None else warn_logger)
        if info_logger is not None:
            info_logger(f"{stream.batched} of {stream.read} samples in {stream.batches} batches")

    return batches()


def _stream(
    samples: Iterable[Any], sizeof: Callable[[Any], Any], limits: Limits, oversize: str, skip: int
) -> _C.SampleStream:
    budgets = (limits.costs, limits.maxima, limits.measured)
    return _C.SampleStream(samples, sizeof, *budgets, oversize, skip)


def _tell_of_left_out(stream: _C.SampleStream, logger: _Logger) -> None:
    if stream.left_out:
        logger(left_out_message(stream.left_out, stream.read, "over budget"))


class SizeAwareBatchSampler(FittedBatchSampler):
    """Batches of consecutive samples, each as large as the budget allows.

    Args:
        sampler: the order of the samples: `range(n)`, a `SequentialSampler`, indices as a tensor,
            array or list, or any sampler or iterable of indices. The last is read anew for each
            epoch, and must give all ranks the same order. The epoch is passed on to it, also by
            `load_state_dict`, if it has `set_epoch`; otherwise its owner must restore its order.
        sizeof: the sizes by index, as a tensor, an array or a list, which is kept and not copied;
            or a callable or mapping from index to size. It is asked as batches are needed. `len`,
            `plan`, `report`, `shuffle`, `as_tensors` and several ranks need all sizes at once.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`.
        **options: the keywords of all samplers; see `BatchSamplerBase`.

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
        **options: Unpack[SamplerOptions],
    ) -> None:
        super().__init__(max_total_size, **options)
        if isinstance(sampler, (str, bytes)) or not isinstance(sampler, Iterable):
            raise TypeError(f"sampler must be a sampler or an iterable of indices, got {sampler!r}")
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            if self._ranks.given and self.world_size > 1:
                raise ValueError(
                    "sampler is a DistributedSampler, whose samples would be shared out again by "
                    f"world_size={self.world_size}: give all indices, such as range(n)"
                )
            self._ranks = RankSource(0, 1)
            warn(
                "sampler is a DistributedSampler: each rank fills batches of its own samples, so "
                "ranks get different numbers of batches, and a rank with more waits for the "
                "others. Give all indices, such as range(n): batches are shared out"
            )
        # Whether ranks would draw different orders.
        self._drawn_apart = getattr(sampler, "generator", self) is None
        self._given: Iterable[int] = sampler
        self.sizeof = sizeof
        self._function = size_function(sizeof)
        self._columns = None if self._function else self._limits.columns(sizeof)
        if self._function is not None and self._index_given:
            raise TypeError("index needs the sizes as a tensor, an array or a list, not a function")
        self._place_index(sizeof)
        # The order: 0 to _count - 1, or _indices. A foreign one may differ in each epoch, so
        # its indices are read when needed.
        self._count, self._indices = _fixed_order(sampler)
        self._foreign = self._count is None and self._indices is None
        self._given_epoch = getattr(sampler, "epoch", None)
        self._told = False  # of samples that are left out
        if self._columns is not None and not self._foreign:
            self._ready()
        else:  # wrong options are errors at once, before there are sizes
            empty = [torch.empty(0, dtype=torch.int64)] * len(self._limits.costs)
            self._batching_of(empty, None, None)

    @classmethod
    def _of_sizes(
        cls, sizes: torch.Tensor, maximum: int, options: dict[str, Any], *, trial: bool
    ) -> Self:
        order = options.pop("sampler", None)
        order = range(len(sizes)) if order is None else order
        if trial and _fixed_order(order) == (None, None):
            order = index_tensor("sampler", copy.deepcopy(order))
        return cls(order, sizes, maximum, **options)

    @property
    def sampler(self) -> Any:
        """The order of the samples as it was given; if it is shuffled, this sampler.

        Lightning and accelerate call `batch_sampler.sampler.set_epoch`.
        """
        return self if self.shuffle else self._given

    # ---- what the batches are made of ------------------------------------------------------

    def _make(self) -> _C.SampleBatching:
        indices, columns = self._order(), self._columns
        if columns is None:
            assert self._function is not None
            asked = torch.arange(self._count or 0) if indices is None else indices
            columns = self._limits.columns_of(self._function, asked)
        elif self._count is not None and self._count != len(columns[0]):
            if self._count > len(columns[0]):
                raise ValueError(
                    f"sampler has {self._count} samples, and sizeof only {len(columns[0])} sizes"
                )
            indices = torch.arange(self._count)
        index = None if self._columns is None else self._open_index(columns[0])
        return self._batching_of(columns, indices, index)

    def _batching_of(
        self,
        columns: list[torch.Tensor],
        indices: torch.Tensor | None,
        index: _C.SampleIndex | None,
    ) -> _C.SampleBatching:
        sizes = (columns, self._limits.costs, self._limits.maxima)
        return _C.ordered_batching(
            *sizes, indices, self.shuffle, self._oversize, self.batch_multiple, index
        )

    def _ready(self) -> _C.SampleBatching:
        self._settle()
        if self._batching is None:
            self._batching = self._make()
            self._tell_of_index()
            if not self._told:
                self._tell_of_left_out()
            self._told = not self._foreign  # which may give other samples next time
        return self._batching

    def _order(self) -> torch.Tensor | None:
        """The indices of the coming epoch; None if they are 0, 1, 2 and so on."""
        if self._foreign and self._indices is None:
            if self._drawn_apart and self.world_size > 1:
                raise ValueError(
                    f"sampler is a {type(self._given).__name__} without a generator, which gives "
                    f"each of {self.world_size} ranks another order: use range(n) and shuffle=True"
                )
            self._indices = index_tensor("sampler", self._given)
            self._given_epoch = getattr(self._given, "epoch", None)  # it may count by itself
        return self._indices

    def _drop_order(self) -> None:
        if self._foreign:
            self._indices = self._batching = None

    def _settle(self) -> None:
        super()._settle()
        # The epoch may have been set on the sampler itself.
        if self._foreign and getattr(self._given, "epoch", None) != self._given_epoch:
            self._given_epoch = getattr(self._given, "epoch", None)
            self._drop_order()

    def _forget(self) -> None:
        super()._forget()
        self._drop_order()

    def _data_tensors(self) -> list[torch.Tensor]:
        given = [] if self._foreign or self._indices is None else [self._indices]
        return [] if self._columns is None else [*self._columns, *given]

    def _order_of_epoch(self) -> torch.Tensor | None:
        return self._indices if self._foreign else None

    def _epochs_are_known(self) -> bool:
        return super()._epochs_are_known() and not self._foreign

    def _sample_count(self) -> int:
        if self._batching is not None:
            return self._batching.samples
        return len(self._given) if isinstance(self._given, Sized) else -1

    # ---- iterating -------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        """Whether batches are made as they are needed, without asking for all sizes first."""
        asks = self._function is not None or (self._foreign and not isinstance(self._given, Sized))
        needs_all = (
            self.world_size > 1 or self.shuffle or self.as_tensors or self.batch_multiple > 1
        )
        return asks and self._batching is None and not needs_all

    def __len__(self) -> int:
        """The exact number of batches on this rank: of the running iteration, else of the next."""
        if self._foreign and not isinstance(self._given, Sized):
            raise TypeError("this sampler has no length: the sampler it was made of has none")
        return super().__len__()

    def _open(self, start: Start) -> Any:
        if self._streams and len(start.cursor) < 2:
            return _Streaming(self, start)
        return super()._open(self._in_table(start))

    def _in_table(self, start: Start) -> Start:
        """The position of a stream among all samples, as one among those that fit."""
        if len(start.cursor) != 1:
            return start
        place = start.cursor[0]
        over = self._ready().left_out.get("over budget")
        if over is not None:
            order = self._order()
            before = torch.arange(place) if order is None else order[:place]
            place -= int(torch.isin(before, over).sum())
        return Start(start.seed, [place, 1024], [])

    def _coming(self) -> Start:
        start = super()._coming()
        return start if self._batching is None else self._in_table(start)

    def _enter(self, epoch: int) -> None:
        super()._enter(epoch)
        if self._foreign and callable(getattr(self._given, "set_epoch", None)):
            self._given.set_epoch(epoch)  # type: ignore[attr-defined]
            self._given_epoch = getattr(self._given, "epoch", None)
            self._drop_order()


class _StreamingIterator:
    """What a loop or a loader reads of a `_Streaming`, which the sampler holds."""

    def __init__(self, run: _Streaming) -> None:
        self._run = run
        self.state_dict = run.state_dict

    def __iter__(self) -> _StreamingIterator:
        return self

    def __next__(self) -> Batch:
        return self._run.next()


class _Streaming(PositionedIterator):
    """The batches of a sampler, made as they are needed: a `_C.BatchRun` in Python."""

    def __init__(self, owner: SizeAwareBatchSampler, start: Start) -> None:
        columns = owner._columns

        def in_columns(index: object) -> list[float]:
            assert columns is not None
            place = whole("sampler's index", index, 0)
            if place >= len(columns[0]):
                raise ValueError(
                    f"sampler's index must be from 0 to {len(columns[0]) - 1}, the samples that "
                    f"have a size, got {place}"
                )
            return [column[place].item() for column in columns[: owner._limits.measured]]

        self._lock = threading.Lock()
        self._stream = _stream(
            owner._given,
            owner._function or in_columns,
            owner._limits,
            owner._oversize,
            start.cursor[0] if start.cursor else 0,
        )
        super().__init__(owner._description(start.seed), self._stream.begin)
        self._broken = False
        self._iterators: WeakSet[_StreamingIterator] = WeakSet()

    def iterator(self) -> _StreamingIterator:
        iterator = _StreamingIterator(self)
        self._iterators.add(iterator)
        return iterator

    def held(self) -> bool:
        return len(self._iterators) > 0

    def next(self) -> Batch:
        with self._lock:  # several threads may read one iterator
            try:
                batch: Batch | None = next(self._stream, None)
            except BaseException:
                self._broken = True
                raise
            if batch is None:
                if not self._finished and not self._broken:
                    self._finished = True
                    _tell_of_left_out(self._stream, warn)
                raise StopIteration
            self._places.append(self._stream.begin)
            return batch

    def begun(self) -> bool:
        return self._finished or self._broken or len(self._places) > 1

    def ended(self) -> bool:
        return self._finished or self._broken

    def asked(self) -> tuple[int, int]:
        given = len(self._places) - 1
        return given + self.ended(), given

    def _position(self, place: int) -> dict[str, Any]:
        return {"cursor": [place], "segments": []}


def _fixed_order(sampler: Iterable[int]) -> tuple[int | None, torch.Tensor | None]:
    """The order of a sampler that never changes: a count for 0, 1, …, or the indices."""
    if isinstance(sampler, range) and sampler == range(len(sampler)):
        return len(sampler), None
    if type(sampler) is SequentialSampler:
        return len(sampler), None
    if isinstance(sampler, (range, list, tuple)) or is_array(sampler):
        return None, index_tensor("sampler", sampler)
    return None, None
