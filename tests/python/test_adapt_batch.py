"""brim.batch and run_batch, and what holds for every repeated call."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import brim

MIB = 2**20


def check(size: int, most: int) -> int:
    """Fail as an allocator would, above `most`."""
    if size > most:
        raise torch.OutOfMemoryError("CPU out of memory.")
    return size


@pytest.fixture
def steady(held: int) -> Iterator[None]:
    """What is available does not change: else sizes that failed are tried again."""
    with brim.budget(held + 64 * MIB, device="cpu"):
        yield


@pytest.mark.parametrize("enabled", [True, False])
def test_onednn_is_on_after_a_failure_if_it_was_before(enabled: bool) -> None:
    @brim.batch(16, strategy="halving")
    def function(size: int) -> int:
        if size > 5:
            torch._C._set_mkldnn_enabled(False)  # as torch does if oneDNN runs out of memory
        return check(size, 5)

    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        assert function() == 4
        assert torch._C._get_mkldnn_enabled() == enabled
    finally:
        torch._C._set_mkldnn_enabled(before)


def test_the_size_comes_first_and_callers_do_not_pass_it() -> None:
    @brim.batch(16, strategy="halving")
    def function(size: int, text: str, *, flag: bool = False) -> tuple[int, str, bool]:
        return check(size, 5), text, flag

    assert function("a", flag=True) == (4, "a", True)
    assert function(text="b") == (4, "b", False)
    assert str(inspect.signature(function)) == (
        "(text: 'str', *, flag: 'bool' = False) -> 'tuple[int, str, bool]'"
    )


class Model:
    @brim.batch(16, strategy="halving")
    def method(self, size: int, text: str) -> tuple[Model, int, str]:
        """Say something."""
        return self, check(size, 5), text

    @classmethod
    @brim.batch(16)
    def of_class(cls, size: int) -> tuple[type[Model], int]:
        return cls, size

    @staticmethod
    @brim.batch(16)
    def static(size: int, text: str) -> tuple[int, str]:
        return size, text


def test_methods() -> None:
    model = Model()
    assert model.method("a") == (model, 4, "a")
    assert model.method(text="a") == (model, 4, "a")
    assert model.method.__name__ == "method"
    assert model.method.__doc__ == "Say something."
    assert list(inspect.signature(Model.method).parameters) == ["self", "text"]
    (_, size, _), tries = model.method.record("a")
    assert size == 4
    assert tries[-1].size == 4
    assert Model.of_class() == (Model, 16)
    assert Model.static("x") == (16, "x")


def test_methods_share_what_they_learn_between_instances(steady: None) -> None:
    assert Model().method("a")[1] == 4
    _, tries = Model().method.record("a")
    assert [t.size for t in tries] == [4]


def test_a_bound_method_does_not_keep_its_instance() -> None:
    model = Model()
    reference = weakref.ref(model)
    model.method("a")
    del model
    gc.collect()
    assert reference() is None


def test_run_batch_calls_now() -> None:
    assert brim.run_batch(16, lambda size, a, b: (size, a, b), 1, 2) == (16, 1, 2)
    assert brim.run_batch(16, lambda size: check(size, 5), strategy="halving", remember="none") == 4
    assert brim.run_batch(100, lambda size: check(size, 50), q=32, remember="none") == 32


def test_run_batch_remembers_by_the_code_of_a_lambda(steady: None) -> None:
    tried: list[int] = []

    def call() -> int:
        return brim.run_batch(
            16, lambda size: (tried.append(size), check(size, 5))[1], strategy="halving"
        )

    assert call() == 4
    assert tried == [16, 8, 4]
    tried.clear()
    assert call() >= 4
    assert tried[0] <= 5


def test_builtins_have_no_signature_and_work() -> None:
    assert brim.batch(3)(range)() == range(3)
    assert brim.batch(3)(int.__add__)(4) == 7


# ---------------------------------------------------------------- sizes under a budget


def test_nearest_neighbours_are_near_the_maximum_at_once() -> None:
    queries, points = torch.rand(3000, 8), torch.rand(2000, 8)

    def nearest(size: int) -> list[torch.Tensor]:
        return [(part @ points.T).neg().topk(3).indices for part in queries.split(size)]

    adaptive = brim.batch(3000)(nearest)
    held = brim.memory_stats("cpu").allocated
    with brim.budget(held + 23 * MIB, device="cpu"):
        low, high = 1, 3000
        while high - low > 1:
            middle = (low + high) // 2
            try:
                nearest(middle)
                low = middle
            except torch.OutOfMemoryError:
                high = middle
        for call in range(3):
            _, tries = adaptive.record()
            failures = sum(not t.fitted for t in tries)
            assert failures <= (2 if call == 0 else 1)
            assert tries[-1].size >= 0.97 * low
        assert tries[-1].size >= 0.99 * low


def test_sizes_grow_when_more_memory_is_free_and_shrink_when_less(held: int) -> None:
    @brim.batch(10**6)
    def function(size: int) -> int:
        base, growing = torch.empty(MIB // 4), torch.empty(256 * size)
        return base.numel() * 0 + growing.numel() // 256

    def size_within(mib: int) -> int:
        with brim.budget(held + mib * MIB, device="cpu"):
            return function()

    assert 0.9 <= size_within(5) / (4 * 1024) <= 1
    sizes = [size_within(17) for _ in range(4)]
    assert sizes == sorted(sizes)
    assert 0.97 <= sizes[-1] / (16 * 1024) <= 1
    with brim.budget(held + 9 * MIB, device="cpu"):
        size, tries = function.record()
    assert 0.9 <= size / (8 * 1024) <= 1
    assert len(tries) == 1, "no failure to learn it"


# ---------------------------------------------------------------- what failed is gone


def test_tensors_of_a_failed_try_are_gone_before_the_retry() -> None:
    gone: list[bool] = []
    earlier: list[weakref.ref[torch.Tensor]] = []

    @brim.batch(16, strategy="halving", remember="none")
    def function(size: int) -> int:
        gone.append(all(reference() is None for reference in earlier))
        mine = torch.empty(100)
        earlier.append(weakref.ref(mine))

        def deeper(inside: torch.Tensor) -> int:
            local = inside + 1
            earlier.append(weakref.ref(local))
            return check(size, 3)

        return deeper(mine)

    gc.disable()  # not by luck of a collection
    try:
        assert function() == 2
    finally:
        gc.enable()
    assert gone == [True] * 4


def test_also_where_the_function_made_a_cycle_of_the_exception() -> None:
    gone: list[bool] = []
    earlier: list[weakref.ref[torch.Tensor]] = []

    @brim.batch(16, strategy="halving", remember="none")
    def function(size: int) -> int:
        gone.append(all(reference() is None for reference in earlier))
        mine = torch.empty(MIB)
        earlier.append(weakref.ref(mine))
        try:
            return check(size, 3)
        except torch.OutOfMemoryError as error:
            kept = error  # the frame holds the exception, whose traceback holds the frame
            raise kept from ValueError("context")

    gc.disable()
    try:
        assert function() == 2
    finally:
        gc.enable()
    assert gone == [True] * 4


def test_also_inside_backward(held: int) -> None:
    weight = torch.ones(1000, requires_grad=True)
    before = brim.memory_stats("cpu").allocated
    levels: list[int] = []
    in_backward = 0

    @brim.batch(64, remember="none")
    def step(size: int) -> None:
        nonlocal in_backward
        weight.grad = None
        levels.append(brim.memory_stats("cpu").allocated)
        loss = (weight * weight).exp().mul(2).sum()
        in_backward += 1
        loss.backward()
        in_backward -= 1

    for at in range(1, 13):
        with brim.testing.inject_oom(at=at):
            step()
    assert in_backward >= 3, "some failed there"
    assert set(levels) == {before}


class DoublesInBackward(torch.autograd.Function):
    references: list[weakref.ref[torch.Tensor]] = []  # noqa: RUF012
    most = 3

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        scratch = torch.empty(1000)
        DoublesInBackward.references.append(weakref.ref(scratch))
        check(ctx.size, DoublesInBackward.most)
        return gradient * 2, None


def test_also_inside_a_backward_written_in_python() -> None:
    references = DoublesInBackward.references
    gone: list[bool] = []

    @brim.batch(16, strategy="halving", remember="none")
    def step(size: int) -> torch.Tensor | None:
        gone.append(all(reference() is None for reference in references))
        x = torch.ones(3, requires_grad=True)
        DoublesInBackward.apply(x, size).sum().backward()
        return x.grad

    result = step()
    assert torch.equal(result, torch.full((3,), 2.0))
    assert gone == [True] * 4


def test_no_exception_is_being_handled_in_a_retry() -> None:
    import sys

    handled = []

    @brim.batch(16, strategy="halving", remember="none")
    def function(size: int) -> int:
        handled.append(sys.exc_info()[0])
        try:
            return check(size, 3)
        except torch.OutOfMemoryError as error:
            handled.append(error.__context__)
            raise

    assert function() == 2
    assert handled == [None] * 7


# ---------------------------------------------------------------- random numbers


@pytest.mark.parametrize("kind", ["batch", "maximize", "watched"])
def test_results_do_not_depend_on_how_many_tries_it_took(kind: str) -> None:
    dropout = torch.nn.Dropout(0.3)
    layer = torch.nn.Linear(20, 20)

    def work(size: int) -> torch.Tensor:
        x = dropout(torch.rand(8, 20)) + torch.zeros(size)[:1]
        return dropout(layer(x)) + torch.randn(8, 20)

    function: Any = (
        brim.maximize("size", remember="none")(lambda size=64: work(size))
        if kind == "maximize"
        else brim.batch(64, remember="none")(work)
    )
    if kind == "watched":
        recorded = function.record
        function = lambda: recorded()[0]  # noqa: E731

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        result: torch.Tensor = function()
        return result

    expected = run()
    with brim.testing.inject_oom(at=2**62) as counter:
        run()
    assert counter.allocations >= 10
    for at in range(1, counter.allocations + 1):
        for count in (1, 3):
            with brim.testing.inject_oom(at=at, count=count) as injector:
                result = run()
            assert injector.failures == count
            assert torch.equal(result, expected), (at, count)


def test_the_random_state_can_be_left_alone() -> None:
    def drawn(restore: bool) -> list[float]:
        numbers: list[float] = []

        @brim.batch(2, restore_random_state=restore)
        def function(size: int) -> None:
            numbers.append(torch.rand(1).item())
            check(size, 1)

        torch.manual_seed(4)
        function()
        return numbers

    first, second = drawn(True)
    assert first == second
    first, second = drawn(False)
    assert first != second


# ---------------------------------------------------------------- who is told


def test_the_observer_hears_of_each_try_after_it_ended() -> None:
    seen: list[brim.Attempt] = []

    @brim.batch(16, strategy="halving", observer=seen.append)
    def function(size: int) -> int:
        return check(size, 5)

    function()
    assert [(a.size, a.fitted) for a in seen] == [(16, False), (8, False), (4, True)]


def test_an_observers_error_ends_the_call() -> None:
    def observer(attempt: brim.Attempt) -> None:
        raise KeyError("observer")

    with pytest.raises(KeyError, match="observer"):
        brim.run_batch(16, lambda size: size, observer=observer)


def test_tries_are_logged_under_brim(caplog: pytest.LogCaptureFixture) -> None:
    @brim.batch(16, strategy="halving", remember="none")
    def named(size: int) -> int:
        return check(size, 5)

    with caplog.at_level(logging.DEBUG, logger="brim"):
        named()
    assert [(r.name, r.levelname) for r in caplog.records] == [
        ("brim", "INFO"),
        ("brim", "INFO"),
        ("brim", "DEBUG"),
        ("brim", "INFO"),
    ]
    assert "named: Attempt(size=16, out of host memory" in caplog.records[0].getMessage()
    assert "Attempt(size=4, fitted" in caplog.records[2].getMessage()
    assert (
        caplog.records[3]
        .getMessage()
        .endswith("named: used batch size = 4, after 2 failed attempt(s) from 16 on")
    )


def test_the_size_that_was_used_in_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @brim.maximize(("rows", "columns"), strategy="halving")
    def area(rows: int, columns: int) -> int:
        return check(rows * columns, 100)

    def parts(start: int, end: int) -> None:
        check(end - start, 5)

    with caplog.at_level(logging.INFO, logger="brim"):
        area(16, 16)
        brim.run_range(0, 50, 16, parts, strategy="halving")
    used = [r.getMessage() for r in caplog.records if ": used " in r.getMessage()]
    assert [text.partition(": ")[2] for text in used] == [
        "used rows, columns = 8, 8, after 1 failed attempt(s) from 16, 16 on",
        "used step = 4, after 2 failed attempt(s) from 16 on",
    ]


def test_a_call_that_fits_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="brim"):
        brim.run_batch(16, lambda size: size, remember="none")
    assert not caplog.records


# ---------------------------------------------------------------- throughput


@pytest.fixture
def clock() -> Iterator[brim._C.ClockByHand]:
    """Stands still, so that no disturbance of the machine decides."""
    with brim._C.ClockByHand() as by_hand:
        yield by_hand


def test_throughput_settles_at_the_best_rate(clock: brim._C.ClockByHand) -> None:
    tried: list[int] = []

    @brim.batch(64, objective="throughput")
    def function(size: int) -> None:
        tried.append(size)
        clock.advance(0.001 if size == 32 else 0.1)

    for _ in range(8):
        function()
    assert tried == [64, 64, 32, 32, 16, 16, 32, 32], "the first time at a size is not counted"


def test_throughput_does_not_judge_a_size_by_its_first_call(clock: brim._C.ClockByHand) -> None:
    tried: list[int] = []

    @brim.batch(64, objective="throughput")
    def function(size: int) -> None:
        tried.append(size)
        if len(tried) == 1:
            clock.advance(0.5)  # a compiler, cold caches
        clock.advance(0.05)

    for _ in range(6):
        function()
    assert tried == [64, 64, 32, 32, 64, 64]
