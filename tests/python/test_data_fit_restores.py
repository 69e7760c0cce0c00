"""What a sampler's `fit` trains is put back: models, optimizers, random state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import brim
from brim.data import SizeAwareBatchSampler


class Trainer:
    """A step that changes all that a training step changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(),
            torch.nn.Linear(8, 1),
        )
        self.model.eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def step(self, samples: list[int]) -> None:
        self.model.train()
        random.random()
        x = torch.randn(sum(samples) + 2, 8)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> Any:
        """Everything, as plain values."""
        gradients = [p.grad if p.grad is None else p.grad.tolist() for p in self.model.parameters()]
        state = {
            id(p): {k: v.tolist() for k, v in s.items()} for p, s in self.optimizer.state.items()
        }
        groups = [{**group, "params": 0} for group in self.optimizer.param_groups]
        return (
            {name: value.tolist() for name, value in self.model.state_dict().items()},
            [module.training for module in self.model.modules()],
            gradients,
            state,
            groups,
            self.scheduler.state_dict(),
            torch.get_rng_state().tolist(),
            random.getstate(),
        )


def fit_trainer(trainer: Trainer, held: int, **options: Any) -> SizeAwareBatchSampler:
    sizes = torch.arange(1, 65)
    return SizeAwareBatchSampler.fit(
        sizes.tolist(), trainer.step, sizes, held + 2**20, "cpu", cost="sum", **options
    )


@pytest.mark.parametrize("steps", [0, 2])
def test_fit_leaves_everything_as_it_was(
    held: int, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    for _ in range(steps):
        trainer.step([3])
    before = trainer.state()
    with caplog.at_level("INFO", logger="brim"):
        made = fit_trainer(trainer, held)
    assert trainer.state() == before
    report = made.fit_report
    assert report is not None
    assert report.runs > 3
    assert report.restored == "Sequential, SGD, StepLR and the random state"
    assert str(report) in caplog.text.replace("; restored", "\nrestored")


def test_fit_restores_what_it_is_told_to(held: int) -> None:
    trainer = Trainer()
    before = trainer.state()
    made = fit_trainer(trainer, held, restore=[trainer.model, trainer.optimizer])
    after = trainer.state()
    assert after[:5] == before[:5]
    assert after[6:] == before[6:]
    assert after[5] != before[5]  # the scheduler
    assert made.fit_report is not None
    assert made.fit_report.restored == "Sequential, SGD and the random state"
    with pytest.raises(TypeError, match="restore must be a module"):
        fit_trainer(trainer, held, restore=5)
    with pytest.raises(TypeError, match="restore must name things, not arguments"):
        fit_trainer(trainer, held, restore="model")


def test_fit_restores_nothing_if_told_so(held: int) -> None:
    trainer = Trainer()
    before = trainer.state()
    made = fit_trainer(trainer, held, restore=False)
    assert all(a != b for a, b in zip(trainer.state(), before, strict=True))
    assert str(made.fit_report).endswith("restored: nothing, what the work did stays")


def test_fit_restores_after_an_error(held: int) -> None:
    trainer = Trainer()
    before = trainer.state()

    def step(samples: list[int]) -> None:
        trainer.step(samples)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        SizeAwareBatchSampler.fit([1, 2, 3], step, [1, 2, 3], held + 2**20, "cpu", cost="sum")
    assert trainer.state() == before


@pytest.mark.parametrize("restore", [True, False])
def test_a_probe_leaves_everything_as_it_was(restore: bool) -> None:
    trainer = Trainer()
    before = trainer.state()
    sizes = [1, 2, 4, 8]
    brim.MemoryModel.probe(lambda n: trainer.step([n]), sizes, "cpu", restore=restore)
    assert (trainer.state() == before) == restore


def test_a_budget_that_is_used_up_before_the_first_batch_is_named() -> None:
    brim.install_cpu_allocator()
    kept = torch.zeros(2**20)
    with pytest.raises(ValueError, match=r"budget of 1.00 MiB is too small: .* are held on cpu"):
        SizeAwareBatchSampler.fit([1, 2], lambda samples: None, [1, 2], "1MiB", "cpu")
    del kept
