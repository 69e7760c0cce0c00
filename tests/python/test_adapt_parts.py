"""brim.range, brim.chunked, run_range and run_chunked."""

from __future__ import annotations

import gc
import inspect
import random
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import brim

MIB = 2**20


def check(size: int, most: int) -> None:
    """Fail as an allocator would, above `most`."""
    if size > most:
        raise torch.OutOfMemoryError("CPU out of memory.")


@brim.range(50)
def with_memory(start: int, end: int, parts: list[tuple[int, int]], fails: Any) -> None:
    fails(end - start)
    parts.append((start, end))


without_memory = brim.range(50, remember="none")(with_memory.__wrapped__)


@given(
    st.integers(-100, 100),
    st.integers(0, 300),
    st.integers(1, 60),
    st.floats(0, 0.6),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_everything_is_covered_once_whatever_fails(
    start: int, length: int, most: int, bad_luck: float, seed: int, remembers: bool
) -> None:
    parts: list[tuple[int, int]] = []
    luck = random.Random(seed)

    def fails(size: int) -> None:
        if size > 1 and (size > most or luck.random() < bad_luck):
            raise torch.OutOfMemoryError("CPU out of memory.")

    function = with_memory if remembers else without_memory
    assert function(start, start + length, parts, fails) is None
    at = start
    for begin, end in parts:
        assert begin == at
        assert begin < end <= begin + 50
        at = end
    assert at == start + length


def test_steps_and_extra_arguments() -> None:
    sizes = []

    @brim.range(32, strategy="halving", remember="none")
    def function(start: int, end: int, text: str, *, flag: bool = False) -> None:
        assert (text, flag) == ("a", True)
        sizes.append(end - start)
        check(end - start, 10)

    function(0, 20, "a", flag=True)
    assert sizes == [32 if 32 <= 20 else 20, 10, 10]
    assert list(inspect.signature(function).parameters) == ["start", "end", "text", "flag"]


def test_an_empty_range_calls_nothing() -> None:
    brim.run_range(5, 5, 3, lambda start, end: pytest.fail("called"))


def test_run_range_and_multiples() -> None:
    sizes: list[int] = []

    def part(start: int, end: int, extra: str) -> None:
        assert extra == "x"
        sizes.append(end - start)
        check(end - start, 50)

    brim.run_range(0, 500, 200, part, "x", q=16, remember="none")
    assert all(size in (3, 200) or size % 16 == 0 for size in sizes[:-1]), sizes


def test_affine_need_reaches_nearly_the_maximum_without_failing(held: int) -> None:
    @brim.range(10**6)
    def function(start: int, end: int) -> None:
        base, growing = torch.empty(MIB // 4), torch.empty(256 * (end - start))
        assert base.numel() + growing.numel() > 0

    with brim.budget(held + 17 * MIB, device="cpu"):
        _, first = function.record(0, 10**6)
        _, second = function.record(0, 10**5)
    for tries in (first, second):
        assert all(t.fitted for t in tries)
        assert tries[-2].size >= 0.95 * 16 * 1024
    assert second[0].size >= 0.95 * 16 * 1024, "it starts where the first ended"


class Worker:
    @brim.range(4)
    def count(self, start: int, end: int, parts: list[int]) -> None:
        parts.append(end - start)

    @brim.chunked(4)
    def add(self, chunk: torch.Tensor, start: int, end: int, value: float = 1.0) -> None:
        chunk += value

    @staticmethod
    @brim.chunked(4)
    def static(chunk: torch.Tensor, start: int, end: int) -> None:
        chunk += 1


def test_methods() -> None:
    parts: list[int] = []
    Worker().count(0, 10, parts)
    assert sum(parts) == 10
    x = torch.zeros(10)
    Worker().add(x, 2.0)
    Worker().add(x, value=1.0)
    Worker.static(x)
    assert torch.equal(x, torch.full((10,), 4.0))
    assert list(inspect.signature(Worker.add).parameters) == ["self", "chunk", "value"]


# ---------------------------------------------------------------- chunked


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_chunks_of_any_dimension_are_views(dim: int) -> None:
    x = torch.zeros(5, 6, 7)
    covered = []

    @brim.chunked(2, dim=dim)
    def function(chunk: torch.Tensor, start: int, end: int) -> None:
        assert chunk.shape[dim] == end - start <= 2
        assert chunk._base is x
        covered.extend(range(start, end))
        chunk += 1

    assert function(x) is None
    assert covered == list(range(x.shape[dim]))
    assert bool((x == 1).all())


def test_empty_tensors() -> None:
    def never(chunk: torch.Tensor, start: int, end: int) -> None:
        pytest.fail("called")

    brim.run_chunked(torch.zeros(0), 4, never)
    brim.run_chunked(torch.zeros(3, 0), 4, never, dim=1)
    rows: list[int] = []
    brim.run_chunked(torch.zeros(3, 0), 4, lambda c, start, end: rows.extend(range(start, end)))
    assert rows == [0, 1, 2]


def test_run_chunked_hands_arguments_on() -> None:
    seen = []
    brim.run_chunked(
        torch.arange(6).reshape(2, 3), 3, lambda c, s, e, *rest: seen.append(rest), "a", 1, dim=1
    )
    assert set(seen) == {("a", 1)}


@pytest.mark.parametrize("kind", ["range", "chunked"])
def test_collects_what_the_parts_returned_that_fitted(kind: str) -> None:
    x, calls = torch.arange(100.0), 0

    def twice(part: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        check(calls, 2 if calls == 3 else calls)
        return part * 2

    if kind == "range":
        made = brim.range(64, collect=True)(lambda start, end: twice(x[start:end]))
        parts, attempts = made.record(0, 100)
    else:
        parts, attempts = brim.chunked(64, collect=True)(lambda c, s, e: twice(c)).record(x)
    assert torch.equal(torch.cat(parts), x * 2)
    assert any(not attempt.fitted for attempt in attempts)
    assert [len(part) for part in parts] == [a.size for a in attempts if a.fitted]


def test_run_range_and_run_chunked_collect() -> None:
    sizes = brim.run_range(0, 10, 4, lambda start, end: end - start, collect=True)
    assert sum(sizes) == 10
    parts = brim.run_chunked(torch.ones(3, 10), 4, lambda c, s, e: c.sum(1), dim=1, collect=True)
    assert torch.equal(sum(parts), torch.full((3,), 10.0))
    assert brim.run_range(0, 0, 4, lambda start, end: 1, collect=True) == []
    with pytest.raises(TypeError, match="collect must be True or False, got 'cat'"):
        brim.range(4, collect="cat")  # type: ignore[call-overload]


def test_results_that_are_not_collected_are_gone_before_the_next_part() -> None:
    last: list[weakref.ref[torch.Tensor]] = []

    def work(start: int, end: int) -> torch.Tensor:
        assert not last or last[-1]() is None
        result = torch.ones(1)
        last.append(weakref.ref(result))
        return result

    with pytest.warns(UserWarning, match="which is dropped"):
        brim.run_range(0, 10, 2, work)
    assert len(last) >= 5


def test_subclasses_of_tensors_stay_what_they_are() -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, 2))
    kinds = []
    brim.run_chunked(parameter, 4, lambda chunk, s, e: kinds.append(chunk.requires_grad))
    assert all(kinds)


def test_chunks_of_a_failed_try_are_gone() -> None:
    references: list[weakref.ref[torch.Tensor]] = []
    gone: list[bool] = []

    @brim.chunked(16, strategy="halving", remember="none")
    def function(chunk: torch.Tensor, start: int, end: int) -> None:
        gone.append(all(reference() is None for reference in references))
        copy = chunk.clone()
        references.extend((weakref.ref(chunk), weakref.ref(copy)))
        check(end - start, 3)

    gc.disable()
    try:
        function(torch.zeros(16))
    finally:
        gc.enable()
    assert len(gone) > 8
    assert all(gone)


@pytest.mark.parametrize("kind", ["range", "chunked"])
def test_results_do_not_depend_on_how_many_tries_it_took(kind: str) -> None:
    out = torch.zeros(60)

    def part(start: int, end: int) -> None:
        # One by one: how the whole is cut must not matter to what is drawn.
        drawn = [torch.nn.functional.dropout(torch.rand(1), 0.5) for _ in range(start, end)]
        out[start:end] = torch.cat(drawn)

    def run() -> torch.Tensor:
        out.zero_()
        torch.manual_seed(8)
        if kind == "range":
            brim.run_range(0, 60, 16, part, strategy="halving", remember="none")
        else:
            brim.run_chunked(
                out, 16, lambda c, s, e: part(s, e), strategy="halving", remember="none"
            )
        return out

    expected = run().clone()
    assert 0 < int((expected == 0).sum()) < 60
    with brim.testing.inject_oom(at=2**62) as counter:
        run()
    for at in range(1, counter.allocations + 1, 3):
        with brim.testing.inject_oom(at=at, count=2) as injector:
            run()
        assert injector.failures == 2
        assert torch.equal(out, expected), at


# ---------------------------------------------------------------- progress, threads, nesting


class FakeBar:
    bars: list[FakeBar] = []  # noqa: RUF012

    def __init__(self, total: int, **options: object) -> None:
        self.total, self.options, self.updates, self.closed = total, options, [], 0
        FakeBar.bars.append(self)

    def update(self, size: int) -> None:
        self.updates.append(size)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[FakeBar]:
    import tqdm.auto

    monkeypatch.setattr(tqdm.auto, "tqdm", FakeBar)
    monkeypatch.setattr(FakeBar, "bars", [])
    return FakeBar.bars


def test_progress_counts_finished_parts_only(bars: list[FakeBar]) -> None:
    @brim.range(32, strategy="halving", progress=True)
    def named(start: int, end: int) -> None:
        check(end - start, 10)

    named(100, 150)
    assert not FakeBar.bars or FakeBar.bars[-1].total == 50
    (bar,) = FakeBar.bars
    assert sum(bar.updates) == 50
    assert max(bar.updates) <= 10
    assert bar.closed == 1
    assert "named" in str(bar.options["desc"])
    brim.run_chunked(torch.zeros(7), 3, lambda c, s, e: None, progress=True)
    assert sum(FakeBar.bars[-1].updates) == 7


def test_the_bar_is_closed_when_an_error_passes(bars: list[FakeBar]) -> None:
    with pytest.raises(KeyError):
        brim.run_range(0, 9, 3, lambda s, e: {}[s], progress=True)
    assert FakeBar.bars[-1].closed == 1


def test_progress_with_the_real_tqdm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    brim.run_range(0, 9, 3, lambda s, e: None, progress=True)
    assert "9" in capsys.readouterr().err  # which is no terminal
    monkeypatch.setenv("BRIM_PROGRESS", "0")
    brim.run_range(0, 9, 3, lambda s, e: None, progress=True)
    assert capsys.readouterr().err == ""


def test_progress_without_tqdm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        brim.range(4, progress=True)(lambda start, end: None)


# What other threads hold by then looks like memory that did not come back.
@pytest.mark.filterwarnings("ignore:.*did not come back")
def test_eight_threads() -> None:
    wrong: list[object] = []

    @brim.chunked(64)
    def function(chunk: torch.Tensor, start: int, end: int, most: int) -> None:
        check(end - start, most)
        chunk += 1

    def work(number: int) -> None:
        try:
            for _ in range(40):
                x = torch.zeros(200, 1 + number % 3)
                function(x, 5 + number)
                if not bool((x == 1).all()):
                    wrong.append(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_batch_inside_a_chunk_adapts_first() -> None:
    rows: list[int] = []

    @brim.batch(8, strategy="halving", remember="none")
    def inside(size: int, rows: int) -> int:
        check(size * rows, 12)
        return size

    @brim.chunked(64, strategy="halving", remember="none")
    def outside(chunk: torch.Tensor, start: int, end: int) -> None:
        inside(end - start)
        rows.append(end - start)

    outside(torch.zeros(40))
    assert sum(rows) == 40
    assert max(rows) <= 12


def test_memory_that_was_short_for_a_moment_does_not_keep_the_steps_small() -> None:
    def work(start: int, end: int) -> None:
        torch.empty((end - start) * 1024, dtype=torch.uint8)

    function = brim.range(1000)(work)
    with brim.testing.inject_oom(at=1):
        _, attempts = function.record(0, 20_000)
    assert sum(not attempt.fitted for attempt in attempts) == 1
    assert max(attempt.size for attempt in attempts) >= 970
    _, attempts = function.record(0, 20_000)
    assert [attempt.size for attempt in attempts] == [1000] * 20
