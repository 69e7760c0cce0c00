"""Signals get through long calls of samplers, which then go on where they stood."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from brim.data import PackedBatchSampler, pack_stream


class Interruption(Exception):  # noqa: N818
    """What the handler raises."""


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """A function: a little after it was called, a signal comes. No thread is needed for that."""

    def raise_it(*_: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, raise_it)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.01) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_a_long_block_and_nothing_is_lost(interrupt: Callable[[], None]) -> None:
    sizes = torch.randint(1, 200, (6_000_000,), dtype=torch.uint8)
    sampler = PackedBatchSampler(sizes, 512, cost="sum", window=None, as_tensors=True)
    iterator = iter(sampler)
    with pytest.raises(Interruption):  # noqa: PT012
        interrupt()
        next(iterator)
    assert not sampler._latest.begun(), "it came only when the call was done"
    count = torch.zeros(len(sizes), dtype=torch.int8)
    for batch in itertools.islice(iterator, 1000):
        count[batch] += 1
    assert int(count.max()) == 1
    assert iterator.state_dict()["cursor"] == [0]  # type: ignore[attr-defined]


def test_a_signal_ends_a_stream_that_runs_no_python_code(interrupt: Callable[[], None]) -> None:
    stream = pack_stream(itertools.repeat(""), 10)  # nothing ever fills a batch
    with pytest.raises(Interruption):  # noqa: PT012
        interrupt()
        next(iter(stream))
