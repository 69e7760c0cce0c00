"""`maximize(..., foresee=True)`."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import brim
from brim._estimate import _first_size


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes up to which was searched, one for each search, with as much memory each time."""
    found: list[int] = []
    trace = _first_size._trace

    def counted(traces: Any, size: int) -> int:
        found.append(size)
        return trace(traces, size)

    monkeypatch.setattr(_first_size, "_trace", counted)
    with brim.budget("64MiB", device="cpu"):
        yield found


@brim.maximize("n", foresee=True, device="cpu")
def doubled(x: torch.Tensor, n: int) -> torch.Tensor:
    return x[:n] * 2


class Worker:
    def __init__(self, width: int) -> None:
        self.x = torch.ones(1024, width)
        self.calls = 0

    @brim.maximize("n", foresee=True, device="cpu")
    def double(self, n: int) -> torch.Tensor:
        self.calls += 1
        return self.x[:n] * 2

    @brim.maximize("n", foresee=True, device="cpu")
    @classmethod
    def ones(cls, n: int) -> torch.Tensor:
        return torch.ones(n)


def test_is_an_adaptive_function_like_others(searches: list[int]) -> None:
    assert isinstance(doubled, brim.AdaptiveFunction)
    assert doubled.__name__ == "doubled"
    assert copy.deepcopy(doubled) is doubled
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    doubled.clear()
    for _ in range(2):
        assert len(doubled(torch.ones(8), 4)) == 4
    assert len(searches) == 1
    doubled.forget(torch.ones(8), 4)
    assert len(doubled(torch.ones(8), 4)) == 4
    assert len(searches) == 2
    assert len(functools.partial(doubled, n=4)(torch.ones(8))) == 4


def test_methods_record_and_are_traced_once_for_each_object(searches: list[int]) -> None:
    Worker.double.clear()
    workers = [Worker(4), Worker(8)]
    for worker in workers:
        for _ in range(3):
            result, attempts = worker.double.record(100)
            assert len(result) == 100
            assert [attempt.size for attempt in attempts] == [100]
        assert worker.calls == 3
    assert len(searches) == 2
    assert len(pickle.loads(pickle.dumps(workers[0].double))(10)) == 10
    assert len(Worker.double(workers[0], n=100)) == 100
    assert len(Worker.ones(5)) == len(Worker.ones.record(5)[0]) == 5


@pytest.mark.parametrize("remember", ["global", "none"])
def test_is_traced_once_where_only_numbers_with_a_fraction_or_long_lists_differ(
    searches: list[int], remember: Any
) -> None:
    @brim.maximize("n", foresee=True, device="cpu", remember=remember)
    def work(rate: float, data: list[float], n: int) -> torch.Tensor:
        return torch.ones(n) * rate + data[0]

    for i in range(20):
        work(0.1 * i, [float(i)] * 100, 10)
    assert len(searches) == 1


def test_gives_up_after_sixteen_searches(
    searches: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    @brim.maximize("n", foresee=True, device="cpu")
    def work(x: torch.Tensor, n: int) -> torch.Tensor:
        return x[:n] * 2

    with caplog.at_level("INFO", logger="brim"):
        for width in range(1, 20):
            work(torch.ones(width), 10)
    assert len(searches) == 16
    assert caplog.text.count("changed 16 times") == 1


@pytest.mark.parametrize("remember", ["global", "none"])
def test_searches_again_where_earlier_calls_do_not_tell(
    searches: list[int], held: int, remember: Any
) -> None:
    sizes = []

    @brim.maximize("n", foresee=True, device="cpu", remember=remember)
    def work(n: int) -> torch.Tensor:
        sizes.append(n)
        return torch.ones(n)

    def calls(asked: list[int], mebibytes: list[int]) -> int:
        before = len(searches)
        for size, room in zip(asked, mebibytes, strict=True):
            with brim.budget(held + (room << 20), device="cpu"):
                work(size << 18)  # a mebibyte each
        return len(searches) - before

    assert calls([9], [30]) == 1, "the first"
    assert calls([9, 8, 9], [20, 30, 30]) == 0, "more memory than can be used"
    assert calls([12], [30]) == 1, "a larger size than any before"
    work.clear()
    assert calls([8, 8, 8], [4, 5, 5]) == 1, "the traces tell of other memory too"
    assert sizes[-1] > 4.5 * 2**18
    assert calls([8, 8], [3, 3]) == 0, "less memory"
    assert 2.5 * 2**18 < sizes[-1] <= 3 * 2**18


@pytest.mark.parametrize("room", [60 << 10, 147 << 10, 1 << 20])
def test_the_margin_is_of_what_the_call_takes(held: int, room: int) -> None:
    weights = torch.zeros(30 << 18)

    @brim.maximize("n", foresee=True, device="cpu")
    def work(n: int) -> int:
        (torch.zeros(n, 96) + 1).mul(weights[:96])
        return n

    with brim.budget(brim.memory_stats("cpu").allocated + room, device="cpu"):
        size, attempts = work.record(100_000)
    largest = room // (2 * 4 * 96)
    assert [attempt.fitted for attempt in attempts] == [True]
    assert largest - 1 - 0.03 * largest <= size <= largest


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("remember", ["global", "none"])
def test_calls_go_beyond_what_was_foreseen_where_there_is_room(
    held: int, remember: Any, layers: int
) -> None:
    @brim.maximize("n", foresee=True, device="cpu", remember=remember)
    def work(n: int) -> int:
        kept = [torch.ones(n, 256) for _ in range(layers)]
        if isinstance(kept[0], FakeTensor):
            kept.append(torch.ones(n, 256 * layers))
        return n

    with brim.budget(held + layers * (16 << 20), device="cpu"):
        calls = [work.record(1 << 20) for _ in range(4)]
    sizes = [size for size, _ in calls]
    assert 0.48 * 2**14 < sizes[0] <= 2**13
    assert all(each.fitted for _, attempts in calls for each in attempts)
    if remember == "none":
        assert sizes == sizes[:1] * 4, "each is the first"
    else:
        assert all(0.97 * 2**14 <= size <= 2**14 for size in sizes[1:])


@pytest.mark.parametrize("layers", [1, 4])
def test_a_run_corrects_what_was_foreseen_too_low(held: int, layers: int) -> None:
    @brim.maximize("n", foresee=True, device="cpu")
    def work(n: int) -> int:
        kept = [torch.ones(n, 256) for _ in range(layers)]
        if not isinstance(kept[0], FakeTensor):
            kept.append(torch.ones(n, 64 * layers))
        return n

    with brim.budget(held + layers * (20 << 20), device="cpu"):
        calls = [work.record(1 << 20) for _ in range(4)]
    sizes = [size for size, _ in calls]
    failures = [sum(not each.fitted for each in attempts) for _, attempts in calls]
    assert failures[0] <= 2
    assert failures[1:] == [0] * 3
    assert sizes == sorted(sizes)
    assert 0.97 * 2**14 < sizes[-1] <= 2**14


def test_what_was_foreseen_is_kept_in_no_file(held: int, tmp_path: Path) -> None:
    def make() -> Any:
        @brim.maximize("n", foresee=True, device="cpu", persist=tmp_path)
        def work(n: int) -> int:
            torch.ones(n, 256)
            return n

        return work

    with brim.budget(held + (16 << 20), device="cpu"):
        size, attempts = make().record(1 << 20)
        assert [attempt.fitted for attempt in attempts] == [True]
        files = [each for each in tmp_path.rglob("*") if each.is_file()]
        lines = [line for each in files for line in each.read_text().splitlines()[1:-1]]
        again, attempts = make().record(1 << 20)
    assert {int(line.split()[-1]) for line in lines} == {size}, "nothing else ran"
    assert again >= size
    assert all(attempt.fitted for attempt in attempts)


def test_what_calls_leave_does_not_make_later_ones_smaller(held: int) -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    @brim.maximize("n", foresee=True, device="cpu", remember="none")
    def step(n: int) -> int:
        optimizer.zero_grad()
        model(torch.ones(n, 512)).square().mean().backward()
        optimizer.step()
        return n

    with brim.budget(held + (24 << 20), device="cpu"):
        calls = [step.record(1 << 20) for _ in range(4)]
    sizes = [size for size, _ in calls]
    assert sizes[0] <= min(sizes)
    assert all(each.fitted for _, attempts in calls for each in attempts)


class State:
    """Everything that a step may keep outside of modules and optimizers."""

    __slots__ = ("__dict__", "average")

    def __init__(self) -> None:
        self.average = torch.zeros(())
        self.steps = 0
        self.losses: list[Any] = [1.5]
        self.best: dict[str, Any] = {"loss": None}
        self.last: deque[Any] = deque([2], maxlen=4)
        self.seen: set[int] = set()
        self.plain = types.SimpleNamespace(steps=0)


steps_in_all = 0


@functools.lru_cache
def mask(n: int) -> torch.Tensor:
    return torch.ones(n)


def test_state_outside_of_modules_is_as_without_foresight() -> None:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: hooked.append(len(hooked)))
    hooked: list[int] = []

    def run(foresee: bool) -> tuple[Any, ...]:
        global steps_in_all
        steps_in_all = 0
        hooked.clear()
        mask.cache_clear()
        torch.manual_seed(0)
        state, calls, newest = State(), 0, None

        @brim.maximize("n", foresee=foresee, device="cpu")
        def step(state: State, n: int) -> None:
            global steps_in_all
            nonlocal calls, newest
            steps_in_all += 1
            calls += 1
            with torch.no_grad():
                loss = (layer(torch.randn(n, 4)).sum(1) * mask(n)).sum()
            newest = loss
            state.average = 0.9 * state.average + 0.1 * loss
            state.steps += 1
            state.losses.append(loss)
            state.best["loss"] = loss
            state.last.append(loss)
            state.seen.add(state.steps)
            state.plain.steps += 1

        step(state, 10)
        step(state, 10)
        plain = (
            steps_in_all,
            calls,
            state.steps,
            state.plain.steps,
            len(state.losses),
            state.seen,
            list(hooked),
        )
        tensors = (newest, state.average, *state.losses, state.best["loss"], *state.last, mask(10))
        assert not any(isinstance(each, FakeTensor) for each in tensors)
        return (*plain, [float(each.sum()) if torch.is_tensor(each) else each for each in tensors])

    assert run(foresee=True) == run(foresee=False)
    mask.cache_clear()


class Keeper:
    kept: Any = None


def test_attributes_of_classes_are_as_without_foresight() -> None:
    @brim.maximize("n", foresee=True, device="cpu")
    def work(n: int) -> int:
        assert Keeper.kept is None
        Keeper.kept = torch.ones(n)
        Keeper.other = 1  # type: ignore[attr-defined]
        return n

    brim.estimate(work.__wrapped__, 10, device="cpu")
    assert Keeper.kept is None
    assert not hasattr(Keeper, "other")
    try:
        assert work(10) == 10
        assert type(Keeper.kept) is torch.Tensor
    finally:
        Keeper.kept = None


def test_what_cannot_be_put_back_is_an_error() -> None:
    def keeper() -> Iterator[None]:
        kept = None
        while True:
            kept = yield kept

    inside: Any = keeper()
    next(inside)

    @brim.maximize("n", foresee=True, device="cpu")
    def work(n: int) -> int:
        inside.send(torch.ones(n))
        return n

    with pytest.raises(brim.EstimateError, match=r"left in something .*test_foresee\.py"):
        work(10)  # it would go on with a tensor that has no values
    with pytest.raises(brim.EstimateError, match="left in something"):
        brim.estimate(work.__wrapped__, 10, device="cpu")


def test_a_foreseen_function_within_another_is_not_traced_by_itself(searches: list[int]) -> None:
    inner = brim.maximize("n", foresee=True, device="cpu")(lambda n: torch.ones(n))

    @brim.maximize("n", foresee=True, device="cpu")
    def outer(n: int) -> torch.Tensor:
        return torch.ones(n) + inner(n)

    assert len(outer(10)) == 10
    assert len(searches) == 2  # outer's, then inner's own in the real call


@pytest.mark.parametrize("accumulates", [False, True])
def test_microbatches_start_at_the_size_that_fits(accumulates: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 16))
    x, y = torch.rand(4096, 256), torch.rand(4096, 16)
    calls = 0

    def loss_fn(part: Any) -> torch.Tensor:
        nonlocal calls
        calls += not isinstance(part[0], FakeTensor)
        return nn.functional.mse_loss(model(part[0]), part[1])

    expected = None
    if accumulates:  # they are there beside those of the parts
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    sizes = []
    for foresee in (True, False):
        step = brim.Microbatches(loss_fn, model=model, foresee=foresee, device="cpu", check=False)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with brim.budget(brim.memory_stats("cpu").allocated + 16 * 2**20, device="cpu"):
            _, attempts = step.record((x, y))
        if foresee:
            assert len(attempts) == 1
            assert calls == -(-4096 // step.size)
        sizes.append(step.size)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if expected is not None:
            for found, wanted in zip(gradients, expected, strict=True):
                assert found.allclose(wanted, atol=1e-5)
        expected = [g.clone() for g in gradients]
        for parameter, gradient in zip(model.parameters(), before or [None] * 4, strict=True):
            parameter.grad = gradient
    assert sizes[0] >= 0.9 * sizes[1]
    assert sizes[0] < 4096


def test_microbatches_that_cannot_be_traced_run_as_without() -> None:
    model = nn.Linear(4, 1)
    step = brim.Microbatches(
        lambda part: model(part).mean() * part.sum().item(), model=model, foresee=True, device="cpu"
    )
    assert step(torch.ones(8, 4)).item() == pytest.approx(model(torch.ones(1, 4)).item() * 32)
