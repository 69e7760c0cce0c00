"""Two ranks in one process, of which one is interrupted; the other is a thread.

Both make the same call. Whatever ends a call of rank 0, rank 1 goes on to its next one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import brim
from brim.data import agree
from brim.dist import _channels

from .interrupts import Case

TIMEOUT = timedelta(minutes=20)  # longer than any pause between two calls of rank 0


class OfThread(threading.local):
    """What a process has one of, for each thread that has set it."""

    value: Any = None


class Worlds:
    """Stands for torch's list of process groups: the thread's own, else the process's."""

    def __init__(self, usual: Any) -> None:
        vars(self).update(usual=usual, own=OfThread())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own.value or self.usual, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.own.value or self.usual, name, value)


class Counters:
    """Stands for a counter of the process."""

    def __init__(self) -> None:
        self._own = OfThread()

    def _counter(self) -> Counter[Any]:
        self._own.value = self._own.value or Counter()
        return self._own.value  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> int:
        return self._counter()[key]

    def __setitem__(self, key: Any, value: int) -> None:
        self._counter()[key] = value


class Rank:
    """One of the two: its process group, which is the default one of its thread for a while."""

    def __init__(self, store: Any, rank: int) -> None:
        gloo = distributed_c10d.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, 2, TIMEOUT)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, 2)
        self.group._set_default_backend(kind)
        self.group._register_backend(torch.device("cpu"), kind, gloo)
        self.group._set_group_name("two ranks")
        self._world = SimpleNamespace(  # with what any release of torch asks for
            default_pg=self.group,
            pg_map={self.group: ("gloo", store)},
            pg_names={self.group: "two ranks"},
            pg_group_ranks={self.group: {0: 0, 1: 1}},
            pg_backend_config={self.group: "cpu:gloo"},
            group_count=0,
            tags_to_pg={},
            pg_to_tag={},
            pg_coalesce_state={},
            comms=[],
        )

    @contextlib.contextmanager
    def in_its_world(self) -> Iterator[None]:
        if not isinstance(distributed_c10d._world, Worlds):
            distributed_c10d._world = Worlds(distributed_c10d._world)
        own = distributed_c10d._world.own
        own.value = self._world
        try:
            yield
        finally:
            own.value = None


Make = Callable[[Any, int], Callable[[], Any]]


class Pair:
    """Rank 0, which is this thread, and rank 1."""

    def __init__(self, make: Make, wrong: list[str]) -> None:
        self._make, self._wrong = make, wrong
        self._ended = threading.Event()
        store = dist.HashStore()
        self._other = threading.Thread(target=self._run_other, args=(store,), daemon=True)
        self._other.start()
        self._rank = Rank(store, 0)
        self._call = make(self._rank.group, 0)

    def __call__(self) -> Any:
        with self._rank.in_its_world():
            return self._call()

    def _run_other(self, store: Any) -> None:
        try:
            rank = Rank(store, 1)
            call = self._make(rank.group, 1)
            with rank.in_its_world():
                while not self._ended.is_set():
                    with contextlib.suppress(brim.RankError):
                        call()
        except BaseException as error:
            if not self._ended.is_set():
                self._wrong.append(f"{type(error).__name__}: {error}")

    def end(self) -> None:
        """What the end of rank 0's process does: rank 1 must notice."""
        self._ended.set()
        stop = ctypes.pythonapi.PyThreadState_SetAsyncExc  # where it does not wait for rank 0
        stop(ctypes.c_ulong(self._other.ident or 0), ctypes.py_object(SystemExit))
        group = self._rank.group
        dist.PrefixStore("brim", group.get_group_store()).set("left/0", "1")  # else it waits 3 s
        if group in _channels:
            _channels[group].close()
        del self._rank, self._call, group
        gc.unfreeze()  # pytest and the proof freeze what was there first
        gc.collect()
        self._other.join(20)
        if self._other.is_alive():
            self._wrong.append("rank 1 waits for rank 0, which has ended")


class ThreadsAsProcesses:
    """While cases are alive: agreements between processes count threads, and are quick."""

    def __init__(self) -> None:
        self._cases = 0
        self._replaced = contextlib.ExitStack()

    def begin(self) -> None:
        self._cases += 1
        if self._cases == 1:
            for name, value in (
                ("_SLOW", TIMEOUT.total_seconds()),
                ("_PATIENCE", 0.02),  # with a rank that was interrupted
                ("_compared", Counters()),
                ("_fits", Counters()),
            ):
                self._replaced.enter_context(mock.patch.object(agree, name, value))

    def end(self) -> None:
        self._cases -= 1
        if self._cases == 0:
            self._replaced.close()


threads_as_processes = ThreadsAsProcesses()


def of_two_ranks(make: Make) -> Case:
    """A case whose call another rank makes too.

    Args:
        make: called with the process group and the rank; returns the call of that rank.
    """
    wrong: list[str] = []
    threads_as_processes.begin()
    pair = Pair(make, wrong)

    def end() -> None:
        pair.end()
        threads_as_processes.end()

    made = Case(pair, leaves=lambda: {"errors of rank 1": list(wrong)})
    ended = weakref.finalize(made, end)
    atexit.register(ended)  # ahead of brim's, which closes the channels
    return made
