"""Callbacks for Lightning: the batch size that fits, and training steps in parts.

All of this is slow, since importing Lightning is; conftest.py leaves the file out.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import brim
from brim.data import PackedBatchSampler

pytest.importorskip("lightning")

import lightning
import lightning.pytorch.callbacks

from brim.integrations.lightning import AdaptiveSteps, BatchSizeFinder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:::(lightning|pytorch_lightning)"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|pin_memory|litlogger|log_every_n_steps)"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class Steps:
    """A module for either package; it keeps the sizes of the batches that it sees."""

    def __init__(self, samples: int = 64, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_size, self.samples, self.settings = 8, samples, settings
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.double()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.seen.append(len(x))
        error = (self.net(x) - y).square()
        loss = error.sum() if self.settings.get("sum") else error.mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", error.max(), reduce_fx="max", on_step=True)
        return {"loss": loss, "errors": error.detach()} if self.settings.get("dict") else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(len(batch[0]))
        self.log("val", self.net(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch: Any) -> torch.Tensor:
        self.seen.append(len(batch[0]))
        return self.net(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def loader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(self.samples, 8, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size)

    train_dataloader = predict_dataloader = test_dataloader = val_dataloader = loader


class Net(Steps, lightning.LightningModule):
    pass


class Watch(lightning.pytorch.callbacks.Callback):
    """What other callbacks see."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.outputs: list[Any] = []
        self.backwards = 0

    def on_after_backward(self, *_: Any) -> None:
        self.backwards += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)
        self.logged.append({name: float(v) for name, v in trainer.callback_metrics.items()})


def trainer(*callbacks: Any, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    defaults = {"accelerator": "cpu", "max_epochs": 2, "limit_val_batches": 0}
    return lightning.Trainer(
        **{**defaults, **quiet, "enable_model_summary": False, **settings},
        callbacks=list(callbacks),
    )


def train(net: Net, *callbacks: Any, **settings: Any) -> tuple[list[torch.Tensor], Watch]:
    watch = Watch()
    trainer(*callbacks, watch, **settings).fit(net)
    return [p.detach().clone() for p in net.parameters()], watch


# ---------------------------------------------------------------- steps in parts

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "accumulation": ({"dict": True}, {}, {"accumulate_grad_batches": 3}),
    "clipping": ({}, {}, {"gradient_clip_val": 0.01}),
    "sum": ({"sum": True}, {"reduction": "sum"}, {}),
}


@pytest.mark.parametrize(("net", "options", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_training_in_parts_is_the_same_training(
    net: dict[str, Any], options: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected, plain = train(Net(**net), **settings)
    whole = Net(**net)
    weights, watch = train(whole, AdaptiveSteps(**options), **settings)
    assert all(map(torch.equal, weights, expected))
    assert watch.logged == plain.logged
    steps = AdaptiveSteps(size=3, **options)
    parts = Net(**net)
    weights, watch = train(parts, steps, **settings)
    assert max(parts.seen) == 3
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=1e-12)
    assert watch.backwards == plain.backwards
    for ours, theirs in zip(watch.outputs, plain.outputs, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[name].allclose(theirs[name]) for name in theirs)
    if "sum" not in net:
        for ours, theirs in zip(watch.logged, plain.logged, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_batch_that_does_not_fit_is_split(held: int) -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 64
            self.net = nn.Sequential(nn.Linear(8, 2000), nn.Tanh(), nn.Linear(2000, 1)).double()

    torch.manual_seed(0)
    plain, net = Wide(), Wide()
    net.load_state_dict(plain.state_dict())
    expected, seen = train(plain)
    steps = AdaptiveSteps()
    with brim.budget(brim.memory_stats("cpu").allocated + 2 * 2**20, device="cpu"):
        weights, watch = train(net, steps)
    assert steps.step is not None
    assert steps.step.size < 64
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=1e-12)
    assert len(watch.logged) == len(seen.logged)  # failed attempts logged nothing
    for mine, other in zip(watch.logged, seen.logged, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)


def test_mixed_precision_with_a_scaler() -> None:
    plugin = lightning.pytorch.plugins.MixedPrecision

    def precision() -> Any:
        made = plugin("bf16-mixed", "cpu")
        made.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        return made

    expected, _ = train(Net(), plugins=precision())
    weights, _ = train(Net(), AdaptiveSteps(), plugins=precision())
    assert all(map(torch.equal, weights, expected))
    weights, _ = train(Net(), AdaptiveSteps(size=5), plugins=precision())
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=0.05, atol=1e-3)


def test_metrics_count_each_sample_once() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()
            self.values: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            prediction = self.net(batch[0])
            self.error(prediction.flatten(), batch[1].flatten())
            self.log("mse", self.error, on_step=False, on_epoch=True)
            return (prediction - batch[1]).square().mean()

    results = []
    for callback, at in (
        (AdaptiveSteps(), 10**9),
        (AdaptiveSteps(size=3), 10**9),
        (AdaptiveSteps(), 30),
    ):
        made = trainer(callback, max_epochs=1)
        brim.install_cpu_allocator()
        with brim.testing.inject_oom(at=at):
            made.fit(Measured())
        results.append(float(made.callback_metrics["mse"]))
    assert results == pytest.approx([results[0]] * 3, rel=1e-6)


def test_a_skipped_batch_stays_skipped() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    expected, _ = train(Skips())
    weights, _ = train(Skips(), AdaptiveSteps())
    assert all(map(torch.equal, weights, expected))
    with pytest.raises(ValueError, match="None for a part"):
        train(Skips(), AdaptiveSteps(size=2))


def test_what_cannot_be_in_parts_is_refused() -> None:
    class Manual(Net):
        automatic_optimization = False

    class Backward(Net):
        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

    class Contrast(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (batch[0] @ self.net[0].weight.T).var(0, correction=0).mean()

    with pytest.raises(ValueError, match=r"needs automatic optimization; use brim\.Microbatches"):
        train(Manual(), AdaptiveSteps())
    with pytest.raises(ValueError, match="Backward has a backward of its own"):
        train(Backward(), AdaptiveSteps())
    train(Contrast(), AdaptiveSteps())  # fits
    with pytest.raises(ValueError, match="does not follow from their own"):
        train(Contrast(), AdaptiveSteps(size=4))
    net = Net()
    net.norm = nn.BatchNorm1d(1)
    with pytest.raises(ValueError, match=r"norm \(BatchNorm1d\)"):
        train(net, AdaptiveSteps())
    with pytest.raises(ValueError, match="count is for a mean"):
        AdaptiveSteps("sum", count=len)
    with pytest.raises(TypeError, match="unknown option"):
        AdaptiveSteps(sice=3)


# ---------------------------------------------------------------- the batch size


class Large(Net):
    """Needs 64 KiB for each sample."""

    def __init__(self, samples: int = 400) -> None:
        super().__init__(samples)
        self.steps_done = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        kept = torch.rand(len(batch[0]), 2**13, dtype=torch.float64)
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        return loss + 0 * kept[0, 0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(len(batch[0]), 2**13, dtype=torch.float64)
        super().validation_step(batch, batch_idx)

    test_step = validation_step

    def predict_step(self, batch: Any) -> torch.Tensor:
        torch.rand(len(batch[0]), 2**13, dtype=torch.float64)
        return super().predict_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


ROOM = 8 * 2**20  # some 125 samples


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


# ---------------------------------------------------------------- the other package, other ranks


def test_programs_that_import_pytorch_lightning() -> None:
    other = pytest.importorskip("pytorch_lightning")
    ours = importlib.import_module("brim.integrations.pytorch_lightning")

    class Other(Steps, other.LightningModule):  # type: ignore[misc, name-defined]
        pass

    def fit(*callbacks: Any) -> Any:
        net = Other()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        run = other.Trainer(
            accelerator="cpu",
            max_epochs=1,
            limit_val_batches=0,
            enable_model_summary=False,
            callbacks=list(callbacks),
            **quiet,
        )
        run.fit(net)
        return net

    expected = fit()
    parts = fit(ours.AdaptiveSteps(size=3))
    assert max(parts.seen) == 3
    for a, b in zip(parts.parameters(), expected.parameters(), strict=True):
        assert a.allclose(b, rtol=1e-12)
    finder = ours.BatchSizeFinder(max_val=32)
    assert fit(finder).batch_size == finder.optimal_batch_size == 32


def test_pytorch_lightning_gets_the_same_sampler_back() -> None:
    data = pytest.importorskip("pytorch_lightning.utilities.data")
    sampler = PackedBatchSampler([1, 2, 3, 4, 5, 6], 7, shuffle=True, seed=1)
    loader = DataLoader(range(6), batch_sampler=sampler)
    theirs = DistributedSampler(range(6), num_replicas=2, rank=1)
    assert data._update_dataloader(loader, theirs).batch_sampler is sampler
    assert (sampler.rank, sampler.world_size) == (1, 2)


JOB = """
import json, os, sys, torch
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
import brim
from test_integrations_lightning import Large, Net, trainer
from brim.integrations.lightning import AdaptiveSteps, BatchSizeFinder

rank = int(os.environ["RANK"])
result = []
for callbacks in ([], [AdaptiveSteps()], [AdaptiveSteps(size=3)]):
    net = Net()
    made = trainer(*callbacks, strategy="ddp", devices=2, accumulate_grad_batches=2)
    made.fit(net)
    weights = [float(p.detach().norm()) for p in net.parameters()]
    result.append([weights, float(made.callback_metrics["loss_epoch"]), max(net.seen)])
finder, net = BatchSizeFinder("binsearch", margin=0.0), Large(800)
brim.install_cpu_allocator()
room = [8, 4][rank] * 2**20
with brim.budget(brim.memory_stats("cpu").allocated + room, device="cpu"):
    trainer(finder, strategy="ddp", devices=2, max_epochs=1).fit(net)
result.append([finder.optimal_batch_size, max(net.seen)])
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(result, file)
torch.distributed.barrier()
os._exit(0)  # gloo's threads can outlive the interpreter
"""


def test_two_ranks(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(JOB)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, program, tmp_path, Path(__file__).parent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for rank in range(2):
        plain, whole, parts, (size, largest) = json.loads((tmp_path / f"{rank}.json").read_text())
        for ours in (whole, parts):
            assert ours[0] == pytest.approx(plain[0], rel=1e-9)
            assert ours[1] == pytest.approx(plain[1], rel=1e-6)
        assert (plain[2], parts[2]) == (8, 3)
        found.append(size)
        assert (largest > size) == (rank == 0)  # which has more memory
    assert found[0] == found[1]
    assert 50 <= found[0] <= 64
