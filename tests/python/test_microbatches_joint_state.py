"""Buffers after a step with a loss of all items, and what failures leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import brim

from .joint_cases import Clip, Tower, clip, close, encode_with
from .microbatches_cases import gradients, same

# ---- buffers -------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls, in place or with a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x * int(self.calls)


@pytest.mark.parametrize("size", [10, 3])
def test_buffers_are_as_after_one_pass(size: int) -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), Counting(True), Counting(False)
    ).double()
    model = nn.ModuleList([nn.Sequential(shared, nn.Linear(6, 4).double()), Clip()])
    batch = (torch.rand(10, 6).double(), torch.rand(10, 6).double())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    encoders = (model[0], model[0])

    model[1]((model[0](batch[0]), model[0](batch[1]))).backward()
    expected = gradients(model), [each.clone() for each in model.buffers()]
    model.load_state_dict(state)
    model.zero_grad()
    brim.Microbatches(encode=encoders, loss=model[1], model=model, size=size)(batch)
    assert close(gradients(model), expected[0])
    assert close(model.buffers(), expected[1])
    assert shared[2].calls == 2


def test_buffers_that_depend_on_the_items_are_refused() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.lerp_(x.mean(0), 0.1)
            return x + self.mean

    model, batch = clip()
    average = Average()
    step = brim.Microbatches(
        encode=nn.Sequential(average, model[0]), loss=lambda rows: rows.var(), size=3, check=False
    )
    with pytest.raises(ValueError, match=r"changes the buffer 0\.mean by what its items are"):
        step(batch[0])
    assert average.mean.equal(torch.zeros(6).double())
    assert gradients(model) == [None] * len(list(model.parameters()))


def test_batch_norm_is_refused_or_updated_once_per_part() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6).double()
    model = nn.Sequential(norm, Tower())
    x = torch.rand(9, 6).double()
    with pytest.raises(ValueError, match="see the whole batch"):
        brim.Microbatches(encode=model, loss=lambda rows: rows.var(), model=model, size=3)(x)
    with pytest.raises(ValueError, match="see the whole batch"):
        brim.Microbatches(encode=model, loss=lambda rows: rows.var(), size=3)(x)
    step = brim.Microbatches(
        encode=model, loss=lambda rows: rows.var(), model=model, size=3, allow=nn.BatchNorm1d
    )
    step(x)
    assert norm.num_batches_tracked == 3
    other = nn.BatchNorm1d(6).double()
    for part in x.split(3):
        other(part)
    assert norm.running_mean is not None
    assert norm.running_mean.equal(other.running_mean)  # type: ignore[arg-type]


class Moving(nn.Module):
    """Assigns a new buffer, of which the graph holds the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(4).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.factor
        self.factor = self.factor / 2
        return scaled


class Centered(nn.Module):
    """A loss with a buffer of its own, which it changes in place or assigns."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("center", torch.zeros(4).double())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        center: Any = self.center.clone() if self.in_place else self.center
        loss = ((rows - center) @ (rows * (1 + center)).T).logsumexp(1).var()
        moved = rows.detach().mean(0)
        if self.in_place:
            self.center.lerp_(moved, 0.1)
        else:
            self.center = torch.lerp(self.center, moved, 0.1)
        return loss


def centered(in_place: bool) -> tuple[nn.ModuleList, torch.Tensor]:
    torch.manual_seed(0)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4).double())
    model = nn.ModuleList([nn.Sequential(spectral, Moving()), Centered(in_place)])
    return model, torch.rand(8, 6).double()


def after_two_plain_steps(in_place: bool) -> Any:
    model, x = centered(in_place)
    for _ in range(2):
        model[1](model[0](x)).backward()
    return gradients(model), list(model.buffers())


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_buffers_that_the_loss_changes_or_that_are_assigned(
    size: int, in_place: bool, named: bool
) -> None:
    expected = after_two_plain_steps(in_place)
    model, x = centered(in_place)
    objects = list(model.buffers())
    step = brim.Microbatches(
        encode=model[0], loss=model[1], model=model if named else None, size=size
    )
    for _ in range(2):
        step(x)
    assert close(gradients(model), expected[0])
    assert close(model.buffers(), expected[1])
    assert all(a is b for a, b in zip(objects, model.buffers(), strict=True))


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_after_a_failure(size: int, in_place: bool) -> None:
    expected = after_two_plain_steps(in_place)
    failures = 0
    for at in range(3, 100, 19):
        model, x = centered(in_place)
        step = brim.Microbatches(encode=model[0], loss=model[1], size=size, check=False)
        step(x)
        with brim.testing.inject_oom(at=at, count=1) as injector:
            step(x)
        failures += injector.failures
        assert close(gradients(model), expected[0]), at
        assert close(model.buffers(), expected[1]), at
    assert failures >= 3


# ---- failures ------------------------------------------------------------------------------------


class Step:
    """A step with dropout, spectral norm and a temperature, and what it leaves."""

    def __init__(self, size: int, accumulates: bool = False) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleList(
            [
                nn.Sequential(
                    nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6).double()), Tower(0.4)
                ),
                Tower(),
                Clip(),
            ]
        )
        self.batch = torch.rand(8, 6).double(), torch.rand(8, 6).double()
        if accumulates:
            self.model[2].scale.grad = torch.ones((), dtype=torch.float64)
            self.model[1].last.weight.grad = torch.rand(4, 8).double()
        self.step = brim.Microbatches(
            encode=encode_with(self.model), loss=self.model[2], model=self.model, size=size
        )

    def run(self, fails_at: int = 2**40, count: int = 1) -> tuple[list[torch.Tensor | None], int]:
        torch.manual_seed(4)
        with brim.testing.inject_oom(at=fails_at, count=count) as injector:
            loss = self.step(self.batch)
        self.allocations = injector.allocations
        assert (injector.failures > 0) == (fails_at < 2**40)
        left = [loss, *gradients(self.model), *(b.clone() for b in self.model.buffers())]
        return [*left, torch.rand(1)], self.step.size


@pytest.mark.parametrize(
    ("size", "accumulates", "stride"),
    [
        (4, True, 53),  # some of each kind
        (8, False, 53),
        pytest.param(4, True, 1, marks=pytest.mark.slow),
        pytest.param(8, False, 1, marks=pytest.mark.slow),
    ],
)
def test_exact_after_a_failure_at_each_allocation(
    size: int, accumulates: bool, stride: int
) -> None:
    expected = {each: Step(each, accumulates).run()[0] for each in (1, 2, 3, 4, 5, 6, 7)}
    without_failure = Step(size, accumulates)
    without_failure.run()
    assert without_failure.allocations > 60
    for at in range(1, without_failure.allocations + 1, stride):
        left, used = Step(size, accumulates).run(at)
        assert used < size, at
        assert same(left, expected[used]), at


def test_a_failure_that_lasts_leaves_nothing() -> None:
    for at in (5, 90, 170):
        step = Step(4, accumulates=True)
        before = gradients(step.model), [each.clone() for each in step.model.buffers()]
        with pytest.raises(torch.OutOfMemoryError):
            step.run(at, 10**6)
        assert same(gradients(step.model), before[0])
        assert same(list(step.model.buffers()), before[1])


@pytest.mark.parametrize("place", [0, 2, 4, 5, 7])
def test_another_error_leaves_the_gradients_as_they_were(place: int) -> None:
    model, batch = clip()
    model[2].scale.grad = before = torch.ones((), dtype=torch.float64)
    calls = 0

    def fails() -> None:
        nonlocal calls
        calls += 1
        if calls == place + 1:
            raise KeyError("no such sample")

    def encode(part: Any) -> Any:
        fails()
        return encode_with(model)(part)

    def loss(pair: Any) -> Any:
        fails()
        return model[2](pair)

    step = brim.Microbatches(encode=encode, loss=loss, model=model, size=3, check=False)
    with pytest.raises(KeyError):  # 4 parts, the loss, 4 parts
        step(batch)
    assert model[2].scale.grad is before
    assert before == 1
    assert [g for g in gradients(model) if g is not None] == [before]
