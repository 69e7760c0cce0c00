"""Which samples each rank and each worker reads, where it reads its own shards only."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from brim import _C
from brim._arguments import check_callable, flag, shown, whole
from brim._warn import warn


class Reader(NamedTuple):
    """One of the processes that read: a worker of a rank's DataLoader, or the rank itself."""

    rank: int
    world_size: int
    worker: int
    workers: int

    @property
    def readers(self) -> int:
        """The number of readers."""
        return self.world_size * self.workers

    @property
    def number(self) -> int:
        """That of this one. The first are on different ranks: each has one that reads."""
        return self.worker * self.world_size + self.rank

    def __str__(self) -> str:
        """For errors."""
        text = f"rank {self.rank} of {self.world_size}"
        return text if self.workers == 1 else f"worker {self.worker} of {self.workers}, {text}"


class Shards(Iterable[Any]):
    """Samples in shards: files, or whatever can be opened by itself.

    Iterating over it gives all samples. With `sharded="divide"`, `pack_stream` and `bucket_stream`
    let each rank and each worker open its own shards only. For shards of Arrow or Parquet files
    there is `brim.integrations.arrow.arrow_shards`.

    Any class can be divided likewise that has a method `shard(num_shards, index)`, which returns an
    iterable over one of as many parts, and, if there is a most, an attribute `num_shards`.

    Args:
        shards: names of files, for example. All ranks and workers must have the same list.
        open: gives the samples of one shard, each time the same ones in the same order.
        shuffle: open the shards in another order in each epoch. Other ranks then have other shards.
        seed: determines that order together with the epoch, which the stream passes on.

    Example:
        >>> shards = Shards([3, 1, 2], open=range)
        >>> list(shards), list(shards.shard(num_shards=2, index=0))
        ([0, 1, 2, 0, 0, 1], [0, 1, 2, 0, 1])
    """

    def __init__(
        self,
        shards: Sequence[Any],
        open: Callable[[Any], Iterable[Any]],  # noqa: A002
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if isinstance(shards, (str, bytes)) or not isinstance(shards, Sequence) or not shards:
            raise TypeError(f"shards must be a list of at least one shard, got {shown(shards)}")
        check_callable("open", open)
        self._shards = shards
        self._opener = open
        self._shuffle = flag("shuffle", shuffle)
        self._seed = whole("seed", seed, 0)
        self._parts: list[tuple[int, int]] = []
        self.epoch = 0

    @property
    def num_shards(self) -> int:
        """The number of shards that iterating opens."""
        return len(self._order())

    def set_epoch(self, epoch: int) -> None:
        """Decide the order of the shards."""
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Shards:
        """Every `num_shards`-th shard, beginning with number `index`."""
        num_shards = whole("num_shards", num_shards, 1)
        if whole("index", index, 0) >= num_shards:
            raise ValueError(f"index must be below num_shards = {num_shards}, got {index}")
        part = copy.copy(self)
        part._parts = [*self._parts, (num_shards, index)]
        return part

    def _order(self) -> list[int]:
        order = list(range(len(self._shards)))
        if self._shuffle:
            seed = _C.epoch_seed(self._seed, int(self.epoch))
            order.sort(key=lambda number: _C.epoch_seed(seed, number))
        for num_shards, index in self._parts:
            order = order[index::num_shards]
        return order

    def __iter__(self) -> Iterator[Any]:
        """The samples of one shard after the other."""
        return itertools.chain.from_iterable(
            self._opener(self._shards[number]) for number in self._order()
        )


class _EveryNth(Iterable[Any]):
    """A reader's samples of a shard that it shares with others."""

    def __init__(self, samples: Iterable[Any], first: int, step: int) -> None:
        self._samples, self._first, self._step = samples, first, step

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._samples), self._first, None, self._step)


def own_part(iterable: Any, reader: Reader) -> Iterable[Any]:
    """What this reader alone reads of an iterable whose shards can be divided.

    Raises:
        TypeError: if they cannot, as far as is known.
        ValueError: if a reader would have no shard, and samples cannot be divided.
    """
    streamed = getattr(iterable, "dataset", iterable)  # of a WholeStream
    if hasattr(streamed, "_ex_iterable"):
        return _of_hugging_face(streamed, reader)
    if isinstance(getattr(iterable, "pipeline", None), list):
        return _of_webdataset(iterable, reader)
    if callable(getattr(iterable, "shard", None)):
        return _of_shards(iterable, reader)
    raise TypeError(
        f'sharded="divide" needs shards that can be divided, and a {type(iterable).__name__} has '
        "none that are known: give a brim.data.Shards, a data set of Hugging Face, a WebDataset, "
        "or an object with shard(num_shards, index). If it divides its samples by itself, pass "
        "sharded=True"
    )


def _of_shards(iterable: Any, reader: Reader) -> Iterable[Any]:
    shards = getattr(iterable, "num_shards", None)
    if shards is None or shards >= reader.readers:
        part: Iterable[Any] = iterable.shard(num_shards=reader.readers, index=reader.number)
        return part
    if shards < 1:
        raise ValueError(f"iterable must have at least one shard, got num_shards = {shards}")
    if reader.number == 0:
        warn(
            f"{reader.readers} ranks and workers read {shards} shards: those that share a shard "
            "read all of it, and each keeps its part of the samples. More shards save that"
        )
    place, number = divmod(reader.number, shards)
    sharers = len(range(number, reader.readers, shards))
    return _EveryNth(iterable.shard(num_shards=shards, index=number), place, sharers)


def _of_hugging_face(dataset: Any, reader: Reader) -> Iterable[Any]:
    """Split by rank; workers then divide the shards of their rank, as the data set does itself."""
    split = getattr(dataset, "_distributed", None)
    if split is not None and split.world_size > 1:
        if (split.rank, split.world_size) != reader[:2]:
            raise ValueError(
                f"the data set is split for rank {split.rank} of {split.world_size}, and this is "
                f"{reader}: leave split_dataset_by_node out"
            )
        return cast(Iterable[Any], dataset)
    if reader.world_size == 1:
        return cast(Iterable[Any], dataset)
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(dataset, reader.rank, reader.world_size)
    part.set_epoch(int(getattr(dataset, "epoch", 0)))
    return cast(Iterable[Any], part)


# What divides the shards in a WebDataset by itself.
_SPLITTERS = ("split_by_node", "split_by_worker", "single_node_only", "non_empty")


def _of_webdataset(dataset: Any, reader: Reader) -> Iterable[Any]:
    """A copy whose list of shards is this reader's."""
    first, *stages = dataset.pipeline
    urls = getattr(first, "urls", None)
    if not isinstance(urls, list) or type(first).__name__ != "SimpleShardList":
        raise TypeError(
            "a WebDataset can be divided if it begins with a list of shards, got a "
            f"{type(first).__name__}: pass sharded=True if it gives each rank and worker its own"
        )
    if len(urls) < reader.readers:
        raise ValueError(
            f"a WebDataset of {len(urls)} shards cannot be divided among {reader.readers} ranks "
            "and workers: write more shards, or use fewer workers"
        )
    own = copy.copy(first)
    own.urls = urls[reader.number :: reader.readers]
    part = copy.copy(dataset)
    part.pipeline = [own, *(s for s in stages if getattr(s, "__name__", "") not in _SPLITTERS)]
    return cast(Iterable[Any], part)
