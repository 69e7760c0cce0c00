"""Packed and bucketed batches of data that has no length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

from torch.utils.data import IterableDataset

from brim import _C
from brim._arguments import check_callable, flag, shown, whole
from brim._warn import warn
from brim.data.base import left_out_message
from brim.data.ranks import RankSource, shared_by_accelerate
from brim.data.readers import Readers, Reading, SourceEpoch, as_if_alone, split_by_rank
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

# The position at the beginning of an epoch.
_BEGIN: Mapping[str, Any] = {"done": 0, "cursor": [], "segments": []}


class StreamBatches(IterableDataset[Any]):
    """Batches of an iterable; see `pack_stream` and `bucket_stream`, which make it.

    For a DataLoader with `batch_size=None`, or to iterate over. Each iteration reads the iterable
    anew, independently of others at the same time, and is the next epoch unless `set_epoch` says
    otherwise. All ranks and workers read all samples, and each gets its own batches: all ranks
    equally many, and batches of one step cost about the same. An iterable that shares its samples
    out by `torch.utils.data.get_worker_info` sees no worker, and gives all of them to each; workers
    that read different samples all the same are an error.

    Example:
        >>> from brim.data import pack_stream
        >>> list(pack_stream(["aaa", "b", "cc"], max_total_size=4))
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
        self._readers = Readers()
        self._source = SourceEpoch(iterable)
        self._sizeof = function
        self._limits = limits
        self._settings = settings
        self._collate = collate_fn
        self._ranks = ranks
        self._sharded = flag("sharded", sharded)
        self._oversize = check_oversize(oversize)
        self._latest: _StreamIterator | None = None
        self._open(iter(()), 0, {})  # wrong arguments are errors at once

    def __getstate__(self) -> dict[str, Any]:
        """For a worker, which has no process group of its own unless it is forked."""
        ranks = self._ranks.now()
        fixed = RankSource(*ranks) if ranks.world_size > 1 else self._ranks
        return {**self.__dict__, "_latest": None, "_ranks": fixed}

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, in whatever process that is."""
        return self._readers.next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in workers that are already running.

        The epoch is passed on to the iterable. With `shuffle` each has its own order.
        """
        self._set_epoch(whole("epoch", epoch, 0), None)

    def _set_epoch(self, epoch: int, start: Mapping[str, Any] | None) -> None:
        self._readers.set_epoch(epoch, start)
        self._source.tell(epoch, by_user=True)

    def _tell_of_ranks(self, reading: Reading) -> None:
        """Each rank counts epochs by itself, and nothing says whether they count alike."""
        counted = reading.number == 1
        ranks = self._ranks.now().world_size > 1 and not self._sharded and reading.worker == 0
        if counted and ranks and (self._settings.get("shuffle", False) or self._source.counted):
            warn(
                "each rank counts the epochs of this stream by itself: call set_epoch(epoch) "
                "before each, so that all ranks have the same order, also after one was cut short"
            )

    def _open(
        self, samples: Iterator[Any], epoch: int, start: Mapping[str, Any]
    ) -> _C.LookAheadStream:
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
            _C.epoch_seed(settings.get("seed", 0), epoch),
            self._oversize,
            settings["batch_multiple"],
            rank,
            world_size,
        )
        if start.get("cursor"):
            stream.seek(start["cursor"], start["segments"])
        return stream

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches; in a worker of a DataLoader, that worker's."""
        shared_by_accelerate(self._ranks)
        if not self._sharded and self._ranks.now().world_size > 1 and split_by_rank(self.iterable):
            raise ValueError(
                "the data set is split by node, so each rank would get a part of its own part: "
                "give the stream the data set before the split, or pass sharded=True"
            )
        self._latest = iterator = _StreamIterator(self)
        return iterator

    def _description(self, epoch: int) -> dict[str, Any]:
        return {
            "format": 1,
            "sampler": self._name,
            "samples": -1,
            "settings": self._settings,
            "epoch": epoch,
        }

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position of the latest iteration, to resume from; plain numbers and lists.

        The state is the same on every rank, and can be loaded with another number of ranks. In a
        worker it is that worker's, as torchdata's `StatefulDataLoader` saves it.

        Args:
            batches: how many batches of that iteration are done; all that it gave if None.
        """
        if self._latest is None:
            if batches is not None and whole("batches", batches, 0) > 0:
                raise ValueError(f"batches must be 0 before an iteration begins, got {batches}")
            if self._latest is None and self._readers.workers_have_read:
                warn(
                    f"the position of this stream is in the workers of its DataLoader: this state "
                    f"begins with epoch {self.epoch}, and what is left of the one before is lost "
                    "if that has not ended. torchdata's StatefulDataLoader saves it in the middle"
                )
            start = self._readers.next_start or _BEGIN
            return {**self._description(self.epoch), "finished": False, **start}
        return self._latest.state_dict(batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume where the state was taken.

        It reads and drops the samples before, so the iterable must give the same ones again. After
        the state of a finished iteration the next epoch begins.

        Raises:
            ValueError: if the state is of another stream, or of other settings.
        """
        own = self._description(0)
        check_state(state, {*own, "finished", "done", "cursor", "segments"})
        check_same_run(state, own)
        epoch = whole("epoch", state["epoch"], 0)
        finished = flag("finished", state["finished"])
        start = {name: state[name] for name in _BEGIN}
        self._set_epoch(epoch + finished, None if finished or not state["cursor"] else start)
        self._latest = None


_begun: WeakSet[_StreamIterator] = WeakSet()  # in this process


class _StreamIterator(PositionedIterator):
    """The batches of one iteration: of a worker, every n-th batch of its rank.

    It begins with its first batch: iterators that nobody uses take no epoch.
    """

    def __init__(self, owner: StreamBatches) -> None:
        super().__init__({}, 0)
        self._owner = owner
        self._iteration = owner._readers.iteration()
        self._collate = owner._collate
        self._stream: _C.LookAheadStream | None = None
        self._samples: Iterator[Any] = iter(())
        self._begin = 0  # batches of this rank before this iteration
        self._next = 0  # the number of the stream's next batch
        self._ended = False

    def __iter__(self) -> _StreamIterator:
        return self

    def _open(self) -> _C.LookAheadStream:
        owner = self._owner
        self._reading = reading = owner._readers.claim(self._iteration)
        start = reading.start or _BEGIN
        owner._source.tell(reading.epoch, by_user=owner._readers.epoch_was_set)
        owner._tell_of_ranks(reading)
        samples = self._samples = iter(owner.iterable)
        if any(each._samples is samples and not each._ended for each in _begun):
            warn(
                f"two iterations share the samples of one {type(samples).__name__}, so each gets "
                "a part of them: give the stream an iterable that makes a new iterator each time"
            )
        _begun.add(self)
        if reading.workers > 1:
            samples = owner._readers.compare_heads(reading, samples, sharded=owner._sharded)
        self._shares = (0, 1) if owner._sharded else (reading.worker, reading.workers)
        self._begin = self._next = start["done"]
        self._places = [self._begin]
        self._description = owner._description(reading.epoch)
        return owner._open(samples, reading.epoch, start)

    def _read(self) -> list[Any] | None:
        """The next batch that is this worker's; None at the end."""
        if self._stream is None:
            self._stream = self._open()
        number, workers = self._shares
        while self._next % workers != number:
            if not self._stream.skip():
                return None
            self._next += 1
        batch = next(self._stream, None)
        self._next += batch is not None
        return batch

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        self._ended = True  # an error is the end too, as for a generator
        if self._iteration.workers == 1 or self._owner._sharded:
            batch = self._read()
        else:
            with as_if_alone():
                batch = self._read()
            assert self._stream is not None
            self._owner._readers.compare_sizes(
                self._reading, self._stream.fingerprints, self._stream.sizes_differ
            )
        if batch is None:
            self._finish()
        self._places.append(self._next)
        self._ended = False
        return batch if self._collate is None else self._collate(batch)

    def _finish(self) -> NoReturn:
        self._finished = True
        assert self._stream is not None
        if self._shares[0] == 0:
            for reason, indices in self._stream.left_out.items():
                warn(left_out_message(indices, self._stream.read, reason))
        raise StopIteration

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The state after this many batches; where it would begin if it has not begun."""
        if self._stream is None:
            epoch = self._owner.epoch
            self._description = self._owner._description(epoch)
            start = self._owner._readers.next_start or _BEGIN
            return {**super().state_dict(batches), **start}
        return super().state_dict(batches)

    def _position(self, place: int) -> dict[str, Any]:
        if self._stream is None:
            return {}
        return {"done": place, **self._stream.position(place - self._begin)}


def pack_stream(
    iterable: Iterable[Any],
    max_total_size: Budget,
    *,
    sizeof: Callable[[Any], Any] | Mapping[Any, Any] = len,
    cost: Cost | Sequence[Cost] = "padded",
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
        seed: determines that order together with the epoch: each iteration is the next one, unless
            `set_epoch` is called before it.
        collate_fn: makes a batch of a list of samples; a batch is the list if None.
        rank: the rank of this process; see `BatchSamplerBase`.
        world_size: how many ranks share the batches; see `BatchSamplerBase`.
        sharded: whether the iterable gives each rank and each worker other samples already, and is
            to go on doing so. They then get different numbers of batches. An iterable that divides
            its samples by `get_worker_info` alone needs no `sharded`.
        oversize: what to do with a sample that exceeds the budget by itself; see
            `BatchSamplerBase`. Samples left out are reported at the end.

    Returns:
        A torch `IterableDataset` of batches, which can be iterated over and resumed.

    Example:
        >>> words = ["aaaaaa", "bbbb", "ccccc", "ddd", "eeeeeee"]
        >>> list(pack_stream(words, 10, cost="sum"))
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
