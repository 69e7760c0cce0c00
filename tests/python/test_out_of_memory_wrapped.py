"""Out of memory that arrives inside another exception."""

from __future__ import annotations

import builtins
import sys

import pytest
import torch

import brim

MIB = 2**20
ROOM = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a total capacity of 79.10 GiB."

needs_groups = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="exception groups came with Python 3.11"
)


def wrapped(outer: BaseException, inner: BaseException) -> BaseException:
    """As `raise outer from inner` makes it."""
    outer.__cause__ = inner
    return outer


def test_what_a_runtime_error_was_raised_from_counts() -> None:
    step = wrapped(RuntimeError("the step failed"), torch.OutOfMemoryError(ROOM))
    assert brim.classify_error(step).requested == 2 * MIB
    assert brim.is_out_of_memory(wrapped(RuntimeError("epoch 3"), step))
    circle = RuntimeError("a circle")
    assert not brim.is_out_of_memory(wrapped(circle, wrapped(RuntimeError("of two"), circle)))


@pytest.mark.parametrize(
    "error",
    [
        wrapped(RuntimeError("the step failed"), KeyError("x")),
        wrapped(ValueError("batch_size is too large"), torch.OutOfMemoryError(ROOM)),
        wrapped(KeyboardInterrupt(), torch.OutOfMemoryError(ROOM)),
        wrapped(NotImplementedError(), torch.OutOfMemoryError(ROOM)),
        wrapped(brim.RankError("rank 1 failed"), torch.OutOfMemoryError(ROOM)),
    ],
    ids=repr,
)
def test_other_errors_mean_what_they_say(error: BaseException) -> None:
    assert not brim.is_out_of_memory(error)


def test_an_error_while_another_is_handled_is_not_that_one() -> None:
    def small_memory() -> None:
        try:
            raise torch.OutOfMemoryError(ROOM)
        except torch.OutOfMemoryError:
            raise RuntimeError("the plan for small memory has a bug")  # noqa: B904

    with pytest.raises(RuntimeError) as caught:
        small_memory()
    assert brim.is_out_of_memory(caught.value.__context__)  # type: ignore[arg-type]
    assert not brim.is_out_of_memory(caught.value)


def test_the_interpreters_system_error_counts_as_what_it_was_made_of() -> None:
    made = wrapped(SystemError("returned a result with an exception set"), MemoryError())
    assert brim.is_out_of_memory(made)
    assert brim.is_out_of_memory(wrapped(RuntimeError("epoch 3"), made))
    alone = SystemError("error return without exception set")
    assert not brim.is_out_of_memory(alone)
    alone.__context__ = torch.OutOfMemoryError(ROOM)
    assert brim.classify_error(alone).requested == 2 * MIB
    assert not brim.is_out_of_memory(wrapped(SystemError(), KeyError("x")))
    assert not brim.is_out_of_memory(wrapped(SystemError(), wrapped(ValueError(), MemoryError())))


def test_a_system_error_of_out_of_memory_makes_the_size_smaller() -> None:
    tried = []

    def work(size: int) -> int:
        tried.append(size)
        if size > 2:
            try:
                raise torch.OutOfMemoryError(ROOM)
            except torch.OutOfMemoryError as error:
                raise SystemError("<built-in method> returned a result") from error
        return size

    assert brim.run_batch(8, work, device="cpu") <= 2
    assert tried[0] == 8

    def broken(size: int) -> int:
        tried.append(size)
        raise SystemError("the interpreter is broken")

    tried.clear()
    with pytest.raises(SystemError, match="broken"):
        brim.run_batch(8, broken, device="cpu")
    assert tried == [8]


@needs_groups
def test_a_group_counts_if_all_its_members_do() -> None:
    group = builtins.BaseExceptionGroup
    room, other = torch.OutOfMemoryError(ROOM), ValueError("a bad row")
    assert brim.classify_error(group("two", [room, MemoryError()])).requested == 2 * MIB
    assert brim.is_out_of_memory(group("nested", [group("one", [room]), room]))
    for errors in ([room, other], [other, room], [room, group("one", [other])]):
        assert not brim.is_out_of_memory(group("mixed", errors))


@pytest.mark.parametrize("kind", ["from", pytest.param("group", marks=needs_groups)])
def test_adaptive_calls_shrink_and_say_both_texts_at_the_end(kind: str, held: int) -> None:
    def wrapping(size: int, more: int = 0) -> int:
        try:
            torch.empty(size * MIB + more, dtype=torch.uint8)
        except torch.OutOfMemoryError as error:
            if kind == "from":
                raise RuntimeError("the step failed") from error
            raise builtins.ExceptionGroup("the step failed", [error]) from None
        return size

    with brim.budget(held + 4 * MIB, device="cpu"):
        assert brim.run_batch(32, wrapping) == 4
        both = r"the step failed[^:]*: CPU out of memory"
        with pytest.raises(torch.OutOfMemoryError, match=both):
            brim.run_batch(32, lambda size: wrapping(size, 5 * MIB))
