"""How the workers of a DataLoader read one stream: the same samples in the same epoch."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as _torch_worker

from brim import _C
from brim._warn import warn

# How many iterations may begin at the same time, and how many calls of `set_epoch` are remembered.
_RECENT = 256
# Fingerprints of the latest iterations, by their number and by worker.
_COMPARED, _MARKS, _COLUMNS = 8, 48, 16
_POSITION_WORDS = 512
# The words of shared memory: a lock, the number of calls of `set_epoch`, whether a user called it,
# and how many iterations have begun. For each recent call of `set_epoch`: the next epoch, and how
# many iterations have begun since. For each recent iteration: its key, its epoch, the position that
# it begins with, its number since `set_epoch`; then fingerprints. A position: the number of its
# call of `load_state_dict`, its length, and its text.
_LOCK, _SERIES, _WAS_SET, _BEGUN = range(4)
_NEXT = 4
_USED = _NEXT + _RECENT
_KEY = _USED + _RECENT
_EPOCH = _KEY + _RECENT
_START = _EPOCH + _RECENT
_NUMBER = _START + _RECENT
_FINGERPRINTS = _NUMBER + _RECENT
_POSITION = _FINGERPRINTS + _COMPARED * _MARKS * _COLUMNS
_WORDS = _POSITION + 2 + _POSITION_WORDS
_EPOCHS = 2**32
# How many samples are compared as they are.
HEAD = 8
# Seconds, after which the process that holds the lock must have been killed: it holds it for some
# microseconds.
_LOCK_PATIENCE = 2.0

_main_iterations = itertools.count()


@contextmanager
def as_if_alone() -> Iterator[None]:
    """Hide from the code inside that this is one of several workers.

    Data sets that share their samples out ask `torch.utils.data.get_worker_info`, and give all of
    them where there is no worker.
    """
    info = _torch_worker._worker_info
    _torch_worker._worker_info = None
    try:
        yield
    finally:
        _torch_worker._worker_info = info


class Iteration(NamedTuple):
    """One iteration in one process: its key is the same in all workers of a DataLoader."""

    key: int
    worker: int
    workers: int
    is_first: bool  # of a worker, which was started for it


class Reading:
    """An iteration that has begun: its epoch, and the position it begins with if it is resumed.

    Its number is 0 if its epoch was set, and counts iterations from there on.
    """

    def __init__(
        self, iteration: Iteration, slot: int, number: int, epoch: int, start: Any
    ) -> None:
        self.key, self.worker, self.workers, _ = iteration
        self.marks = _FINGERPRINTS + slot % _COMPARED * _MARKS * _COLUMNS
        self.number = number
        self.epoch = epoch
        self.start: Mapping[str, Any] | None = start
        self.compared = 0  # fingerprints so far
        self.told = False


class Readers:
    """What the main process and the workers of a stream agree on, in shared memory.

    Epochs: each iteration claims the next one. All workers of a DataLoader's iteration have one
    key, and whoever comes first claims for all. Each call of `set_epoch` in the main process begins
    a series of epochs. New workers claim from the series in which they were started, so that an
    epoch that is set meanwhile is for the next iteration. A loaded position is for the first
    iteration of its series.

    Samples: workers leave fingerprints of what they read, and compare them.
    """

    def __init__(self) -> None:
        self._words = torch.zeros(_WORDS, dtype=torch.int64)
        self._share()
        self._series = 0  # as far as this process knows
        # What a worker was told for its own next iteration, as by a StatefulDataLoader.
        self._own: tuple[int, Mapping[str, Any] | None] | None = None
        self._iterations: dict[int, int] = {}  # of each worker in this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy that was not made for a worker shares with nobody."""
        self.__dict__.update(state)
        self._share()

    def _share(self) -> None:
        words: Any = self._words
        if not words.is_shared():
            words.share_memory_()
            words[_LOCK] = 0

    def _word(self, place: int) -> int:
        return int(self._words[place])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        mine = os.getpid()
        end = time.monotonic() + _LOCK_PATIENCE
        while not _C.compare_exchange(self._words, _LOCK, 0, mine):
            if time.monotonic() > end:
                self._words[_LOCK] = 0
            time.sleep(0.0001)
        try:
            yield
        finally:
            _C.compare_exchange(self._words, _LOCK, mine, 0)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        if self._own is not None:
            return self._own[0]
        return self._word(_NEXT + self._word(_SERIES) % _RECENT)

    @property
    def next_start(self) -> Mapping[str, Any] | None:
        """The position that the next iteration begins with; None if it begins an epoch."""
        if self._own is not None:
            return self._own[1]
        series = self._word(_SERIES)
        return None if self._word(_USED + series % _RECENT) else self._position_of(series)

    def _position_of(self, series: int) -> Mapping[str, Any] | None:
        number, length = self._words[_POSITION : _POSITION + 2].tolist()
        if number != series or length == 0:
            return None
        text = self._words[_POSITION + 2 :].view(torch.uint8)[:length]
        found: Mapping[str, Any] = json.loads(bytes(text.tolist()))
        return found

    @property
    def workers_have_read(self) -> bool:
        """Whether there was an iteration since the epoch was set; asked in the main process."""
        used = self._word(_USED + self._word(_SERIES) % _RECENT) > 0
        return used and get_worker_info() is None

    @property
    def epoch_was_set(self) -> bool:
        """Whether `set_epoch` was called, in any process."""
        return bool(self._word(_WAS_SET))

    def set_epoch(self, epoch: int, start: Mapping[str, Any] | None = None) -> None:
        """Decide the epoch of the next iteration, and the position that it begins with.

        A position that was loaded for this epoch, and that no iteration has used, is kept.
        """
        if epoch >= _EPOCHS:
            raise ValueError(f"epoch must be below 2**32, got {epoch}")
        if start is None and epoch == self.next_epoch:
            start = self.next_start
        self._words[_WAS_SET] = 1
        if get_worker_info() is not None:
            self._own = epoch, start
            return
        text = b"" if start is None else json.dumps(dict(start)).encode()
        if len(text) > 8 * _POSITION_WORDS:
            raise ValueError(
                f"state must be of at most {8 * _POSITION_WORDS} bytes, got {len(text)}: the "
                "number of ranks, or the weights of a mixture, have changed too often since its "
                "epoch began"
            )
        with self._locked():
            self._series = series = self._word(_SERIES) + 1
            self._words[_SERIES] = series
            self._words[_NEXT + series % _RECENT] = epoch
            self._words[_USED + series % _RECENT] = 0
            if text:
                self._words[_POSITION : _POSITION + 2] = torch.tensor([series, len(text)])
                bytes_here = self._words[_POSITION + 2 :].view(torch.uint8)
                bytes_here[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)

    def iteration(self) -> Iteration:
        """Number a new iteration of this process."""
        info = get_worker_info()
        if info is None:
            return Iteration(_hash(f"main {os.getpid()} {next(_main_iterations)}"), 0, 1, False)
        before = self._iterations.get(info.id, 0)
        self._iterations[info.id] = before + 1
        key = _hash(f"{_loader_of_worker()} {info.seed - info.id} {before}")
        return Iteration(key, info.id, info.num_workers, before == 0)

    def claim(self, iteration: Iteration) -> Reading:
        """Begin the iteration: with what its first worker claimed, else with the next epoch."""
        own, self._own = self._own, None
        with self._locked():
            series = self._series if iteration.is_first else self._word(_SERIES)
            late = self._word(_SERIES) - series >= _RECENT
            keys = self._words[_KEY : _KEY + _RECENT].tolist()
            new = iteration.key not in keys
            slot = self._word(_BEGUN) % _RECENT if new else keys.index(iteration.key)
            if new and not late:
                following = _NEXT + series % _RECENT
                used = _USED + series % _RECENT
                resumed = not self._word(used) and self._position_of(series) is not None
                self._words[_KEY + slot] = iteration.key
                self._words[_EPOCH + slot] = self._word(following)
                self._words[_START + slot] = series if resumed else 0
                self._words[_NUMBER + slot] = self._word(used)
                self._words[following] += 1
                self._words[used] += 1
                self._words[_BEGUN] += 1
            epoch = self._word(_EPOCH + slot)
            begins_at = self._word(_START + slot)
            start = self._position_of(begins_at) if begins_at else None
            if own is not None:
                epoch, start = own
                self._words[_NEXT + series % _RECENT] = epoch + 1
            elif late or (begins_at and start is None):
                raise RuntimeError(
                    "load_state_dict() or set_epoch() was called while workers were starting, so "
                    "they do not know any more where to begin: call it before the DataLoader is "
                    "iterated over"
                )
            return Reading(iteration, slot, self._word(_NUMBER + slot), epoch, start)

    def _others(self, reading: Reading, mark: int, value: int) -> dict[int, int]:
        """Leave a value, and return those of other workers in this iteration."""
        begin = reading.marks + mark * _COLUMNS
        self._words[begin + reading.worker % _COLUMNS] = reading.key * _EPOCHS + value
        found = {}
        for column, word in enumerate(self._words[begin : begin + _COLUMNS].tolist()):
            key, other = divmod(word, _EPOCHS)
            if key == reading.key and column != reading.worker % _COLUMNS:
                found[column] = other
        return found

    def compare_heads(
        self, reading: Reading, samples: Iterator[Any], count: int, *, sharded: bool
    ) -> Any:
        """Compare the first samples, as they are. Returns an iterator over all of them."""
        head = list(itertools.islice(samples, count))
        value = digest(head)
        if value and sharded:
            for other, theirs in self._others(reading, 0, value).items():
                if theirs == value and (len(head) > 1 or count == 1):
                    warn(
                        f"sharded=True says that each worker reads other samples, but workers "
                        f"{other} and {reading.worker} begin with the same ones, which then come "
                        "twice: leave sharded out, or divide the samples by get_worker_info()"
                    )
                    break
        elif value:
            self._others(reading, 0, value)
        return itertools.chain(head, samples)

    def compare_sizes(self, reading: Reading, fingerprints: Sequence[int], differ: bool) -> None:
        """Compare the sizes read so far with those that other workers read.

        Raises:
            ValueError: if they are not the same. Workers would make different batches, and samples
                would be lost or come twice.
        """
        for mark in range(reading.compared + 1, min(len(fingerprints) + 1, _MARKS)):
            value = fingerprints[mark - 1] % _EPOCHS
            for other, theirs in self._others(reading, mark, value).items():
                if theirs != value:
                    raise ValueError(
                        f"workers {other} and {reading.worker} of the DataLoader read different "
                        "samples, or in another order: samples would be lost or come twice. If "
                        "the iterable gives each worker its own samples, pass sharded=True; if "
                        "it shuffles, seed it by the epoch (set_epoch), not by the worker"
                    )
            reading.compared = mark
        if not differ and not reading.told and reading.compared > 3:
            words = self._words[reading.marks : reading.marks + _COLUMNS].tolist()
            if len({word for word in words if word // _EPOCHS == reading.key}) > 1:
                reading.told = True
                warn(
                    "workers of the DataLoader begin with different samples, all of one size: if "
                    "the iterable gives each worker its own samples, or another order, samples "
                    "are lost or come twice: pass sharded=True, or seed its order by the epoch. "
                    "If they are the same samples, changed at random, this is no problem"
                )


def _loader_of_worker() -> str:
    """A name that the workers of one DataLoader's iterator share, and no others have."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code.co_name != "_worker_loop":  # a frame keeps the locals that are asked for
            continue
        reader = getattr(frame.f_locals.get("data_queue"), "_reader", None)
        if reader is not None:  # of the queue to which all of them write
            return str(os.fstat(reader.fileno()).st_ino)  # of a pipe: no other gets it later
    return ""


def _hash(text: str) -> int:
    """A number from 1 to 2**31 - 1: 0 is the key of no iteration."""
    return zlib.crc32(text.encode()) % (2**31 - 1) + 1


def digest(samples: list[Any]) -> int:
    """A number from 1 to 2**32 - 1, or 0 if there are no samples, or they cannot be pickled."""
    try:
        return zlib.crc32(pickle.dumps(samples)) or 1 if samples else 0
    except (pickle.PicklingError, AttributeError, NotImplementedError, TypeError, ValueError):
        return 0


class _OurEpoch(int):
    """An epoch that the stream counted, not the user."""


class SourceEpoch:
    """Tells an iterable its epoch, if it has `set_epoch`, unless its user did."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self.counted = callable(getattr(iterable, "set_epoch", None))
        self._first = getattr(iterable, "epoch", getattr(iterable, "_epoch", None))
        # Where the iterable keeps its epoch as it was told. Others keep a number of their own.
        self._kept_as: str | None = None
        if self.counted and type(self._first) is int:
            self._tell(self._first)

    def _tell(self, epoch: int) -> None:
        self._iterable.set_epoch(_OurEpoch(epoch))  # type: ignore[attr-defined]
        kept = vars(self._iterable).items() if hasattr(self._iterable, "__dict__") else ()
        names = (name for name, value in kept if isinstance(value, _OurEpoch))
        self._kept_as = next(names, self._kept_as)

    def _is_users(self, epoch: int) -> bool:
        """Whether the user told the iterable an epoch, and not the stream."""
        if self._kept_as is not None:
            return not isinstance(getattr(self._iterable, self._kept_as, None), _OurEpoch)
        theirs = getattr(self._iterable, "epoch", None)
        return isinstance(theirs, int) and theirs not in (self._first, epoch - 1, epoch)

    def tell(self, epoch: int, *, by_user: bool) -> None:
        """Pass an epoch on. What the stream's user said comes before what the iterable was told."""
        if self.counted and (by_user or not self._is_users(epoch)):
            self._tell(epoch)


def split_by_rank(iterable: Iterable[Any]) -> bool:
    """Whether it is known to give each rank other samples: Hugging Face's split by node."""
    source = getattr(iterable, "dataset", iterable)  # of a WholeStream
    split = getattr(source, "_distributed", None)
    return getattr(split, "world_size", 1) > 1
