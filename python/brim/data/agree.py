"""What ranks tell each other about their batches: one fit for all, and the same samples and epochs.

Samplers compute the batches of all ranks on each of them, and communicate for these two only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import PurePath
from traceback import walk_stack
from typing import Any

import torch

from brim import _C
from brim._state.undoing import Undoing, set_variable
from brim.data.ranks import Ranks, process_group

_logger = logging.getLogger("brim")

# Seconds. Ranks that begin an epoch together come within one or two. A rank that iterates alone,
# to look at its batches, waits so long once.
_PATIENCE = 10.0
_SLOW = 30.0  # after which a rank that waits for others says so


def _group_of(ranks: Ranks) -> Any:
    """The process group whose ranks these are; None for one rank, and for others than its own."""
    if ranks.world_size == 1 or ranks != process_group():
        return None
    if torch.distributed.get_backend() == "fake":  # of tests; its store keeps nothing
        return None
    return torch.distributed.group.WORLD


def _store_of(group: Any) -> Any:
    from torch.distributed.distributed_c10d import PrefixStore

    # The store of torchrun outlives its workers: what those of an earlier attempt said is not
    # what these say.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"brim/data/{attempt}", group.get_group_store())


# ---- fit ---------------------------------------------------------------------------------------

_fits = Counter[str]()  # of this process


@contextlib.contextmanager
def measured_together(ranks: Ranks, *, alone: bool) -> Iterator[_C.FitRanks | None]:
    """The ranks that measure together; None for one, or if nothing is measured (`alone`).

    An error inside becomes a RankError on the others, and so does Ctrl-C.
    """
    group = None if alone else _group_of(ranks)
    if group is None:
        yield None
        return
    from brim.dist import _channel

    store, number, together = _store_of(group), _fits["fit"], None
    try:
        with Undoing() as undo:
            undo.callback(functools.partial(_fits.__setitem__, "fit", number + 1))
            _wait_for_all(group, store, number)
            together = _C.FitRanks(_channel(group))
            yield together
            together.end_with_next()
            together.same("the end")  # until then an error here can be told to the others
    except BaseException as error:
        if _fits["fit"] > number:  # else the others still wait for this rank, which comes again
            why = _text_of(error)
            left = f"rank {group.rank()} left fit ahead of the others: {why}"
            with contextlib.suppress(torch.distributed.DistError):  # who had the store is gone
                if together is not None or _settled(store, number, left) == _ALL_HERE:
                    (together or _C.FitRanks(_channel(group))).fail(why)
        raise


def _text_of(error: BaseException) -> str:
    """As the other ranks get it: what cannot be sent is escaped, and it has an end."""
    text = f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace").decode()[:10_000]


_ALL_HERE = "all are here"


def _settled(store: Any, number: int, outcome: str) -> str:
    """How the wait for all ranks ended: as the first of them says that comes here."""
    said: bytes = store.compare_set(f"fit/{number}/ended", "", outcome)
    return said.decode()


def _wait_for_all(group: Any, store: Any, number: int) -> None:
    """Wait until all ranks have called `fit`, and say so if that takes long.

    A rank that gives up meanwhile ends the wait of all.
    """
    from brim.dist import _timeout

    places = [f"fit/{number}/{rank}" for rank in range(group.size())]
    store.set(places[group.rank()], "there")
    begin = time.monotonic()
    end = begin + _timeout(group).total_seconds()
    slow = min(begin + _SLOW, end)
    pause = 0.002
    while not store.check(places) and not store.check([f"fit/{number}/ended"]):
        now = time.monotonic()
        if now > slow:
            there = sum(store.check([place]) for place in places)
            advice = (
                f"fit waits for the other ranks: {there} of {group.size()} have called it. All "
                "must, with the same samples and options; pass rank=0 and world_size=1 to measure "
                "on one rank alone"
            )
            if now > end:
                raise _C.RankError(advice)
            _logger.warning(advice)
            slow = end
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    outcome = _settled(store, number, _ALL_HERE)
    if outcome != _ALL_HERE:
        raise _C.RankError(outcome)


@contextlib.contextmanager
def agreed_most(ranks: Any, what: str, options: str) -> Iterator[Callable[[int], int]]:
    """A function that returns the largest number that any of the ranks passes to it, in one call.

    An error ahead of it, or Ctrl-C, becomes a RankError on the others. `what` and `options` must be
    the same.
    """
    from brim.dist import RankSetting, _channel

    setting = None if ranks is False else RankSetting(ranks)
    if setting is None or setting() is None:
        yield lambda number: number
        return
    together = _C.FitRanks(_channel(setting.group), what)
    try:
        together.same(options)
        together.end_with_next()
        yield lambda number: -together.least(-number)
    except BaseException as error:
        together.fail(_text_of(error))
        raise


# ---- what samplers have in common ----------------------------------------------------------------


def fingerprint_of(sampler: Any) -> int | None:
    """A number made of the sizes of all samples, by which other data is recognised."""
    if sampler._data is None:
        tensors = {id(each): each for each in sampler._data_tensors()}.values()
        numbers = [sampler._fingerprint(each) for each in tensors]
        sampler._data = zlib.crc32(repr(numbers).encode()) if numbers else None
    found: int | None = sampler._data
    return found


def facts_of(sampler: Any, start: Any) -> dict[str, Any]:
    """What must be the same on all ranks for an iteration of the sampler from `start` on."""
    facts = {
        "sampler": type(sampler).__name__,
        "samples": sampler._sample_count(),
        "sizes": None if (sizes := fingerprint_of(sampler)) is None else f"#{sizes:08x}",
        **{name: _in_short(value) for name, value in sampler._settings().items()},
        "seed": start.seed,
        "position": _in_short([start.cursor, start.segments]),
    }
    if sampler._epoch_decides():
        facts["epoch"] = sampler.epoch
    order = sampler._order_of_epoch()
    if order is not None:
        facts["order"] = f"#{_C.fingerprint(order):016x}"
    return facts


def _in_short(value: object) -> str:
    """As text of a few words; a number stands for a longer one."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({zlib.crc32(text.encode()):08x})"


# ---- iterations --------------------------------------------------------------------------------

_compared = Counter[int]()  # samplers of this process, by the place where they were made


_apart = ContextVar("brim_ranks_apart", default=False)


def apart(undo: Undoing) -> None:
    """Until the block ends, ranks iterate over batches of their own: each finds its own size."""
    set_variable(undo, _apart, True)


class Comparison:
    """Compares what this rank iterates over with what the other ranks do.

    Through the process group's store, not by a collective: a rank that iterates alone, as to look
    at a batch, must not wait for ever. It waits for `_PATIENCE` seconds, once; from then on it only
    looks at what others have said so far. The same again, as in each epoch of a sampler that does
    not shuffle, is not compared again.

    Samplers of different ranks belong together if they were made at the same place of the program.
    """

    def __init__(self) -> None:
        frames = [frame for frame, _ in walk_stack(sys._getframe(1))]
        own = __name__.partition(".")[0]
        lines = [
            (PurePath(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno)
            for frame in frames
            if str(frame.f_globals.get("__name__")).partition(".")[0] != own
        ]
        self._place = zlib.crc32(repr(lines).encode())
        self._name: str | None = None
        self._said: list[str] = []  # what this rank has said, in turn
        self._open: list[int] = []  # the turns for which some rank has not come yet
        self._patient = True

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another sampler, made at the same place."""
        return {"_place": self._place, "_name": None, "_said": [], "_open": [], "_patient": True}

    def check(self, ranks: Ranks, facts: dict[str, Any]) -> None:
        """Compare the facts of the iteration that begins.

        Raises:
            brim.RankError: on all ranks, if those of one differ.
        """
        group = None if _apart.get() else _group_of(ranks)
        if group is None:
            return
        said = json.dumps(facts)
        again = self._said[-1:] == [said]
        if again and not self._open:
            return
        try:
            self._exchange(_store_of(group), ranks, None if again else said)
        except torch.distributed.DistError as error:
            # The process that had the store has ended. That is no reason for this one to end.
            _logger.info("ranks are not compared any more: %s", error)

    def _exchange(self, store: Any, ranks: Ranks, said: str | None) -> None:
        if self._name is None:
            self._name = f"{self._place:08x}/{_compared[self._place]}"
            _compared[self._place] += 1
        if said is not None:
            turn = len(self._said)
            self._said.append(said)
            self._open.append(turn)
            mine = f"{ranks.rank} {said}"
            first = store.compare_set(f"{self._name}/{turn}/first", "", mine).decode()
            if first.partition(" ")[2] != said:
                store.set(f"{self._name}/{turn}/other", mine)
            store.add(f"{self._name}/{turn}/there", 1)
            self._wait(store, turn, ranks.world_size)
        for turn in list(self._open):
            key = f"{self._name}/{turn}/"
            if store.check([key + "other"]):
                raise _C.RankError(_difference(store.get(key + "first"), store.get(key + "other")))
            if store.add(key + "there", 0) >= ranks.world_size:
                self._open.remove(turn)

    def _wait(self, store: Any, turn: int, count: int) -> None:
        end = time.monotonic() + _PATIENCE
        pause = 0.001
        while self._patient and store.add(f"{self._name}/{turn}/there", 0) < count:
            if time.monotonic() > end:
                self._patient = False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _difference(first: bytes, other: bytes) -> str:
    """One sentence about what two ranks said."""
    (rank, said), (other_rank, other_said) = (
        text.decode().split(" ", 1) for text in (first, other)
    )
    here, there = json.loads(said), json.loads(other_said)
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    told = [", ".join(f"{name} {facts.get(name)}" for name in names[:4]) for facts in (here, there)]
    advice = (
        "call set_epoch(epoch) on all ranks before each epoch, and resume all from the same state"
        if set(names) <= {"epoch", "seed", "position"}
        else "give all ranks the same samples and options"
    )
    return (
        f"ranks iterate over different batches, so samples would be missing or used twice: rank "
        f"{rank} has {told[0]}; rank {other_rank} has {told[1]}. {advice[0].upper()}{advice[1:]}"
    )
