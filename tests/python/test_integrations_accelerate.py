"""`find_executable_batch_size` beside accelerate's own."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import brim
from brim.integrations.accelerate import find_executable_batch_size

MIB = 2**20


def theirs() -> Callable[..., Any]:
    return pytest.importorskip("accelerate.utils").find_executable_batch_size  # type: ignore[no-any-return]


def both() -> list[Callable[..., Any]]:
    return [theirs(), find_executable_batch_size]


def work(sizes: list[int]) -> Callable[..., int]:
    """Needs a MiB for each item."""

    def train(batch_size: int, factor: int = 1, *, add: int = 0) -> int:
        sizes.append(batch_size)
        torch.zeros(batch_size, MIB, dtype=torch.uint8)
        return batch_size * factor + add

    return train


def test_it_is_called_as_accelerates_is() -> None:
    for find in both():
        sizes: list[int] = []
        assert find(work(sizes))() == 128
        assert find(work(sizes), starting_batch_size=4)(2, add=1) == 9
        decorated = find(starting_batch_size=8)(work(sizes))
        assert (decorated(), decorated(factor=3)) == (8, 24)
        assert sizes == [128, 4, 8, 8]


def test_it_fails_less_and_fits_more_than_accelerate() -> None:
    found = []
    for find in both():
        gc.collect()  # what other tests left would be freed in the middle of one of the two
        sizes: list[int] = []
        train = find(work(sizes), starting_batch_size=1000)
        with brim.budget("50MiB", device="cpu"):
            first, second = train(), train()
        assert second >= first
        found.append((len(sizes), second))
    (their_calls, their_size), (our_calls, our_size) = found
    assert our_calls < their_calls
    assert our_size >= their_size


def test_the_size_grows_when_there_is_more_memory() -> None:
    train = find_executable_batch_size(work([]), starting_batch_size=64)
    with brim.budget("20MiB", device="cpu"):
        assert train() <= 20
    assert train() == 64


def test_a_call_that_fits_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    train = find_executable_batch_size(lambda batch_size: batch_size)
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("collected"))
    assert train() == 128


@pytest.mark.parametrize("steps", [[60, 40, 20], [1, 0]])
def test_the_users_own_sequence_of_sizes_is_kept(steps: list[int]) -> None:
    seen = []
    for find in both():
        sizes: list[int] = []
        rest = iter(steps)
        train = find(work(sizes), 100, lambda rest=rest: next(rest))
        outcome: Any
        with brim.budget("30MiB", device="cpu"):
            try:
                outcome = train()
            except RuntimeError:
                outcome = "nothing fits"
        seen.append((outcome, sizes, list(rest)))
    assert seen[0] == seen[1]


def test_nothing_fits() -> None:
    for find in both():
        train = find(work([]), starting_batch_size=4)
        with (
            brim.budget("256KiB", device="cpu"),
            pytest.raises(RuntimeError, match="xecutable batch size found") as caught,
        ):
            train()
        assert not isinstance(caught.value, torch.OutOfMemoryError)
        with pytest.raises(RuntimeError, match="reached zero"):
            find(work([]), starting_batch_size=0)()


def test_a_batch_size_that_is_passed_is_an_error() -> None:
    def train(batch_size: int, model: str) -> None:
        pytest.fail("called")

    for find in both():
        with pytest.raises(TypeError, match="train"):
            find(train)(16, "model")
    with pytest.raises(TypeError, match="at most 1 positional argument"):
        find_executable_batch_size(train)(16, "model")
    # accelerate counts *args as one argument, and refuses this
    many = find_executable_batch_size(lambda batch_size, *args: args)
    assert many(1, 2, 3) == (1, 2, 3)


def test_other_errors_pass() -> None:
    def train(batch_size: int) -> None:
        raise KeyError("other")

    for find in both():
        with pytest.raises(KeyError, match="other"):
            find(train)()


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="starting_batch_size must be at least 0, got -1"):
        find_executable_batch_size(work([]), -1)
    train = find_executable_batch_size(work([]), 8, itertools.repeat(None).__next__)  # type: ignore[arg-type]
    with (
        brim.budget("1MiB", device="cpu"),
        pytest.raises(TypeError, match="what reduce_batch_size_fn returns must be an int"),
    ):
        train()
