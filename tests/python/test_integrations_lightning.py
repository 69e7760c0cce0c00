"""The callbacks for Lightning in its other package, and on several ranks.

All of this is slow, since importing Lightning is; conftest.py leaves the file out.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from brim.data import PackedBatchSampler

pytest.importorskip("lightning")

from .lightning_modules import MARKS, Steps
from .torchrun import results_of, torchrun

pytestmark = MARKS


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
from lightning_modules import Large, Net, trainer
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
    torchrun(program, tmp_path, Path(__file__).parent)
    found = []
    for rank, (plain, whole, parts, (size, largest)) in enumerate(results_of(tmp_path)):
        for ours in (whole, parts):
            assert ours[0] == pytest.approx(plain[0], rel=1e-9)
            assert ours[1] == pytest.approx(plain[1], rel=1e-6)
        assert (plain[2], parts[2]) == (8, 3)
        found.append(size)
        assert (largest > size) == (rank == 0)  # which has more memory
    assert found[0] == found[1]
    assert 50 <= found[0] <= 64
