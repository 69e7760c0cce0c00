"""Batches of an iterable, and their iterations: what streams are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch.utils.data import IterableDataset

from brim import _C
from brim._arguments import check_callable, flag, shown, whole
from brim._warn import warn
from brim.data.base import left_out_message
from brim.data.collate import DocumentPart
from brim.data.mixture import Mixture, state_of
from brim.data.ranks import RankSource, shared_by_accelerate
from brim.data.readers import HEAD, Readers, Reading, SourceEpoch, as_if_alone, split_by_rank
from brim.data.shards import Reader, own_part
from brim.data.sizes import Limits, check_oversize, one_column, size_function
from brim.data.states import PositionedIterator, check_same_run, check_state

# The position at the beginning of an epoch.
_BEGIN: Mapping[str, Any] = {"done": 0, "cursor": [], "segments": []}
# What else a position has: whose shards it is in, and the weights of a mixture.
_FURTHER = ("reader", "mixture")


class StreamBatches(IterableDataset[Any]):
    """Batches of an iterable; see `pack_stream` and `bucket_stream`, which make it.

    For a DataLoader with `batch_size=None`, or to iterate over. Each iteration reads the iterable
    anew, independently of others at the same time, and is the next epoch unless `set_epoch` says
    otherwise. All ranks and workers read all samples, and each gets its own batches: all ranks
    equally many, and batches of one step cost about the same. An iterable that shares its samples
    out by `torch.utils.data.get_worker_info` sees no worker, and gives all of them to each; workers
    that read different samples all the same are an error. With `sharded=` each rank and worker
    reads its own samples only, and `even` gives all ranks equally many batches.

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
        sharded: bool | str,
        oversize: str,
        splits: bool = False,
        blocks: bool = False,
    ) -> None:
        if isinstance(iterable, str) or not isinstance(iterable, Iterable):
            raise TypeError(f"iterable must be an iterable of samples, got {shown(iterable)}")
        function = size_function(sizeof)
        if function is None:
            raise TypeError(f"sizeof must be a callable or a mapping here, got {shown(sizeof)}")
        self._divides = isinstance(sharded, str)
        if self._divides and sharded != "divide":
            raise ValueError(f'sharded must be True, False or "divide", got {shown(sharded)}')
        if collate_fn is not None:
            check_callable("collate_fn", collate_fn)
        self._name = name
        self.iterable = iterable
        self._readers = Readers()
        self._source = SourceEpoch(iterable)
        self._sizeof = _block_sizes(function, limits.measured) if blocks else function
        self._blocks = flag("blocks", blocks)
        self._limits = limits
        self._settings = settings
        self._collate = collate_fn
        self._ranks = ranks
        self._sharded = self._divides or flag("sharded", sharded)
        self._oversize = check_oversize(oversize, splits=splits)
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
    ) -> _C.LookAheadStream | _C.BlockStream:
        settings = self._settings
        options = {
            "lookahead": settings["lookahead"],
            "boundaries": settings.get("bucket_boundaries", []),
            "shuffle": settings.get("shuffle", False),
            "seed": _C.epoch_seed(settings.get("seed", 0), epoch),
            "oversize": self._oversize,
            "batch_multiple": settings["batch_multiple"],
            "size_multiple": settings.get("size_multiple", 1),
        }
        stream = (_C.BlockStream if self._blocks else _C.LookAheadStream)(
            samples,
            self._sizeof,
            self._limits.costs,
            self._limits.maxima,
            self._limits.measured,
            options,
            DocumentPart,
            *((0, 1) if self._sharded else self._ranks.now()),
        )
        if start.get("cursor"):
            stream.seek(start["cursor"], start["segments"])
        return stream

    def _reader(self, reading: Reading, start: Mapping[str, Any]) -> Reader:
        """This process among those that read, which must be the one that a position is of."""
        reader = Reader(*self._ranks.now(), reading.worker, reading.workers)
        before = start.get("reader")
        if before is not None and (not self._sharded or Reader(*before) != reader):
            raise ValueError(
                f"state is of {Reader(*before)}, which had read its own shards; here "
                + (f"is {reader}. Resume" if self._sharded else "all samples are read. Resume")
                + " with the same numbers of ranks and workers, each from its own state"
            )
        if before is None and self._divides and start["cursor"]:
            raise ValueError('state is of a stream without sharded="divide"')
        return reader

    def _samples(self, reader: Reader, start: Mapping[str, Any]) -> Iterator[Any]:
        """What this process reads."""
        source = self.iterable
        if isinstance(source, Mixture):
            return source.read(
                reader,
                sharded=self._sharded,
                divide=self._divides,
                state=start.get("mixture"),
            )
        return iter(own_part(source, reader) if self._divides else source)

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
        worker it is that worker's, as torchdata's `StatefulDataLoader` saves it. With `sharded=` it
        is that of this rank and worker alone.

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
            return {**self._description(self.epoch), "finished": False, **self._next_start()}
        return self._latest.state_dict(batches)

    def _next_start(self) -> Mapping[str, Any]:
        """The position that the next iteration begins with."""
        start = self._readers.next_start
        if start is None and isinstance(self.iterable, Mixture):
            return {**_BEGIN, "mixture": self.iterable.state_dict()}
        return start or _BEGIN

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
        start = {name: state[name] for name in (*_BEGIN, *_FURTHER) if name in state}
        start["done"] = whole("done", state["done"], 0)
        if isinstance(self.iterable, Mixture) and "mixture" in state:
            self.iterable.load_state_dict(state["mixture"])
        # Of an epoch that has not begun, what was read ahead may have seen other weights.
        begun = state["cursor"] or len(state.get("mixture", {}).get("changes", ())) > 1
        self._set_epoch(epoch + finished, start if begun and not finished else None)
        self._latest = None


# In this process, by id. A WeakSet could not be read while other threads add to it.
_begun: WeakValueDictionary[int, _StreamIterator] = WeakValueDictionary()


class _StreamIterator(PositionedIterator):
    """The batches of one iteration: of a worker, every n-th batch of its rank.

    It begins with its first batch: iterators that nobody uses take no epoch.
    """

    def __init__(self, owner: StreamBatches) -> None:
        super().__init__({}, 0)
        self._owner = owner
        self._iteration = owner._readers.iteration()
        self._collate = owner._collate
        self._stream: _C.LookAheadStream | _C.BlockStream | None = None
        self._samples: Iterator[Any] = iter(())
        self._begin = 0  # batches of this rank before this iteration
        self._next = 0  # the number of the stream's next batch
        self._ended = False
        self._all_read: list[bool] = []  # not empty once all samples were; batches may be left

    def __iter__(self) -> _StreamIterator:
        return self

    def _open(self) -> _C.LookAheadStream | _C.BlockStream:
        owner = self._owner
        self._reading = reading = owner._readers.claim(self._iteration)
        start = reading.start or _BEGIN
        owner._source.tell(reading.epoch, by_user=owner._readers.epoch_was_set)
        owner._tell_of_ranks(reading)
        self._reader = owner._reader(reading, start)
        samples = self._samples = owner._samples(self._reader, start)
        others = [each() for each in _begun.valuerefs()]
        if any(each and each._samples is samples and not each._ended for each in others):
            warn(
                f"two iterations share the samples of one {type(samples).__name__}, so each gets "
                "a part of them: give the stream an iterable that makes a new iterator each time"
            )
        _begun[id(self)] = self
        if isinstance(samples, _C.MixedSamples):
            samples = itertools.chain(samples, _note_end(self._all_read))
        if reading.workers > 1:
            head = 1 if owner._blocks else HEAD
            samples = owner._readers.compare_heads(reading, samples, head, sharded=owner._sharded)
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
                split = self._owner._oversize == "split"  # each part has a number of its own
                what = "documents and parts of them" if split else "samples"
                warn(left_out_message(indices, self._stream.read, reason, what))
        raise StopIteration

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The state after this many batches; where it would begin if it has not begun."""
        if self._stream is None:
            epoch = self._owner.epoch
            self._description = self._owner._description(epoch)
            return {**super().state_dict(batches), **self._owner._next_start()}
        return super().state_dict(batches)

    def _position(self, place: int) -> dict[str, Any]:
        if self._stream is None:
            return {}
        position = {"done": place, **self._stream.position(place - self._begin)}
        if self._owner._sharded:
            position["reader"] = list(self._reader)
        mixture = self._owner.iterable
        if isinstance(self._samples, _C.MixedSamples) and isinstance(mixture, Mixture):
            several = not self._owner._sharded and self._reader.readers > 1
            to_the_end = several or bool(self._all_read)
            position["mixture"] = state_of(self._samples, mixture, to_the_end=to_the_end)
        return position


def _note_end(reached: list[bool]) -> Iterator[Any]:
    """No samples: it is asked once there are no others."""
    reached.append(True)
    yield from ()


def _block_sizes(sizeof: Callable[[Any], Any], measured: int) -> Callable[[Any], torch.Tensor]:
    """Gives the sizes of a block's samples: a row per sample, a column per size."""

    def sizes(block: Any) -> torch.Tensor:
        given = sizeof(block)
        several = list(given) if measured > 1 else [given]
        if len(several) != measured:
            raise ValueError(
                f"sizeof must give {measured} columns of sizes for a block, one for each "
                f"max_total_size, got {len(several)}"
            )
        columns = [one_column("sizes", column).double() for column in several]
        if any(len(column) != len(columns[0]) for column in columns):
            raise ValueError(
                "sizes of a block must be as many in each column, got "
                f"{[len(column) for column in columns]}"
            )
        table = torch.stack(columns, 1)
        if len(table) and not (0 <= float(table.min()) <= float(table.max()) < float("inf")):
            wrong = table[~((table >= 0) & (table < float("inf")))][0]
            raise ValueError(f"sizes must be finite and not negative, got {float(wrong)}")
        return table

    return sizes
