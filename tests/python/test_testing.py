"""brim.testing: out of memory on demand."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import brim


def attempts(count: int) -> str:
    """An x for each allocation that fails, a dot for one that does not."""
    result = ""
    for _ in range(count):
        try:
            torch.empty(10)
            result += "."
        except torch.OutOfMemoryError:
            result += "x"
    return result


@given(st.integers(1, 12), st.integers(1, 12))
def test_fails_from_at_on_and_count_times(at: int, count: int) -> None:
    with brim.testing.inject_oom(at=at, count=count) as injector:
        seen = attempts(15)
    expected = "".join("x" if at <= i < at + count else "." for i in range(1, 16))
    assert seen == expected
    assert injector.allocations == 15
    assert injector.failures == expected.count("x")


def test_the_first_allocation_is_the_default() -> None:
    with brim.testing.inject_oom():
        assert attempts(3) == "x.."


def test_can_fail_for_ever() -> None:
    with brim.testing.inject_oom(at=2, count=2**63 - 1):
        assert attempts(4) == ".xxx"


def test_ends_with_the_block_also_when_an_exception_passes() -> None:
    injector = brim.testing.inject_oom(at=1, count=100)
    with pytest.raises(torch.OutOfMemoryError), injector:
        torch.empty(10)
    assert attempts(3) == "..."
    assert (injector.allocations, injector.failures) == (1, 1)


def test_nests_and_each_counts_every_allocation() -> None:
    with brim.testing.inject_oom(at=4) as outer:
        assert attempts(1) == "."
        with brim.testing.inject_oom(at=2) as inner:
            assert attempts(2) == ".x"
        assert attempts(2) == "x."
    assert (outer.allocations, outer.failures) == (5, 1)
    assert (inner.allocations, inner.failures) == (2, 1)


def test_counting_starts_at_the_block_and_anew_each_time() -> None:
    injector = brim.testing.inject_oom(at=2)
    assert (injector.allocations, injector.failures) == (0, 0)
    assert attempts(5) == "....."
    for _ in range(2):
        with injector:
            assert attempts(3) == ".x."
        assert injector.allocations == 3


def test_making_one_without_opening_it_fails_nothing() -> None:
    stop = threading.Event()

    def make_many() -> None:
        while not stop.is_set():
            brim.testing.inject_oom(at=1, count=10)

    thread = threading.Thread(target=make_many)
    thread.start()
    try:
        assert "x" not in attempts(2000)
    finally:
        stop.set()
        thread.join()


def test_counts_all_threads() -> None:
    failures: list[str] = []
    with brim.testing.inject_oom(at=21, count=10) as injector:
        threads = [threading.Thread(target=lambda: failures.append(attempts(20))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert injector.allocations == 80
    assert "".join(failures).count("x") == injector.failures == 10


def test_the_error_says_that_it_was_injected() -> None:
    with (
        brim.testing.inject_oom(),
        pytest.raises(torch.OutOfMemoryError, match="injected by brim::testing::OomInjector"),
    ):
        torch.empty(10)


def test_cannot_be_opened_twice_at_once_nor_closed_before() -> None:
    injector = brim.testing.inject_oom(at=100)
    with pytest.raises(RuntimeError, match="not open"):
        injector.__exit__(None, None, None)
    with injector, pytest.raises(RuntimeError, match="open already"), injector:
        pass


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"at": 0}, ValueError, "at must be 1 or more"),
        ({"at": -3}, ValueError, "at must be 1 or more.*-3"),
        ({"at": 2**64}, ValueError, "at must fit 64 bits"),
        ({"at": 1.5}, TypeError, "at must be an int, got 1.5"),
        ({"at": "1"}, TypeError, "at must be an int"),
        ({"at": None}, TypeError, "at must be an int"),
        ({"at": True}, TypeError, "at must be an int"),
        ({"count": 0}, ValueError, "count must be 1 or more, got 0"),
        ({"count": -(2**63)}, ValueError, "count must be 1 or more"),
        ({"count": 2.0}, TypeError, "count must be an int"),
        ({"device": "mps:0"}, ValueError, "device must be cpu or cuda, got mps:0"),
        ({"device": "nonsense"}, ValueError, "device must be a string such as"),
        ({"device": 1.5}, TypeError, "device must be"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        brim.testing.inject_oom(**arguments)  # type: ignore[arg-type]
