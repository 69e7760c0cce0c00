"""The batch size that fits, for Lightning.

All of this is slow, since importing Lightning is; conftest.py leaves the file out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import brim

pytest.importorskip("lightning")

import lightning

from brim.integrations.lightning import AdaptiveSteps, BatchSizeFinder

from .lightning_modules import MARKS, ROOM, Large, Net, Watch, trainer

pytestmark = MARKS


@pytest.mark.parametrize(("mode", "least", "most"), [("power", 64, 64), ("binsearch", 110, 122)])
def test_the_finder_finds_the_size_that_fits(mode: str, least: int, most: int, held: int) -> None:
    net, finder, watch = Large(), BatchSizeFinder(mode), Watch()
    state = [p.detach().clone() for p in net.parameters()]
    run = trainer(finder, watch, max_epochs=1)
    torch.manual_seed(7)
    next(iter(net.loader()))  # draws a seed, as that of the trainer does
    random = torch.rand(3)
    torch.manual_seed(7)

    class Check(lightning.pytorch.callbacks.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            """All is as if nothing had run."""
            assert all(map(torch.equal, module.parameters(), state))
            assert all(p.grad is None for p in module.parameters())
            assert trainer.global_step == 0
            assert not trainer.optimizers[0].state
            assert torch.equal(torch.rand(3), random)

    run.callbacks.append(Check())
    with brim.budget(brim.memory_stats("cpu").allocated + ROOM, device="cpu"):
        run.fit(net)
    assert least <= finder.optimal_batch_size <= most
    assert net.batch_size == finder.optimal_batch_size
    assert len(watch.outputs) == -(-400 // net.batch_size)
    trials = len(net.seen) - len(watch.outputs)
    assert trials <= 3 * 15


def test_the_finder_in_the_middle_of_training(held: int) -> None:
    """The pattern that Lightning's documentation shows, for models that are unfrozen later."""

    class Later(BatchSizeFinder):
        def on_fit_start(self, *_: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                steps, state = trainer.global_step, trainer.optimizers[0].state_dict()["state"]
                before = [entry["exp_avg"].clone() for entry in state.values()]
                self.scale_batch_size(trainer, module)
                after = trainer.optimizers[0].state_dict()["state"].values()
                assert all(map(torch.equal, [entry["exp_avg"] for entry in after], before))
                assert trainer.global_step == steps == 50

    net, finder = Large(), Later()
    run = trainer(finder, max_epochs=3)
    with brim.budget(brim.memory_stats("cpu").allocated + ROOM, device="cpu"):
        run.fit(net)
    assert finder.optimal_batch_size == 64
    assert net.seen[:50] == [8] * 50
    assert net.seen[-7:] == [64] * 6 + [16]
    assert run.global_step == 50 + 2 * 7


def test_the_finder_puts_back_what_no_optimizer_holds() -> None:
    """A frozen teacher, gradients that are accumulated, and metrics of the epoch so far."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Taught(Large):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = torch.nn.Linear(8, 1).double().requires_grad_(False)
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.teacher.weight.mul_(0.9)
            self.mean(batch[0].mean())
            return super().training_step(batch, batch_idx)

    class Later(BatchSizeFinder):
        def on_fit_start(self, *_: Any) -> None:
            pass

        def on_train_batch_start(self, trainer: Any, module: Any, _: Any, batch_idx: int) -> None:
            def state() -> list[torch.Tensor]:
                teacher, mean = module.teacher.weight.detach().clone(), module.mean
                gradients = [p.grad.clone() for p in module.net.parameters()]
                return [teacher, mean.mean_value.clone(), mean.weight.clone(), *gradients]

            if batch_idx == 1:
                before, updates = state(), module.mean._update_count
                self.scale_batch_size(trainer, module)
                assert all(map(torch.equal, state(), before))
                assert module.mean._update_count == updates == 1

    finder = Later(max_val=16)
    trainer(finder, max_steps=1, accumulate_grad_batches=2).fit(Taught())
    assert finder.optimal_batch_size == 16


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_finder_for_other_stages(stage: str, held: int) -> None:
    net, finder = Large(), BatchSizeFinder("binsearch", margin=0)
    run = trainer(finder, limit_val_batches=1.0)
    with brim.budget(brim.memory_stats("cpu").allocated + ROOM, device="cpu"):
        getattr(run, stage)(net, **({} if stage == "predict" else {"verbose": False}))
    assert 110 <= finder.optimal_batch_size <= 128
    assert net.seen[-4:-1] == [net.batch_size] * 3
    assert net.training  # as before


def test_the_finder_stops_at_the_data_set_and_at_max_val() -> None:
    for settings, size in (
        ({}, 32),
        ({"max_val": 20}, 16),
        ({"max_val": 20, "mode": "binsearch"}, 19),
    ):
        net, finder = Large(50), BatchSizeFinder(**settings)
        trainer(finder, max_steps=1).fit(net)
        assert finder.optimal_batch_size == size
        assert max(net.seen) <= settings.get("max_val", 50)


def test_the_finder_sets_the_attribute_of_a_data_module() -> None:
    class Data(lightning.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"rows": 3})

        def train_dataloader(self) -> Any:
            return DataLoader(Net(40).loader().dataset, batch_size=self.hparams.rows)

    data, finder = Data(), BatchSizeFinder(batch_arg_name="rows")
    trainer(finder, max_steps=1).fit(Net(), datamodule=data)
    assert data.hparams.rows == finder.optimal_batch_size == 32


def test_the_size_found_is_in_module_hparams_and_data_module_and_a_failure_leaves_none() -> None:
    class Data(lightning.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 3

        def train_dataloader(self) -> Any:
            return DataLoader(Net(40).loader().dataset, batch_size=self.batch_size)

    class Failing(Net):
        def __init__(self, most: int) -> None:
            super().__init__()
            self.save_hyperparameters({"batch_size": 5})
            self.most = most

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > self.most:
                raise ArithmeticError("a defect of the step, not memory")
            return super().training_step(batch, batch_idx)

    net, data, finder = Failing(most=99), Data(), BatchSizeFinder()
    run = trainer(finder, max_steps=1)
    run.fit(net, datamodule=data)
    assert net.batch_size == net.hparams.batch_size == data.batch_size == 32
    assert finder.optimal_batch_size == 32
    assert run._checkpoint_connector.dump_checkpoint()["hyper_parameters"]["batch_size"] == 32

    net, data = Failing(most=15), Data()
    with pytest.raises(ArithmeticError, match="a defect of the step"):
        trainer(BatchSizeFinder(), max_steps=1).fit(net, datamodule=data)
    assert max(net.seen) <= 15
    assert (net.batch_size, net.hparams.batch_size, data.batch_size) == (8, 5, 3)


def test_the_finder_and_steps_in_parts_work_together(held: int) -> None:
    net, finder, steps = Large(), BatchSizeFinder(), AdaptiveSteps()
    with brim.budget(brim.memory_stats("cpu").allocated + ROOM, device="cpu"):
        trainer(finder, steps, max_epochs=1).fit(net)
    assert finder.optimal_batch_size == 64


def test_what_the_finder_cannot_find_is_an_error() -> None:
    class Fixed(Large):
        def train_dataloader(self) -> Any:
            return DataLoader(self.loader().dataset, batch_size=4)

    net = Large()
    with pytest.raises(ValueError, match="batch_arg_name is 'bs', which neither"):
        trainer(BatchSizeFinder(batch_arg_name="bs")).fit(net)
    with pytest.raises(ValueError, match="not where they are passed to the trainer"):
        trainer(BatchSizeFinder()).fit(net, net.loader())
    with pytest.raises(ValueError, match="gives batches of 4 samples whatever batch_size is"):
        trainer(BatchSizeFinder()).fit(Fixed())
    with pytest.warns(UserWarning, match="stays as it is"):
        trainer(BatchSizeFinder(), fast_dev_run=True).fit(net)
    with pytest.raises(ValueError, match="mode must be 'power' or 'binsearch', got 'fast'"):
        BatchSizeFinder("fast")
    with pytest.raises(ValueError, match="margin must be from 0 to 1"):
        BatchSizeFinder(margin=1.0)


def test_the_arguments_are_those_of_lightnings_finder() -> None:
    import inspect

    theirs = inspect.signature(lightning.pytorch.callbacks.BatchSizeFinder).parameters
    ours = inspect.signature(BatchSizeFinder).parameters
    assert {name: p.default for name, p in ours.items()} == {
        n: p.default for n, p in theirs.items()
    }
