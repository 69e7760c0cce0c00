"""Ranks of which one gives up while they connect, while they wait for each other, or fit."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import brim
from brim.data import agree
from brim.data.ranks import Ranks
from brim.dist import RankSetting, _channel

from .interrupt_ranks import TIMEOUT, Rank, threads_as_processes
from .patience import FOR_EVER


@pytest.fixture(autouse=True)
def counted_by_thread() -> Iterator[None]:
    threads_as_processes.begin()
    yield
    threads_as_processes.end()


def on_two_ranks(work: Callable[[int], Any], store: Any = None) -> list[Any]:
    """What each returned, or the error that left it."""
    store, found = store or dist.HashStore(), [None, None]
    both_are_connected = threading.Barrier(2, timeout=FOR_EVER)

    def run(rank: int) -> None:
        try:
            own = Rank(store, rank)
            both_are_connected.wait()
            with own.in_its_world():
                found[rank] = work(rank)
        except BaseException as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def most(rank: int, error: Exception | None = None) -> int:
    with agree.measured_together(Ranks(rank, 2), alone=False) as together:
        assert together is not None
        together.same("fit")
        if error is not None:
            raise error
        return together.least(10 + rank)


def test_ranks_that_did_not_connect_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = threading.Event()

    def work(rank: int) -> bool:
        setting = RankSetting(True)
        if rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr("brim.dist._channel", mock.Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    setting()
            interrupted.set()
        assert interrupted.wait(FOR_EVER)
        return setting() is not None

    assert on_two_ranks(work) == [True, True]


def test_ctrl_c_while_ranks_connect_loses_no_connection() -> None:
    store, connects, of_rank_0 = dist.HashStore(), threading.Event(), []

    def work(rank: int) -> int:
        if rank == 0:
            of_rank_0.extend([threading.get_ident(), store.num_keys()])
            connects.set()
            with pytest.raises(KeyboardInterrupt):
                _channel(dist.group.WORLD)
        else:
            assert connects.wait(FOR_EVER)
            while store.num_keys() == of_rank_0[1]:  # then rank 0 waits in gloo, for this one
                time.sleep(0.001)
            interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
            interrupt(ctypes.c_ulong(of_rank_0[0]), ctypes.py_object(KeyboardInterrupt))
            _channel(dist.group.WORLD)
        return most(rank)

    assert on_two_ranks(work, store) == [10, 10]


def no_patience(monkeypatch: pytest.MonkeyPatch) -> str:
    timeouts = iter([timedelta(0)])
    monkeypatch.setattr("brim.dist._timeout", lambda _: next(timeouts, TIMEOUT))
    return "RankError: fit waits for the other ranks: 1 of 2 have called it"


def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> str:
    errors = iter([KeyboardInterrupt("in the wait")])
    usual = agree.time

    def sleep(seconds: float) -> None:
        for error in errors:
            raise error
        usual.sleep(seconds)

    monkeypatch.setattr(agree, "time", SimpleNamespace(monotonic=usual.monotonic, sleep=sleep))
    return "KeyboardInterrupt: in the wait"


@pytest.mark.parametrize("cause", [no_patience, ctrl_c])
def test_who_gives_up_waiting_leaves_no_other_waiting(
    cause: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = cause(monkeypatch)
    kind, _, says = text.partition(": ")
    gave_up = threading.Event()

    def work(rank: int) -> int:
        if rank == 0:
            with pytest.raises((brim.RankError, KeyboardInterrupt), match=says) as caught:
                most(rank)
            assert caught.type.__name__ == kind
            gave_up.set()
        else:
            assert gave_up.wait(FOR_EVER)
            with pytest.raises(brim.RankError, match=f"rank 0 left fit ahead .*{text}"):
                most(rank)
        return most(rank)

    assert on_two_ranks(work) == [10, 10]


def test_any_text_of_an_error_reaches_the_others() -> None:
    def work(rank: int) -> str:
        with pytest.raises((brim.RankError, ValueError)) as caught:
            most(rank, ValueError("a file \ud800" + "x" * 10**7) if rank == 0 else None)
        return f"{caught.type.__name__} {caught.value}"[:70]

    assert on_two_ranks(work) == [
        "ValueError a file \ud800" + "x" * 51,
        r"RankError rank 0 failed in fit: ValueError: a file \ud800" + "x" * 13,
    ]


def test_an_error_leaves_a_fit_also_where_the_store_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: object) -> str:
        raise dist.DistNetworkError("the store is gone")

    says = no_patience(monkeypatch).partition(": ")[2]
    monkeypatch.setattr(agree, "_settled", gone)
    error, _ = on_two_ranks(lambda rank: most(rank) if rank == 0 else None)
    assert isinstance(error, brim.RankError)
    assert str(error).startswith(says)
