"""Modules and trainers that the tests of the Lightning integration share."""

from __future__ import annotations

from typing import Any

import lightning
import lightning.pytorch.callbacks
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:::(lightning|pytorch_lightning)"),
    # By their text: those that pytest.warns does not expect are raised again, by another module.
    pytest.mark.filterwarnings(
        "ignore:.*(num_workers|pin_memory|litlogger|log_every_n_steps|GPU available but not used)"
    ),
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
