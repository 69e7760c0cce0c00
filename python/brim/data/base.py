"""What the batch samplers of `brim.data` have in common."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import Sampler

from brim import _C
from brim._arguments import flag, whole

Batch = list[int]


class Plan(NamedTuple):
    """All batches of one rank: batch b is `indices[offsets[b]:offsets[b + 1]]`."""

    offsets: torch.Tensor
    indices: torch.Tensor


class Start(NamedTuple):
    """Where an iteration begins: an epoch's seed, and a place in it."""

    seed: int
    cursor: list[int]
    segments: list[list[int]]


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from a generator, torch's own where there is none."""
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    return int(drawn.item())


def warn(message: str) -> None:
    """A warning that names the caller's line, however deep inside brim it arises."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] == "brim":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def warn_of_left_out(left_out: Mapping[str, torch.Tensor], samples: int) -> None:
    """Say which samples will be in no batch."""
    for reason, indices in left_out.items():
        first = ", ".join(str(index) for index in indices[:5].tolist())
        more = ", …" if len(indices) > 5 else ""
        warn(f"{len(indices)} of {samples} samples are left out, {reason}: {first}{more}")


class Opened(NamedTuple):
    """An iterator, and what it reads; `batching` is None where only Python knows."""

    iterator: Any
    batching: _C.SampleBatching | None
    start: Start


def _shared_out_by_accelerate() -> bool:
    """Whether whoever asks for batches is a part of accelerate that gives each process some."""
    frame = sys._getframe(2)
    for _ in range(16):
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            asking = type(frame.f_locals.get("self")).__name__
            if asking in ("BatchSamplerShard", "DataLoaderDispatcher"):
                return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


class BatchSamplerBase(Sampler[Batch]):
    """Iterates over the batches of a C++ batching; resumes, shards and reports.

    Subclasses call `_set_up` and say in `_make` what is iterated over. May be pickled and copied
    wherever what it was given can be; a copy begins with the coming epoch, or where one was loaded
    that has not begun.
    """

    _batching: _C.SampleBatching | None = None

    def _set_up(
        self,
        *,
        shuffle: bool,
        seed: int | None,
        generator: torch.Generator | None,
        rank: int,
        world_size: int,
        as_tensors: bool,
        counts_epochs: bool = False,
    ) -> None:
        self.shuffle = flag("shuffle", shuffle)
        if seed is not None and generator is not None:
            raise ValueError("give either seed or generator, not both")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r:.100}")
        self._seed = None if seed is None else whole("seed", seed, 0)
        self.generator = generator
        self.world_size = whole("world_size", world_size, 1)
        self.rank = whole("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank must be from 0 to world_size - 1 = {self.world_size - 1}, got {self.rank}"
            )
        self.as_tensors = flag("as_tensors", as_tensors)
        if self.shuffle and self._seed is None and self.world_size > 1:
            raise ValueError("seed must be given when world_size > 1: ranks must shuffle alike")
        self.epoch = 0
        self._counts_epochs = counts_epochs
        # Of the coming epoch, where seeds are drawn, and where it was drawn from.
        self._drawn: tuple[int, torch.Generator | None] | None = None
        self._start: Start | None = None  # where a resumed epoch goes on
        self._resumed: Iterator[Any] | None = None  # the same, opened
        self._latest: Any = None
        self._opened: list[Opened] = []  # of the coming epoch
        self._running: Opened | None = None  # the last that has begun
        self._counted: tuple[object, int] | None = None
        self._told_of_accelerate = False

    def __getstate__(self) -> dict[str, Any]:
        """All but what C++ made, which is made again when it is needed."""
        self._settle()
        made = ("_batching", "_resumed", "_latest", "_counted", "_running")
        return {**self.__dict__, **dict.fromkeys(made), "_opened": []}

    # ---- epochs ----------------------------------------------------------------------------

    @property
    def sampler(self) -> Any:
        """This sampler: Lightning and accelerate call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is: with `seed`, each is shuffled in its own way.

        A position that was loaded stays where it is of this epoch, and is dropped otherwise.
        """
        epoch = whole("epoch", epoch, 0)
        self._settle()
        self._running = None
        if epoch != self.epoch:
            self._start = self._resumed = None
            self._opened = []
        self.epoch = epoch

    def _settle(self) -> None:
        """Once an iteration has begun, the coming one is the next.

        Not when its iterator is made: a DataLoader with workers makes two, and uses the second.
        """
        begun = [opened for opened in self._opened if opened.iterator.begun()]
        if begun:
            self._running = begun[-1]
            self._opened = []
            self._forget()

    def _forget(self) -> None:
        self._start = self._drawn = self._resumed = None
        if self._counts_epochs:
            self.epoch += 1

    def _in_use(self) -> Opened | None:
        """The iteration that has begun, for as long as a loop or a loader holds its iterator.

        That it has ended says nothing: a DataLoader's workers fetch ahead.
        """
        if self._running is None:
            return None
        ours = 2 + (self._latest is self._running.iterator)  # the tuple's and the argument's
        return self._running if sys.getrefcount(self._running.iterator) > ours else None

    def _coming_seed(self) -> int:
        if not self.shuffle:
            return 0
        if self._seed is not None:
            return _C.epoch_seed(self._seed, self.epoch)
        # accelerate puts a generator in place that its processes share.
        if self._drawn is None or self._drawn[1] is not self.generator:
            self._drawn = draw_seed(self.generator), self.generator
        return self._drawn[0]

    def _coming(self) -> Start:
        self._settle()
        return self._start or Start(self._coming_seed(), [], [])

    @abstractmethod
    def _make(self) -> _C.SampleBatching: ...

    def _ready(self) -> _C.SampleBatching:
        self._settle()
        if self._batching is None:
            self._batching = self._make()
        return self._batching

    # ---- batches ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches as lists of indices, or as tensors with `as_tensors=True`."""
        if self.world_size > 1 and not self._told_of_accelerate and _shared_out_by_accelerate():
            self._told_of_accelerate = True
            warn(
                f"accelerate shares batches out among its processes, and these are already rank "
                f"{self.rank}'s of {self.world_size} alone: most samples are in no batch. Leave "
                "rank= and world_size= out, or do not pass the loader to prepare()"
            )
        start = self._coming()
        iterator, self._resumed = self._resumed or self._open(start), None
        self._latest = iterator
        # With the table made, the place may have become one in it.
        start = start if self._batching is None else self._coming()
        self._opened.append(Opened(iterator, self._batching, start))
        return iterator

    def _open(self, start: Start) -> Iterator[Batch]:
        return cast(
            "Iterator[Batch]",
            self._ready().iterate(
                start.seed,
                self.rank,
                self.world_size,
                self.as_tensors,
                start.cursor,
                start.segments,
                self._description(start.seed),
            ),
        )

    def __len__(self) -> int:
        """The exact number of batches on this rank: of the iteration that runs, else of the next.

        One runs for as long as its iterator is held, by a loop or a DataLoader.
        """
        self._settle()
        running = self._in_use()
        if running is not None and running.batching is not None:
            batching, start = running.batching, running.start
        else:
            batching = self._ready()
            start = self._coming()
        # The batching itself, not its id: one that is gone leaves its id to the next.
        key = (start.seed, tuple(start.cursor), str(start.segments), batching)
        if self._counted is None or self._counted[0] != key:
            count = batching.count(
                start.seed, self.rank, self.world_size, start.cursor, start.segments
            )
            self._counted = (key, count)
        return self._counted[1]

    def plan(self) -> Plan:
        """All batches of the next iteration on this rank, as two tensors."""
        batching = self._ready()
        start = self._coming()
        return Plan(
            *batching.plan(start.seed, self.rank, self.world_size, start.cursor, start.segments)
        )

    def report(self) -> _C.PlanReport:
        """What becomes of the samples in the coming iteration, over all ranks. Print it.

        After `load_state_dict` that is what is left of the epoch.
        """
        batching = self._ready()
        start = self._coming()
        return batching.report(start.seed, self.world_size, start.cursor, start.segments)

    # ---- saving and resuming ---------------------------------------------------------------

    def _description(self, seed: int) -> dict[str, Any]:
        return {
            "format": 1,
            "sampler": type(self).__name__,
            "samples": self._sample_count(),
            "settings": self._settings(),
            "epoch": self.epoch,
            "seed": seed,
        }

    def _settings(self) -> dict[str, Any]:
        """What batches depend on beside samples and ranks: a place among others means nothing."""
        return {"shuffle": self.shuffle}

    def _sample_count(self) -> int:
        return self._ready().samples

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where the latest iteration stands, to go on from there later; plain numbers and lists.

        The state is the same on every rank, and may be loaded with another number of ranks.

        Args:
            batches: how many batches of that iteration are done. All that were given where None,
                which is too many with a DataLoader that has workers: they fetch ahead.
        """
        self._settle()
        if self._latest is None or self._start is not None:
            if batches is not None and whole("batches", batches, 0) > 0:
                raise ValueError(f"batches must be 0 before an iteration begins, got {batches}")
            start = self._coming()
            return {
                **self._description(start.seed),
                "finished": False,
                "cursor": list(start.cursor),
                "segments": list(start.segments),
            }
        state: dict[str, Any] = self._latest.state_dict(batches)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on where the one stood that the state was taken from.

        `len` is then what is left. Costs as much as a few batches, however far it stood.

        Raises:
            ValueError: if the state is of another sampler, other samples, or other settings that
                batches depend on.
        """
        wanted = {"format", "sampler", "samples", "settings", "epoch", "seed", "finished"}
        wanted |= {"cursor", "segments"}
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be what state_dict() gave, got {state!r:.100}")
        missing = wanted - set(state)
        if missing:
            raise ValueError(f"state is no state of a batch sampler: it lacks {sorted(missing)}")
        own = self._description(0)
        theirs = {**state, **state["settings"]}
        for key in ("format", "sampler", "samples", *own["settings"]):
            here = {**own, **own["settings"]}[key]
            there = theirs.get(key)
            # A sampler without a length does not know how many there are (-1) until it was read.
            unknown = key == "samples" and -1 in (there, here)
            if there != here and not unknown:
                raise ValueError(
                    f"state is of another run: its {key} is {there!r}, here it is {here!r}"
                )
        epoch = whole("epoch", state["epoch"], 0)
        seed = whole("seed", state["seed"], 0, below=2**64)
        cursor = [whole("cursor", word, 0) for word in state["cursor"]]
        start = Start(seed, cursor, list(state["segments"]))
        finished = flag("finished", state["finished"])
        # Opened first, so that a wrong state changes nothing.
        kept, self.epoch = self.epoch, epoch
        try:
            resumed = None if finished else self._open(start)
        except Exception:
            self.epoch = kept
            raise
        if finished and self._counts_epochs:
            self.epoch += 1
        self._drawn = self._latest = self._running = None
        self._opened = []
        self._resumed = resumed
        self._start = None if resumed is None else start
