"""What adaptive calls remember and forget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import brim

from .remembering import X, check, first_size, make

pytestmark = pytest.mark.usefixtures("steady_memory")


def test_the_next_call_starts_where_the_last_one_ended() -> None:
    function = make()
    assert first_size(function, X) == 64
    assert first_size(function, X) == 4
    assert first_size(function, X + 1) == 4, "another tensor of the same shape"


def test_each_place_of_a_call_may_remember_by_itself() -> None:
    tried: list[int] = []

    @brim.batch(64, strategy="halving", remember="call_site")
    def function(size: int) -> None:
        tried.append(size)
        check(size, 5)

    def here() -> list[int]:
        tried.clear()
        function()
        return tried

    def there() -> list[int]:
        tried.clear()
        function()
        return tried

    assert here()[0] == 64
    assert here() == [4]
    assert there()[0] == 64
    assert there() == [4]
    assert here() == [4]


def test_nothing_is_remembered_if_so_wished() -> None:
    function = make(remember="none")
    assert [first_size(function, X) for _ in range(3)] == [64] * 3


def test_forget_drops_one_kind_of_call_and_clear_all() -> None:
    function = make()
    y = torch.zeros(7)
    for _ in range(2):
        function(X)
        function(y)
        assert function.forget(X) is None
        assert first_size(function, y) == 4
        assert first_size(function, X) == 64
        assert function.clear() is None
        assert first_size(function, y) == 64
        function.clear()


def test_forget_of_calls_by_place_drops_all() -> None:
    function = make(remember="call_site")
    sizes = []
    for _ in range(2):
        sizes.append(first_size(function, X))
        function.forget(X)
    assert sizes == [64, 64]


def test_forget_and_clear_without_a_memory_do_nothing() -> None:
    function = make(remember="none")
    function.forget(X)
    function.clear()


def test_thousands_of_shapes_in_turn_are_remembered() -> None:
    function = make()
    shapes = [torch.zeros(1).expand(n + 1) for n in range(1000)]
    assert [first_size(function, x) for x in shapes] == [64] * 1000
    assert [first_size(function, x) for x in shapes] == [4] * 1000


def test_the_kind_of_call_that_was_not_used_for_longest_is_forgotten_first() -> None:
    function = make(capacity=2)
    x, y, z = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    for tensor in (x, y, x, z):
        function(tensor)
    assert first_size(function, x) == 4
    assert first_size(function, y) == 64
    for wrong, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="capacity must be"):
            make(capacity=wrong)
        with pytest.raises(error, match="capacity must be"):
            brim.run_batch(4, lambda size: size, capacity=wrong)  # type: ignore[arg-type]


def test_a_memory_holds_so_many_keys() -> None:
    memory = brim.SizeMemory(capacity=2)
    assert len(memory) == 0
    memory.clear()
    wrongs: dict[Any, str] = {
        0: "capacity must be 1 or more, got 0",
        -1: "capacity must be 1 or more, got -1",
        2**63: "capacity must fit 64 bits, got 9223372036854775808",
        2.0: "capacity must be an int, got 2.0",
        "2": "capacity must be an int, got '2'",
    }
    for wrong, says in wrongs.items():
        with pytest.raises((ValueError, TypeError), match=says):
            brim.SizeMemory(capacity=wrong)
    with pytest.raises(TypeError, match="capacity must be an int, got True"):
        brim.SizeMemory(capacity=True)


def test_run_batch_may_remember_by_the_place_of_the_call() -> None:
    sizes: list[int] = []

    def work(size: int) -> None:
        sizes.append(size)
        if size > 4:
            raise RuntimeError("CUDA out of memory.")

    for _ in range(2):
        brim.run_batch(64, work, remember="call_site")
    assert sizes[-1:] == [4]
    assert sizes.count(64) == 1, "the second time, this place knows"
    brim.run_batch(64, work, remember="call_site")
    assert sizes.count(64) == 2, "another place does not"
