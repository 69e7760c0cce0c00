"""How the workers of a DataLoader read one stream: the same samples in the same epoch."""

from __future__ import annotations

import itertools
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as _torch_worker

from brim._warn import warn

# The words of shared memory: the latest claim, the one before `set_epoch` was last called, how
# often the main process called it, whether anybody did; then the latest key of each worker, then
# fingerprints by their number and by worker.
_CLAIM, _CLAIM_BEFORE, _TIMES_SET, _WAS_SET, _KEYS = range(5)
_MOST_WORKERS = 1024
_MARKS, _COLUMNS = 48, 16
_EPOCHS = 2**32
# How many samples are compared as they are.
_HEAD = 8

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


class Reading:
    """One iteration of a stream: its key, which all workers share, its epoch and this worker."""

    def __init__(self, key: int, epoch: int, worker: int, workers: int) -> None:
        self.key = key
        self.epoch = epoch
        self.worker = worker
        self.workers = workers
        self.compared = 0  # fingerprints so far
        self.told = False


class Readers:
    """What the main process and the workers of a stream agree on, in shared memory.

    Epochs: each iteration claims the next one. All workers of a DataLoader's iteration have one
    key, and whoever comes first claims for all: the claim is one word, key and epoch, and all write
    the same one.

    Samples: workers leave fingerprints of what they read, and compare them.
    """

    def __init__(self) -> None:
        self._words = torch.zeros(_KEYS + _MOST_WORKERS + _MARKS * _COLUMNS, dtype=torch.int64)
        self._share()
        self._times_set = 0
        self._iterations: dict[int, int] = {}  # of each worker in this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy that was not made for a worker shares with nobody."""
        self.__dict__.update(state)
        self._share()

    def _share(self) -> None:
        words: Any = self._words
        if not words.is_shared():
            words.share_memory_()

    def _word(self, place: int) -> int:
        return int(self._words[place])

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._word(_CLAIM) % _EPOCHS

    @property
    def workers_have_read(self) -> bool:
        """Whether the latest iteration was one of workers, asked in the main process."""
        is_claimed = self._word(_CLAIM) >= _EPOCHS
        return is_claimed and get_worker_info() is None

    @property
    def epoch_was_set(self) -> bool:
        """Whether `set_epoch` was called, in any process."""
        return bool(self._word(_WAS_SET))

    def set_epoch(self, epoch: int) -> None:
        """Decide the epoch of the next iteration."""
        if epoch >= _EPOCHS:
            raise ValueError(f"epoch must be below 2**32, got {epoch}")
        if get_worker_info() is None:
            self._words[_CLAIM_BEFORE] = self._word(_CLAIM)
            self._times_set += 1
            self._words[_TIMES_SET] = self._times_set
        self._words[_CLAIM] = epoch
        self._words[_WAS_SET] = 1

    def iteration(self) -> tuple[int, int, int, int]:
        """Number a new iteration of this process: (key, worker, workers, iterations before)."""
        info = get_worker_info()
        if info is None:
            return _hash(f"main {os.getpid()} {next(_main_iterations)}"), 0, 1, 0
        before = self._iterations.get(info.id, 0)
        self._iterations[info.id] = before + 1
        place = _KEYS + info.id % _MOST_WORKERS
        key = _hash(f"{info.seed - info.id} {before}")
        if self._word(place) == key:  # the same seed as in an earlier iteration
            key = _hash(f"again {key}")
        self._words[place] = key
        return key, info.id, info.num_workers, before

    def claim(self, key: int, worker: int, workers: int, before: int) -> Reading:
        """Begin the iteration: the epoch that its first worker claimed, else the next one."""
        claim = self._word(_CLAIM)
        # The epoch was set after this worker had been started: it is meant for the next iteration.
        late = before == 0 and self._times_set != self._word(_TIMES_SET)
        if late:
            claim = self._word(_CLAIM_BEFORE)
        claimed, epoch = divmod(claim, _EPOCHS)
        if claimed == key:
            epoch -= 1
        elif not late:
            self._words[_CLAIM] = key * _EPOCHS + epoch + 1
        return Reading(key, epoch, worker, workers)

    def _others(self, reading: Reading, mark: int, value: int) -> dict[int, int]:
        """Leave a value, and return those of other workers in this iteration."""
        begin = _KEYS + _MOST_WORKERS + mark * _COLUMNS
        self._words[begin + reading.worker % _COLUMNS] = reading.key * _EPOCHS + value
        found = {}
        for column, word in enumerate(self._words[begin : begin + _COLUMNS].tolist()):
            key, other = divmod(word, _EPOCHS)
            if key == reading.key and column != reading.worker % _COLUMNS:
                found[column] = other
        return found

    def compare_heads(self, reading: Reading, samples: Iterator[Any], *, sharded: bool) -> Any:
        """Compare the first samples, as they are. Returns an iterator over all of them."""
        head = list(itertools.islice(samples, _HEAD))
        value = _digest(head)
        if value and sharded:
            for other, theirs in self._others(reading, 0, value).items():
                if theirs == value and len(head) > 1:
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
            heads = _KEYS + _MOST_WORKERS
            words = self._words[heads : heads + _COLUMNS].tolist()
            if len({word for word in words if word // _EPOCHS == reading.key}) > 1:
                reading.told = True
                warn(
                    "workers of the DataLoader begin with different samples, all of one size: if "
                    "the iterable gives each worker its own samples, or another order, samples "
                    "are lost or come twice: pass sharded=True, or seed its order by the epoch. "
                    "If they are the same samples, changed at random, this is no problem"
                )


def _hash(text: str) -> int:
    """A number from 1 to 2**31 - 1: 0 is the key of no iteration."""
    return zlib.crc32(text.encode()) % (2**31 - 1) + 1


def _digest(samples: list[Any]) -> int:
    """A number from 1 to 2**32 - 1, or 0 if there are no samples, or they cannot be pickled."""
    try:
        return zlib.crc32(pickle.dumps(samples)) or 1 if samples else 0
    except (pickle.PicklingError, AttributeError, NotImplementedError, TypeError, ValueError):
        return 0


def split_by_rank(iterable: Iterable[Any]) -> bool:
    """Whether it is known to give each rank other samples: Hugging Face's split by node."""
    source = getattr(iterable, "dataset", iterable)  # of a WholeStream
    split = getattr(source, "_distributed", None)
    return getattr(split, "world_size", 1) > 1
