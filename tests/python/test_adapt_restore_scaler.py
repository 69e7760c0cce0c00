"""Gradient scalers, schedulers and `requires_grad`: put back by `restore=`, or warned of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim._state.undo import Undo

X, Y = torch.randn(16, 8), torch.randn(16, 3)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "fused Adam": lambda p: torch.optim.Adam(p, 0.01, fused=True),  # unscales in its own kernel
}


class Step:
    """A step of mixed precision with all that takes part in it."""

    def __init__(self, optimizer: str = "SGD") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=3),
                torch.optim.lr_scheduler.LambdaLR(self.optimizer, Halving()),
            ],
            milestones=[2],
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        things = [self.model, self.optimizer, self.scaler, self.scheduler]
        self.run = brim.maximize("n", device="cpu", restore=things)(self.work)

    def work(self, n: int) -> float:
        for _ in range(2):  # the second fails after a step of the scheduler and an update
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(X), Y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
        return loss.item()

    def all(self) -> Any:
        return copy.deepcopy(
            (
                self.scaler.state_dict(),
                self.scaler._per_optimizer_states,
                self.scheduler.state_dict(),
                [group["lr"] for group in self.optimizer.param_groups],
                [parameter.tolist() for parameter in self.model.parameters()],
                hasattr(self.optimizer, "grad_scale"),
            )
        )


class Halving:
    """A function of a scheduler with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**self.calls


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
def test_a_scaled_step_is_the_same_wherever_it_fails(optimizer: str) -> None:
    brim.install_cpu_allocator()

    def run(at: int) -> tuple[float, Any, int]:
        step = Step(optimizer)
        with brim.testing.inject_oom(at=at) as injected:
            loss = step.run(8)
        return loss, step.all(), injected.allocations

    loss, expected, allocations = run(10**9)
    assert allocations > 30
    for at in range(1, allocations + 1):
        other, state, _ = run(at)
        assert (other, state) == (loss, expected), f"failing at allocation {at}"


@pytest.mark.filterwarnings("ignore:Detected call of")  # of a scheduler without steps
def test_a_scheduler_alone_puts_back_the_learning_rate() -> None:
    step = Step()
    before = step.all()
    with Undo(step.scheduler):
        step.scheduler.step()
        assert step.all() != before
    assert step.all() == before


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_arguments_may_be_scalers_and_schedulers() -> None:
    step = Step()
    failures = [torch.OutOfMemoryError("CPU out of memory.")]

    @brim.maximize("n", device="cpu", restore=["scaler", "scheduler"])
    def work(scaler: Any, scheduler: Any, n: int) -> None:
        scaler._init_scale += 1
        scheduler.step()
        if failures:
            raise failures.pop()

    work(step.scaler, step.scheduler, 8)
    assert step.scaler._init_scale == 1025
    assert step.scheduler.last_epoch == 1


def fails_once(step: Step) -> Callable[[int], None]:
    failures = [torch.OutOfMemoryError("CPU out of memory.")]

    def work(n: int) -> None:
        if failures:
            raise failures.pop()
        step.work(n)

    return work


class Holder:
    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    @brim.maximize("n", device="cpu")
    def work(self, n: int) -> None:
        if n > 4:
            raise torch.OutOfMemoryError("CPU out of memory.")


GLOBAL = torch.amp.GradScaler("cpu")


def reaches(how: str) -> Callable[[], Any]:
    scaler = torch.amp.GradScaler("cpu", enabled=how != "disabled")

    def fail(n: int) -> None:
        if n > 4:
            raise torch.OutOfMemoryError("CPU out of memory.")

    def closure(n: int) -> None:
        fail(n)
        scaler.get_scale()

    def default(n: int, scaler: Any = scaler) -> None:
        fail(n)

    def by_global(n: int) -> None:
        fail(n)
        GLOBAL.get_scale()

    def argument(n: int, given: Any = None) -> None:
        fail(n)

    adapt = brim.maximize("n", device="cpu")
    named = brim.maximize("n", device="cpu", restore=scaler)
    pair = brim.maximize("n", device="cpu", restore=(lambda: scaler, lambda _: None))
    half = brim.maximize("n", device="cpu", restore=(scaler.state_dict, scaler.load_state_dict))
    return {
        "closure": lambda: adapt(closure)(8),
        "disabled": lambda: adapt(closure)(8),
        "default": lambda: adapt(default)(8),
        "global": lambda: adapt(by_global)(8),
        "argument": lambda: adapt(argument)(8, scaler),
        "self": lambda: Holder(scaler).work(8),
        "named": lambda: named(closure)(8),
        "pair": lambda: pair(closure)(8),
        "state_dict": lambda: half(closure)(8),
        "fits": lambda: adapt(closure)(4),
        "nothing": lambda: adapt(fail)(8),
    }[how]


@pytest.mark.parametrize("how", ["closure", "default", "global", "argument", "self", "state_dict"])
def test_a_scaler_that_nobody_named_is_warned_of(how: str) -> None:
    with pytest.warns(UserWarning, match="uses a GradScaler, which restore= does not name"):
        reaches(how)()


@pytest.mark.parametrize("how", ["disabled", "named", "pair", "fits", "nothing"])
def test_no_warning_without_need(how: str) -> None:
    reaches(how)()  # warnings are errors


def test_a_scheduler_is_warned_of_where_restore_names_others() -> None:
    step = Step()
    work = fails_once(step)
    adapt = brim.maximize("n", device="cpu", restore=[step.model, step.optimizer, step.scaler])
    with pytest.warns(UserWarning, match="uses a SequentialLR, a LinearLR, a LambdaLR, which"):
        adapt(work)(8)
    brim.maximize("n", device="cpu", restore=step.scaler)(reaches_nothing)(8)


def reaches_nothing(n: int) -> None:
    if n > 4:
        raise torch.OutOfMemoryError("CPU out of memory.")


def test_whether_parameters_require_a_gradient_is_put_back() -> None:
    model, tensor = nn.Linear(2, 2), torch.zeros(2)
    seen = []

    @brim.batch(8, device="cpu", restore=[model, tensor])
    def work(n: int) -> None:
        seen.append((model.weight.requires_grad, tensor.requires_grad))
        model.requires_grad_(False)
        tensor.requires_grad_(True)
        if n > 4:
            raise torch.OutOfMemoryError("CPU out of memory.")

    work()
    assert seen == [(True, False)] * len(seen)
    assert len(seen) > 1


def test_undo_puts_back_whether_a_gradient_is_required() -> None:
    model, tensor = nn.Linear(2, 2), torch.zeros(2)
    with Undo([model, tensor]):
        model.requires_grad_(False)
        tensor += model(torch.ones(2)).detach().requires_grad_()
    assert model.weight.requires_grad
    assert not tensor.requires_grad


def test_undo_puts_back_the_stages_of_a_scaler() -> None:
    step = Step()
    with Undo([step.model, step.optimizer, step.scaler]):
        step.scaler.scale(step.model(X).sum()).backward()
        step.scaler.unscale_(step.optimizer)
    assert not step.scaler._per_optimizer_states
