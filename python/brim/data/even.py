"""Equally many batches on all ranks, where each rank reads its own shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from brim import _C
from brim._arguments import flag, shown, whole
from brim._warn import warn
from brim.data.agree import _group_of
from brim.data.mixture import Mixture
from brim.data.ranks import Ranks, process_group
from brim.data.readers import digest
from brim.data.states import check_state
from brim.data.stream_batches import StreamBatches

_END = object()


class _Start(NamedTuple):
    """Where an epoch goes on."""

    steps: int
    total: int | None
    read: int  # batches before the loader's state
    loader: Any  # None: the epoch's beginning


class Even(Iterable[Any]):
    """The batches of a loader, equally many on all ranks; `even` makes it.

    Example:
        >>> from brim.data import pack_stream
        >>> batches = even(pack_stream(["aaa", "b", "cc"], max_total_size=4))
        >>> list(batches), batches.left_out
        ([['aaa'], ['cc', 'b']], 0)
    """

    def __init__(self, loader: Iterable[Any], at_end: str, ahead: int) -> None:
        if isinstance(loader, (str, bytes, Iterator)) or not isinstance(loader, Iterable):
            raise TypeError(f"loader must be iterable, and more than once, got {shown(loader)}")
        if at_end not in ("stop", "repeat"):
            raise ValueError(f'at_end must be "stop" or "repeat", got {shown(at_end)}')
        self.loader = loader
        self._at_end = at_end
        self._ahead = whole("ahead", ahead, 1)
        stream = loader if isinstance(loader, StreamBatches) else getattr(loader, "dataset", None)
        self._stream = stream if isinstance(stream, StreamBatches) else None
        # Without a state that could be saved.
        self._is_plain = not hasattr(loader, "state_dict") and (
            self._stream is None or getattr(loader, "num_workers", 0) > 0
        )
        self._start: _Start | None = None
        self._epoch = self._next_epoch()
        self._steps: _C.EvenSteps | None = None  # of the latest iteration
        self._finished = False
        self._held: deque[Any] = deque()
        self._snapshots: deque[tuple[int, Any]] = deque()  # states of the loader, by batches read
        self._batches: Iterator[Any] = iter(())
        self._exhausted = False
        self._error: Exception | None = None  # of the loader
        self._compared = False
        self.left_out = 0  # batches of the latest epoch that this rank had read, and did not give

    def _next_epoch(self) -> int:
        return 0 if self._stream is None else self._stream.epoch

    def _ranks(self) -> Ranks:
        return process_group() if self._stream is None else self._stream._ranks.now()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; see `StreamBatches.set_epoch`."""
        for each in (self._stream, self.loader):
            if each is not None and hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
                return

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches; ends after the same number of them on all ranks."""
        from brim.dist import _channel

        start, self._start = self._start or _Start(0, None, 0, None), None
        group = _group_of(self._ranks())
        steps = self._steps = _C.EvenSteps(
            None if group is None else _channel(group),
            self._at_end,
            self._ahead,
            start.steps,
            start.total,
        )
        self._held.clear()
        self._snapshots.clear()
        self._snapshots.append((start.read, start.loader))
        self._finished = False
        self.left_out = 0
        if start.loader is None:
            self._epoch = self._next_epoch()
        self._read(steps, drop=start.steps - start.read)
        self._compare(steps)
        while True:
            if self._error is not None and steps.agrees_next:
                steps.fail(f"{type(self._error).__name__}: {self._error}")
                raise self._error
            if not steps.step():
                break
            self._save(steps.batches_read)
            batch = self._held.popleft()
            while len(self._snapshots) > 1 and self._snapshots[1][0] <= steps.steps:
                self._snapshots.popleft()
            yield batch
            self._read(steps)
        self._finish(steps)

    def _begin_anew(self) -> None:
        """Begin the same epoch again."""
        if self._stream is not None:
            self._stream.set_epoch(self._epoch)
        self._batches, self._exhausted = iter(self.loader), False

    def _drop(self) -> None:
        """Pass over a batch that the loop has got before it resumed."""
        batch = next(self._batches, _END)
        if batch is _END and self._at_end == "repeat":
            self._begin_anew()
            batch = next(self._batches, _END)
        if batch is _END:
            raise ValueError("the state is of other samples: the loader has fewer batches here")

    def _read(self, steps: _C.EvenSteps, drop: int | None = None) -> None:
        """Read what is to be read now.

        An error waits until the steps are over that the other ranks count on: they may be in a
        collective of the program, where nothing can be told to them.
        """
        try:
            if drop is not None:
                self._error = None
                self._batches, self._exhausted = iter(self.loader), False
                for _ in range(drop):
                    self._drop()
            for _ in range(steps.to_read if self._error is None else 0):
                if not self._read_one(steps):
                    return
        except Exception as error:
            self._error = error

    def _read_one(self, steps: _C.EvenSteps) -> bool:
        """Read a batch. Returns False if there are no more."""
        batch = next(self._batches, _END)
        if batch is _END:
            self._exhausted = True
            steps.end()
            if steps.to_read == 0:
                return False
            self._begin_anew()
            batch = next(self._batches, _END)
            if batch is _END:
                raise ValueError("the loader gave batches at first, and none when repeated")
        self._held.append(batch)
        steps.read()
        return True

    def _compare(self, steps: _C.EvenSteps) -> None:
        """Tell the core what this rank begins with: ranks that read the same are warned of."""
        if not self._compared and self._held:
            steps.compare(digest([self._held[0]]))

    def _finish(self, steps: _C.EvenSteps) -> None:
        self._finished = True
        if steps.all_begin_alike and not self._compared:
            warn(
                "all ranks begin with the same batch: if they read the same samples, these come "
                'once per rank. sharded="divide" gives each rank its own'
            )
        self._compared = True
        repeated = steps.total is not None and steps.batches_read > steps.total
        if self._at_end == "stop" or not repeated:
            self.left_out = len(self._held)
        self._held.clear()
        if self.left_out > 0 and self._at_end == "stop":
            warn(
                f"another rank has no more batches, so this epoch ends after {steps.steps} steps. "
                f"{self.left_out} batches that this rank has read, and any after them, are left "
                'out; even(at_end="repeat") gives all'
            )
        if steps.steps == 0 and steps.total != 0:
            warn("a rank has no batch at all, so this epoch has no step on any rank")

    def _save(self, read: int) -> None:
        """Note the loader's state now and then: a position is some batches after one."""
        before, state = self._snapshots[-1]
        # An exhausted loader would resume with its next epoch.
        if self._is_plain or self._exhausted or read == before:
            return
        if state is None or read - before >= self._ahead:
            self._snapshots.append((read, self._loader_state()))

    def _loader_state(self) -> Any:
        saved: Any = self.loader if hasattr(self.loader, "state_dict") else self._stream
        return saved.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """This rank's position after the batches that the loop has got, to resume from.

        The loader must be a stream, torchdata's `StatefulDataLoader`, or torch's `DataLoader` of a
        stream without workers. Up to `ahead` batches are read and dropped when it is resumed.
        """
        if self._is_plain:
            raise TypeError(
                f"the position of a {type(self.loader).__name__} with workers cannot be saved: use "
                "torchdata.stateful_dataloader.StatefulDataLoader"
            )
        state: dict[str, Any] = {"format": 1, "ranks": list(self._ranks()), "at_end": self._at_end}
        mixture = self._mixture()
        if mixture is not None:
            state["mixture"] = mixture.state_dict()
        if self._steps is None or self._start is not None:
            start = self._start or _Start(0, None, 0, None)
            epoch = self._epoch if self._start is not None else self._next_epoch()
            return {**state, "epoch": epoch, "finished": False, **start._asdict()}
        steps = self._steps
        read, loader = self._snapshots[0]
        return {
            **state,
            "epoch": self._epoch,
            "finished": self._finished,
            "steps": steps.steps,
            "total": steps.total if self._at_end == "repeat" else None,
            "read": read,
            "loader": loader,
        }

    def _mixture(self) -> Mixture | None:
        iterable = None if self._stream is None else self._stream.iterable
        return iterable if isinstance(iterable, Mixture) else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume where this rank's state was taken.

        Raises:
            ValueError: if it is that of another rank, or of another number of ranks.
        """
        check_state(state, {"ranks", "at_end", "epoch", "finished", *_Start._fields})
        own = self._ranks()
        if tuple(state["ranks"]) != own:
            saved_at = " of ".join(map(shown, state["ranks"]))
            raise ValueError(
                f"state is of rank {saved_at}, and this is rank {own.rank} of "
                f"{own.world_size}: each rank resumes its own shards, with as many ranks as before"
            )
        if state["at_end"] != self._at_end:
            raise ValueError(
                f"state is of another run: its at_end is {state['at_end']!r}, here it is "
                f"{self._at_end!r}"
            )
        mixture = self._mixture()
        if mixture is not None and "mixture" in state:
            mixture.load_state_dict(state["mixture"])
        self._steps = None
        self._epoch = whole("epoch", state["epoch"], 0)
        self._start = None
        if flag("finished", state["finished"]):
            self._epoch += 1
        else:
            total = state["total"]
            self._start = _Start(
                whole("steps", state["steps"], 0),
                None if total is None else whole("total", total, 0),
                whole("read", state["read"], 0),
                state["loader"],
            )
        if self._start is None or self._start.loader is None:
            self.set_epoch(self._epoch)
        else:
            saved: Any = self.loader if hasattr(self.loader, "load_state_dict") else self._stream
            saved.load_state_dict(self._start.loader)


def even(loader: Iterable[Any], *, at_end: str = "stop", ahead: int = 8) -> Even:
    """Give all ranks equally many batches of their loaders, so that no rank waits for ever.

    For streams whose ranks read their own shards (`sharded=`): nobody knows ahead how many batches
    a rank has. Each rank reads up to `ahead` batches before its loop needs them, and once in so
    many steps the ranks tell each other how many they have. Messages go beside the program's
    collectives. All ranks must iterate, and must end the loop early, if at all, after the same
    step. Without a process group the batches are those of the loader.

    Args:
        loader: a stream, or a DataLoader of one; anything that gives batches each time it is
            iterated over.
        at_end: `"stop"`: all ranks stop after the last batch of the one that has fewest; what the
            others have left is left out of the epoch, with a warning. `"repeat"`: ranks that have
            fewer begin their epoch anew, until the one with the most is at its end: each sample
            comes at least once.
        ahead: the most steps from one message to the next; about as many batches are held.

    Returns:
        An iterable of batches, with `state_dict` and `load_state_dict` for this rank's position,
        `set_epoch`, and `left_out`, the number of batches left out that had been read.

    Example:
        >>> from brim.data import Shards, pack_stream
        >>> stream = pack_stream(Shards([3, 2], open=range), 2, sizeof=abs, sharded="divide")
        >>> len(list(even(stream)))
        3
    """
    return Even(loader, at_end, ahead)
