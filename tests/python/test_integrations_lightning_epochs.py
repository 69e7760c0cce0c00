"""Lightning and samplers whose epochs differ in the number of their batches.

All of this is slow, since importing Lightning is; conftest.py leaves the file out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

pytest.importorskip("lightning")

import lightning

from .lightning_modules import MARKS

pytestmark = MARKS

SAMPLES, EPOCHS = 300, 4
SIZES = torch.randint(5, 400, (SAMPLES,), generator=torch.Generator().manual_seed(0))


class Epochal:
    """A foreign order that is another one in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(SAMPLES, generator=generator).tolist())


MAKERS: dict[str, Callable[[], Any]] = {
    "ordered": lambda: SizeAwareBatchSampler(range(SAMPLES), SIZES, 1000, shuffle=True, seed=0),
    "foreign": lambda: SizeAwareBatchSampler(Epochal(), SIZES, 1000),
    "drawn": lambda: SizeAwareBatchSampler(
        RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(1)),  # type: ignore[arg-type]
        SIZES,
        1000,
    ),
    "packed": lambda: PackedBatchSampler(SIZES, 1000, cost="padded", shuffle=True, seed=0),
    "bucket": lambda: BucketBatchSampler(SIZES, list(range(0, 401, 50)), max_total_size=1000),
}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = [[] for _ in range(EPOCHS)]
        self.validated: list[list[int]] = [[] for _ in range(EPOCHS)]
        self.last_batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch = batch[0] if isinstance(batch, list) else batch
        self.seen[self.current_epoch] += batch.tolist()
        self.last_batches += self.trainer.is_last_batch
        return self.layer(batch.float()[:, None] / SAMPLES).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated[self.current_epoch] += batch.tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def trainer(**options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": EPOCHS, "enable_checkpointing": False, **options}
    return lightning.Trainer(accelerator="cpu", devices=1, **quiet, **options)


def load(kind: str, loader: Any = DataLoader) -> Any:
    return loader(range(SAMPLES), batch_sampler=MAKERS[kind](), collate_fn=torch.tensor)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_epoch_has_all_samples_and_ends_with_validation(kind: str) -> None:
    module = Module()
    trainer().fit(module, load(kind), load("bucket"))
    for epoch in range(EPOCHS):
        assert sorted(module.seen[epoch]) == list(range(SAMPLES))
        assert sorted(module.validated[epoch]) == list(range(SAMPLES))
    assert module.last_batches == EPOCHS


def test_a_limit_of_the_user_stays() -> None:
    module = Module()
    batches = len(MAKERS["packed"]())
    trainer(limit_train_batches=batches, limit_val_batches=3).fit(
        module, load("packed"), load("bucket")
    )
    expected = MAKERS["packed"]()
    for epoch in range(EPOCHS):
        expected.set_epoch(epoch)
        taken = [index for batch in list(expected)[:batches] for index in batch]
        assert module.seen[epoch] == taken
    assert all(0 < len(part) < SAMPLES for part in module.validated)


def test_two_loaders_both_give_all() -> None:
    module = Module()
    trainer().fit(module, [load("packed"), load("bucket")])
    for epoch in range(EPOCHS):
        assert set(module.seen[epoch]) == set(range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["ordered", "packed", "bucket"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_resumed_epoch_and_those_after_it_have_all_samples(
    kind: str, workers: int, tmp_path: Path
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        sampler = MAKERS[kind]()
        if kind == "bucket":
            sampler = BucketBatchSampler(SIZES, [0, 200, 401], max_total_size=1000, seed=3)
        return stateful.StatefulDataLoader(
            range(SAMPLES), batch_sampler=sampler, collate_fn=torch.tensor, num_workers=workers
        )

    batches = len(loader().batch_sampler)
    stop = batches + batches // 3
    saved = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=stop, save_top_k=-1
    )
    before, after = Module(), Module()
    trainer(max_steps=stop, callbacks=[saved], enable_checkpointing=True).fit(before, loader())
    (file,) = tmp_path.glob("*.ckpt")
    trainer(val_check_interval=batches // 2).fit(
        after, loader(), load("packed"), ckpt_path=str(file), weights_only=False
    )
    assert before.seen[1]
    for epoch in range(1, EPOCHS):
        assert sorted(before.seen[epoch] + after.seen[epoch]) == list(range(SAMPLES))
