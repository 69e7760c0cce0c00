"""Microbatches of a model that drops what it can compute again: which parts are the fastest."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import brim
from brim import _C

from .test_nn_auto import peak_of

ITEMS = 16
CLOCK = _C.ClockByHand()  # so that no disturbance of the machine decides


@pytest.fixture(autouse=True)
def _nothing_learned() -> Iterator[None]:
    brim.nn.reset_pressure()
    with CLOCK:
        yield
    gc.collect()
    brim.nn.reset_pressure()


class Slow(nn.Module):
    """A layer that takes its time for each item, and can only run again as a whole."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.advance(self.seconds * len(x))
        return x + self.down(torch.sin(self.up(x)))


class Program:
    """Steps of a model under a budget that is a share of what it needs.

    Args:
        per_item: seconds that each layer takes for an item.
        per_part: seconds that each part takes.
    """

    def __init__(self, share: float, *, per_item: float = 0.0, per_part: float = 0.0) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(*[Slow(8, per_item) for _ in range(4)])
        self.model = copy.deepcopy(self.plain)
        brim.convert(self.model, recompute="auto")
        self.x = torch.randn(ITEMS, 16, 8)
        self.per_part = per_part
        self.calls: list[int] = []
        self.step = brim.Microbatches(self.loss, self.model, device="cpu")
        self.limit = self.need(ITEMS, share)

    def need(self, items: int, share: float) -> int:
        peak = peak_of(lambda: self.plain(self.x[:items]).square().mean().backward())
        self.plain.zero_grad()
        return brim.memory_stats("cpu").allocated + int(share * peak)

    def loss(self, part: Tensor) -> Tensor:
        self.calls.append(len(part))
        CLOCK.advance(self.per_part)
        return self.model(part).square().mean()

    def run(self, steps: int, items: int = ITEMS) -> list[int]:
        """The sizes of the parts of each step."""
        sizes = []
        for _ in range(steps):
            self.model.zero_grad()
            with brim.budget(self.limit, "cpu"):
                self.step(self.x[:items])
            sizes.append(self.step.size)
        return sizes


# What has to go is computed again by running a layer again, which takes the time of its items.
@pytest.mark.parametrize(
    ("per_item", "per_part", "fastest"),
    [(2e-3, 0.0, ITEMS // 2), (0.0, 0.05, ITEMS)],
    ids=["another part is cheaper", "recomputation is cheaper"],
)
def test_the_faster_one_is_found_and_stays(per_item: float, per_part: float, fastest: int) -> None:
    program = Program(0.62, per_item=per_item, per_part=per_part)
    sizes = program.run(11)
    assert sizes[:4] == [ITEMS] * 4
    assert sizes[4:8] == [ITEMS // 2] * 4
    assert sizes[8:] == [fastest] * 3
    assert brim.nn.pressure().blocks > 0


def test_gradients_and_losses_are_those_of_plain_layers_in_such_parts() -> None:
    program = Program(0.62)
    for _ in range(9):
        program.model.zero_grad()
        with brim.budget(program.limit, "cpu"):
            loss = program.step(program.x)
        plain = brim.Microbatches(
            lambda part: program.plain(part).square().mean(), size=program.step.size, device="cpu"
        )
        program.plain.zero_grad()
        assert torch.equal(loss, plain(program.x))
        for ours, theirs in zip(
            program.model.parameters(), program.plain.parameters(), strict=True
        ):
            assert torch.equal(ours.grad, theirs.grad)


def test_without_pressure_nothing_is_tried() -> None:
    program = Program(1.5)
    assert program.run(6) == [ITEMS] * 6
    assert program.calls == [ITEMS] * 6


def test_what_an_estimate_gives_up_is_no_pressure() -> None:
    program = Program(1.5)
    whole = program.loss

    def estimates(part: Tensor) -> Tensor:
        work = nn.Sequential(*[Slow(8, 0.0) for _ in range(3)])
        brim.convert(work, recompute="auto")
        foreseen = brim.estimate(
            lambda: work(program.x).sum().backward(), device="cpu", capacity=1, calls=3
        )
        assert foreseen.given_up is not None
        return whole(part)

    program.step = brim.Microbatches(estimates, program.model, device="cpu")
    assert program.run(6) == [ITEMS] * 6


@pytest.mark.slow
def test_another_budget_and_another_batch_are_measured_anew() -> None:
    program = Program(0.62, per_part=0.05)
    assert program.run(9)[-1] == ITEMS
    assert program.run(3, ITEMS // 4) == [ITEMS // 4] * 3  # fits as it is
    program.limit = program.need(ITEMS, 0.58)
    assert ITEMS // 2 in program.run(6)
    program.limit = program.need(ITEMS - 2, 0.62)
    assert program.run(5, ITEMS - 2) == [ITEMS - 2] * 4 + [ITEMS // 2 - 1]
    program.limit = program.need(ITEMS, 1.5)
    assert program.run(3) == [ITEMS] * 3


def test_what_cannot_be_cut_runs_as_a_whole() -> None:
    program = Program(0.62)
    step = brim.Microbatches(
        lambda part: program.model(part).square().mean().sqrt(), program.model, device="cpu"
    )
    program.step = step
    assert program.run(8) == [ITEMS] * 8


def test_a_trial_that_does_not_fit_changes_nothing() -> None:
    """As where the check of the parts takes more than they do."""
    program = Program(0.62)
    program.run(4)

    def short(part: Tensor) -> Tensor:
        if len(part) < ITEMS:
            raise torch.OutOfMemoryError("CPU out of memory")
        return nn.Sequential.forward(program.model, part)

    program.model.forward = short  # type: ignore[method-assign]
    assert program.run(4) == [ITEMS] * 4


def test_a_call_that_never_fits_again_ends() -> None:
    """Of a trial that fails after larger parts had run, one failure is forgiven."""
    program = Program(0.62)
    program.run(4)
    sizes: list[int] = []

    def fail(part: Tensor) -> Tensor:
        sizes.append(len(part))
        assert len(sizes) < 100, sizes
        raise torch.OutOfMemoryError("CPU out of memory")

    program.model.forward = fail  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        program.run(1)
    assert sizes[0] < sizes[1] == ITEMS  # a trial; then what had run
    assert sizes[-1] == 1
    del program.model.forward
    assert program.run(1) != []


def test_an_interrupt_in_a_trial_is_one() -> None:
    program = Program(0.62)
    program.run(4)

    def interrupted(part: Tensor) -> Tensor:
        raise KeyboardInterrupt

    program.model.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        program.run(1)
    del program.model.forward
    assert program.run(1) == [ITEMS // 2]  # where it was


@pytest.mark.slow
def test_parts_that_must_be_cut_are_compared_too() -> None:
    program = Program(0.3, per_part=0.02)
    sizes = program.run(14)
    assert sizes[0] < ITEMS
    assert len(set(sizes)) > 1
    assert len(set(sizes[-3:])) == 1
