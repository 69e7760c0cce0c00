"""Packed and bucketed batches of data that has no length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from brim import _C
from brim._arguments import check_callable, flag, shown, whole
from brim._warn import warn
from brim.data.base import left_out_message
from brim.data.ranks import RankSource, shared_by_accelerate
from brim.data.sizes import (
    Budget,
    Cost,
    Limits,
    Sizes,
    check_oversize,
    size_function,
    sorted_boundaries,
)
from brim.data.states import PositionedIterator, check_same_run, check_state


class StreamBatches(IterableDataset[Any]):
    """Batches of an iterable; see `pack_stream` and `bucket_stream`, which make it.

    For a DataLoader with `batch_size=None`, or to iterate over. Each iteration reads the iterable
    anew. All ranks and workers read all samples, and each gets its own batches: all ranks equally
    many, and batches of one step cost about the same.

    Example:
        >>> from brim.data import pack_stream
        >>> list(pack_stream(["aaa", "b", "cc"], max_total_size=3))
        [['aaa'], ['cc', 'b']]
    """

    def __init__(
        self,
        name: str,
        iterable: Iterable[Any],
        limits: Limits,
        settings: dict[str, Any],
        *,
        sizeof: Callable[[Any], Any] | Mapping[Any, Any],
        collate_fn: Callable[[list[Any]], Any] | None,
        ranks: RankSource,
        sharded: bool,
        oversize: str,
    ) -> None:
        if isinstance(iterable, str) or not isinstance(iterable, Iterable):
            raise TypeError(f"iterable must be an iterable of samples, got {shown(iterable)}")
        function = size_function(sizeof)
        if function is None:
            raise TypeError(f"sizeof must be a callable or a mapping here, got {shown(sizeof)}")
        if collate_fn is not None:
            check_callable("collate_fn", collate_fn)
        self._name = name
        self.iterable = iterable
        self.epoch = 0
        self._sizeof = function
        self._limits = limits
        self._settings = settings
        self._collate = collate_fn
        self._ranks = ranks
        self._sharded = flag("sharded", sharded)
        self._oversize = check_oversize(oversize)
        self._start: Mapping[str, Any] | None = None  # a loaded state
        self._latest: _StreamIterator | None = None
        self._open(iter(()), {})  # wrong arguments are errors at once

    def __getstate__(self) -> dict[str, Any]:
        """For a worker, which has no process group of its own unless it is forked."""
        ranks = self._ranks.now()
        fixed = RankSource(*ranks) if ranks.world_size > 1 else self._ranks
        return {**self.__dict__, "_latest": None, "_ranks": fixed}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also that of the iterable; with `shuffle` each has its own order."""
        self.epoch = whole("epoch", epoch, 0)
        if self._start is not None and self._start["epoch"] != self.epoch:
            self._start = None
        set_epoch = getattr(self.iterable, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)

    def _open(self, samples: Iterator[Any], start: Mapping[str, Any]) -> _C.LookAheadStream:
        settings = self._settings
        rank, world_size = (0, 1) if self._sharded else self._ranks.now()
        stream = _C.LookAheadStream(
            samples,
            self._sizeof,
            self._limits.costs,
            self._limits.maxima,
            self._limits.measured,
            settings["lookahead"],
            settings.get("bucket_boundaries", []),
            settings.get("shuffle", False),
            _C.epoch_seed(settings.get("seed", 0), self.epoch),
            self._oversize,
            settings["batch_multiple"],
            rank,
            world_size,
        )
        if start:
            stream.seek(start["cursor"], start["segments"])
        return stream

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches; in a worker of a DataLoader, that worker's."""
        shared_by_accelerate(self._ranks)
        start, self._start = self._start or {}, None
        worker = None if self._sharded else get_worker_info()
        if worker is not None and worker.num_workers > 1:
            _refuse_shards(self.iterable)
        number = (0, 1) if worker is None else (worker.id, worker.num_workers)
        iterator = _StreamIterator(self, self._open(iter(self.iterable), start), start, number)
        self._latest = iterator
        return iterator

    def _description(self) -> dict[str, Any]:
        return {
            "format": 1,
            "sampler": self._name,
            "samples": -1,
            "settings": self._settings,
            "epoch": self.epoch,
        }

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position of the latest iteration, to resume from; plain numbers and lists.

        The state is the same on every rank, and can be loaded with another number of ranks. In a
        worker it is that worker's, as torchdata's `StatefulDataLoader` saves it.

        Args:
            batches: how many batches of that iteration are done; all that it gave if None.
        """
        if self._latest is None or self._start is not None:
            if batches is not None and whole("batches", batches, 0) > 0:
                raise ValueError(f"batches must be 0 before an iteration begins, got {batches}")
            start = self._start or {"finished": False, "done": 0, "cursor": [], "segments": []}
            return {**self._description(), **start}
        return self._latest.state_dict(batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume where the state was taken.

        It reads and drops the samples before, so the iterable must give the same ones again.

        Raises:
            ValueError: if the state is of another stream, or of other settings.
        """
        own = self._description()
        check_state(state, {*own, "finished", "done", "cursor", "segments"})
        check_same_run(state, own)
        epoch = whole("epoch", state["epoch"], 0)
        at_start = flag("finished", state["finished"]) or not state["cursor"]
        self._start = None
        self.set_epoch(epoch)
        self._start = None if at_start else dict(state)
        self._latest = None


def _refuse_shards(iterable: Iterable[Any]) -> None:
    """Refuse what is known to give each worker other samples: most would be lost."""
    if isinstance(iterable, IterableDataset) and type(iterable).__module__.startswith("datasets."):
        raise ValueError(
            "a datasets.IterableDataset gives each worker of a DataLoader other samples: wrap it "
            "in brim.integrations.datasets.WholeStream, or pass sharded=True"
        )


class _StreamIterator(PositionedIterator):
    """The batches of one iteration: of a worker, every n-th batch of its rank."""

    def __init__(
        self,
        owner: StreamBatches,
        stream: _C.LookAheadStream,
        start: Mapping[str, Any],
        worker: tuple[int, int],
    ) -> None:
        self._begin = start.get("done", 0)  # batches of this rank before this iteration
        super().__init__(owner._description(), self._begin)
        self._stream = stream
        self._collate = owner._collate
        self._worker, self._workers = worker
        self._next = self._begin  # the number of the stream's next batch
        self._ended = False

    def __iter__(self) -> _StreamIterator:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        self._ended = True  # an error is the end too, as for a generator
        while self._next % self._workers != self._worker:
            if not self._stream.skip():
                self._finish()
            self._next += 1
        batch = next(self._stream, None)
        if batch is None:
            self._finish()
        self._next += 1
        self._places.append(self._next)
        self._ended = False
        return batch if self._collate is None else self._collate(batch)

    def _finish(self) -> NoReturn:
        self._finished = True
        if self._worker == 0:
            for reason, indices in self._stream.left_out.items():
                warn(left_out_message(indices, self._stream.read, reason))
        raise StopIteration

    def _position(self, place: int) -> dict[str, Any]:
        return {"done": place, **self._stream.position(place - self._begin)}


def pack_stream(
    iterable: Iterable[Any],
    max_total_size: Budget,
    *,
    sizeof: Callable[[Any], Any] | Mapping[Any, Any] = len,
    cost: Cost | Sequence[Cost] = "sum",
    max_batch_size: int | None = None,
    batch_multiple: int = 1,
    lookahead: int = 10_000,
    shuffle: bool = False,
    seed: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    sharded: bool = False,
    oversize: str = "leave_out",
) -> StreamBatches:
    """Pack the samples of an iterable into full batches, looking a bounded number of them ahead.

    The batches are those of a `PackedBatchSampler` with a window of `lookahead` samples. For data
    that fits no index: files that are read one after the other, other streams.

    Args:
        iterable: the samples. It is iterated anew for each epoch, and by each rank and worker.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`.
        sizeof: the size of a sample: a function of it, or a mapping from it. With several budgets
            it gives one size for each.
        cost: what a batch costs; see `BatchSamplerBase`.
        max_batch_size: the most samples in a batch, beside the budget.
        batch_multiple: batches have a multiple of this many samples, unless fewer fit the budget or
            are left. Not under a sum.
        lookahead: how many samples are packed together. Up to twice as many are held.
        shuffle: give the batches of one look-ahead in random order, not the longest samples first.
        seed: determines that order together with the epoch.
        collate_fn: makes a batch of a list of samples; a batch is the list if None.
        rank: the rank of this process; see `BatchSamplerBase`.
        world_size: how many ranks share the batches; see `BatchSamplerBase`.
        sharded: whether the iterable gives each rank and each worker other samples already. They
            then get different numbers of batches.
        oversize: what to do with a sample that exceeds the budget by itself; see
            `BatchSamplerBase`. Samples left out are reported at the end.

    Returns:
        A torch `IterableDataset` of batches, which can be iterated over and resumed.

    Example:
        >>> list(pack_stream(iter(["aaaaaa", "bbbb", "ccccc", "ddd", "eeeeeee"]), 10))
        [['eeeeeee', 'ddd'], ['aaaaaa', 'bbbb'], ['ccccc']]
    """
    limits = Limits.read(cost, max_total_size, max_batch_size)
    settings = {
        "lookahead": whole("lookahead", lookahead, 1),
        "batch_multiple": whole("batch_multiple", batch_multiple, 1, 2**31),
        "shuffle": flag("shuffle", shuffle),
        "seed": whole("seed", seed, 0),
        **limits.settings(),
    }
    return StreamBatches(
        "pack_stream",
        iterable,
        limits,
        settings,
        sizeof=sizeof,
        collate_fn=collate_fn,
        ranks=RankSource(rank, world_size),
        sharded=sharded,
        oversize=oversize,
    )


def bucket_stream(
    iterable: Iterable[Any],
    bucket_boundaries: Sizes,
    max_total_size: Budget,
    *,
    sizeof: Callable[[Any], Any] | Mapping[Any, Any] = len,
    cost: Cost | Sequence[Cost] = "padded",
    max_batch_size: int | None = None,
    batch_multiple: int = 1,
    lookahead: int = 10_000,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    sharded: bool = False,
    oversize: str = "leave_out",
) -> StreamBatches:
    """Batch samples of similar size from an iterable, so that there is little padding.

    Each sample joins the open batch of its bucket, which is given when the next does not fit. If
    more than `lookahead` samples wait in open batches, the fullest of these is given.

    Args:
        iterable: the samples. It is iterated anew for each epoch, and by each rank and worker.
        bucket_boundaries: bucket b holds the sizes in [boundary b, boundary b + 1). They are
            sorted. The last may be infinite. Samples outside are left out, with a warning.
        max_total_size: the budget of a batch, or several; see `BatchSamplerBase`. With
            `cost="count"` it is the number of samples in a batch.
        sizeof: the size of a sample; see `pack_stream`. The first size determines the bucket.
        cost: what a batch costs; see `BatchSamplerBase`.
        max_batch_size: the most samples in a batch, beside the budget.
        batch_multiple: batches have a multiple of this many samples, unless fewer fit the budget or
            are left.
        lookahead: how many samples may wait.
        collate_fn: makes a batch of a list of samples; a batch is the list if None.
        rank: the rank of this process; see `BatchSamplerBase`.
        world_size: how many ranks share the batches; see `BatchSamplerBase`.
        sharded: whether the iterable gives each rank and each worker other samples already.
        oversize: what to do with a sample that exceeds the budget by itself; see
            `BatchSamplerBase`. Samples left out are reported at the end.

    Returns:
        A torch `IterableDataset` of batches, which can be iterated over and resumed.

    Example:
        >>> list(bucket_stream(iter(["a", "bbbb", "cc", "ddddd", "e"]), [0, 3, 10], 6))
        [['bbbb'], ['a', 'cc', 'e'], ['ddddd']]
    """
    limits = Limits.read(cost, max_total_size, max_batch_size)
    settings = {
        "lookahead": whole("lookahead", lookahead, 1),
        "batch_multiple": whole("batch_multiple", batch_multiple, 1, 2**31),
        "bucket_boundaries": sorted_boundaries(bucket_boundaries).tolist(),
        **limits.settings(),
    }
    return StreamBatches(
        "bucket_stream",
        iterable,
        limits,
        settings,
        sizeof=sizeof,
        collate_fn=collate_fn,
        ranks=RankSource(rank, world_size),
        sharded=sharded,
        oversize=oversize,
    )
