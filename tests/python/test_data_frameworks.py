"""Samplers in jobs of several processes, and in the frameworks that run those."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from brim.data import BucketBatchSampler, PackedBatchSampler, SizeAwareBatchSampler

from .torchrun import results_of, torchrun

SIZES = [(7 * i) % 19 + 1 for i in range(97)]
MAKERS: dict[str, Callable[..., Any]] = {
    "ordered": lambda **o: SizeAwareBatchSampler(range(97), SIZES, 40, **o),
    "packed": lambda **o: PackedBatchSampler(SIZES, 40, shuffle=True, **o),
    "bucket": lambda **o: BucketBatchSampler(SIZES, [0, 5, 10, 20], max_total_size=40, **o),
}


@contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group that only pretends to communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def samples_of(batches: Any) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


# ---------------------------------------------------------------- the process group


@pytest.mark.parametrize("kind", MAKERS)
def test_the_process_group_says_which_rank_this_is(kind: str) -> None:
    make = MAKERS[kind]
    shares = []
    for rank in range(3):
        early = make(seed=1)
        with process_group(rank, 3):
            for sampler in (early, make(seed=1)):  # made before the group, and after
                assert (sampler.rank, sampler.world_size) == (rank, 3)
                sampler.set_epoch(0)
                assert len(sampler) == len(list(sampler))
                assert list(sampler) == list(make(seed=1, rank=rank, world_size=3))
            shares.append(list(early))
        assert (early.rank, early.world_size) == (0, 1)
    assert samples_of(itertools.chain(*shares)) == list(range(97))


def test_arguments_win_over_the_process_group() -> None:
    with process_group(1, 2):
        sampler = MAKERS["packed"](rank=0, world_size=1)
        assert samples_of(sampler) == list(range(97))
        assert MAKERS["packed"](world_size=5).rank == 1
        with pytest.raises(ValueError, match=r"from 0 to world_size - 1 = 1, got 7"):
            MAKERS["packed"](rank=7)


def test_ranks_without_a_seed_shuffle_alike_and_anew_in_each_epoch() -> None:
    epochs: list[list[Any]] = [[], []]
    for rank in range(2):
        torch.manual_seed(rank)
        with process_group(rank, 2):
            sampler = MAKERS["bucket"]()
            for shares in epochs:
                shares.append(list(sampler))
    assert epochs[0] != epochs[1]
    for shares in epochs:
        assert samples_of(itertools.chain(*shares)) == list(range(97))
    with process_group(0, 2), pytest.raises(ValueError, match="seed must be given"):
        MAKERS["bucket"](generator=torch.Generator())


def test_a_loaded_position_is_for_the_ranks_that_iterate() -> None:
    sampler = MAKERS["packed"]()
    running = iter(sampler)
    done = [next(running) for _ in range(3)]
    shares = []
    for rank in range(2):
        resumed = MAKERS["packed"]()
        resumed.load_state_dict(sampler.state_dict())
        with process_group(rank, 2):
            shares += list(resumed)
    assert samples_of(done + shares) == list(range(97))


def test_orders_that_ranks_would_not_share_are_refused() -> None:
    with process_group(1, 2):
        with pytest.raises(
            ValueError, match=r"RandomSampler without a generator.*2 ranks.*shuffle"
        ):
            list(SizeAwareBatchSampler(RandomSampler(SIZES), SIZES, 40))
        shared = DistributedSampler(SIZES, num_replicas=2, rank=1, shuffle=False)
        with pytest.raises(ValueError, match=r"DistributedSampler.*world_size=2.*range\(n\)"):
            SizeAwareBatchSampler(shared, SIZES, 40, world_size=2)
        with pytest.warns(UserWarning, match="DistributedSampler"):
            sampler = SizeAwareBatchSampler(shared, SIZES, 40)
        assert samples_of(sampler) == sorted(shared)  # and not a share of the share


# ---------------------------------------------------------------- Lightning


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.fabric.utilities.data", "lightning.pytorch"])
@pytest.mark.parametrize("kind", MAKERS)
def test_lightning_gets_the_same_sampler_back(kind: str, package: str) -> None:
    pytest.importorskip(package)
    from lightning.fabric.utilities.data import _update_dataloader as of_fabric
    from lightning.pytorch.utilities.data import _update_dataloader as of_pytorch

    update = of_pytorch if package == "lightning.pytorch" else of_fabric
    shares = []
    for rank in range(2):
        sampler = MAKERS[kind](seed=3)
        loader = DataLoader(range(97), batch_sampler=sampler, collate_fn=list)
        theirs = DistributedSampler(range(97), num_replicas=2, rank=rank)
        loader = update(loader, theirs)
        assert loader.batch_sampler is sampler
        shares += list(loader)
        fixed = MAKERS[kind](seed=3, rank=4, world_size=5)
        assert update(DataLoader(range(97), batch_sampler=fixed), theirs).batch_sampler.rank == 4
    assert samples_of(shares) == list(range(97))


@pytest.mark.slow
def test_lightning_predicts_with_all_samples_or_warns() -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.trainer.states import RunningStage
    from lightning.pytorch.utilities.data import _update_dataloader

    def predict(sampler: Any) -> list[int]:
        loader = DataLoader(range(97), batch_sampler=sampler, collate_fn=list)
        return samples_of(_update_dataloader(loader, loader.sampler, mode=RunningStage.PREDICTING))

    for make in MAKERS.values():
        assert predict(make()) == list(range(97))
    dropping = BucketBatchSampler(SIZES, [0, 5, 20], batch_size=4, drop_last=True)
    with pytest.warns(UserWarning, match="predictions might be incomplete"):
        predict(dropping)


# ---------------------------------------------------------------- accelerate


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("given", [False, True])
def test_accelerate_gives_each_process_its_own_batches(
    kind: str, even_batches: bool, given: bool
) -> None:
    module = pytest.importorskip("accelerate.data_loader")
    shares, counts = [], set()
    for rank in range(3):
        ranks = {"rank": rank, "world_size": 3} if given else {}
        sampler = MAKERS[kind](**ranks)
        shard = module.BatchSamplerShard(sampler, 3, rank, even_batches=even_batches)
        with process_group(rank, 3):
            counts.add(len(shard))
            shares.append(list(shard))
            assert len(shares[-1]) in counts
            sampler.set_epoch(0)
            assert list(sampler) == shares[-1], "the same without accelerate"
    assert len(counts) == 1
    assert samples_of(itertools.chain(*shares)) == list(range(97))


def test_a_state_within_accelerate_counts_this_processs_batches() -> None:
    module = pytest.importorskip("accelerate.data_loader")
    shares = []
    for rank in range(2):
        sampler = MAKERS["packed"](seed=1)
        running = iter(module.BatchSamplerShard(sampler, 2, rank))
        shares += [next(running) for _ in range(3)]
        state = sampler.state_dict(batches=2)
        resumed = MAKERS["packed"](seed=1)
        resumed.load_state_dict(state)
        rest = list(module.BatchSamplerShard(resumed, 2, rank))
        assert rest[0] == shares.pop()
        shares += rest
    assert samples_of(shares) == list(range(97))


def test_what_accelerate_would_lose_or_overfill_is_refused() -> None:
    module = pytest.importorskip("accelerate.data_loader")
    sampler = MAKERS["packed"](rank=1, world_size=4)
    with pytest.raises(ValueError, match=r"2 processes.*number 0.*rank=1 and world_size=4.*leave"):
        list(module.BatchSamplerShard(sampler, 2, 0))
    alone = MAKERS["ordered"](rank=0, world_size=1)  # all batches, for accelerate to share out
    halves = [list(module.BatchSamplerShard(alone, 2, rank, even_batches=False)) for rank in (0, 1)]
    assert samples_of(itertools.chain(*halves)) == list(range(97))

    class DataLoaderDispatcher:
        """Its loop only: the real one needs a real process group."""

        def __iter__(self) -> Iterator[Any]: ...

    exec(
        "def __iter__(self): return iter(self.sampler)",
        module.__dict__,
        names := {},  # type: ignore[var-annotated]
    )
    DataLoaderDispatcher.__iter__ = names["__iter__"]  # type: ignore[method-assign]
    dispatcher: Any = DataLoaderDispatcher()
    dispatcher.sampler = sampler
    with pytest.raises(ValueError, match="dispatch_batches=False"):
        iter(dispatcher)


# ---------------------------------------------------------------- transformers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", MAKERS)
def test_a_trainer_of_transformers_trains_on_all_samples_of_every_epoch(
    kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    seen: list[list[int]] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, batch: torch.Tensor) -> Any:
            seen[-1].extend(batch.tolist())
            return {"loss": self.layer(batch[:, None].float()).mean()}

    options = {} if kind == "packed" else {"seed": 1}
    sampler = MAKERS[kind](**options, **({"shuffle": True} if kind == "ordered" else {}))
    counts = set()
    for epoch in range(6):
        sampler.set_epoch(epoch)
        counts.add(len(sampler))
    sampler.set_epoch(0)
    assert len(counts) > 1, "the test shows nothing"

    class Sized(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            collate = lambda batch: {"batch": torch.tensor(batch)}  # noqa: E731
            loader = DataLoader(range(97), batch_sampler=sampler, collate_fn=collate)
            return self.accelerator.prepare(loader)

    class Count(transformers.TrainerCallback):  # type: ignore[misc]
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            seen.append([])

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=6,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-6,
        logging_strategy="no",
    )
    Sized(Model(), arguments, train_dataset=range(97), callbacks=[Count()]).train()
    assert [sorted(epoch) for epoch in seen] == [list(range(97))] * 6


# ---------------------------------------------------------------- torchdata


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_stateful_dataloader_resumes(kind: str, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def load() -> Any:
        sampler = MAKERS[kind](seed=1)
        return stateful.StatefulDataLoader(
            range(97), batch_sampler=sampler, collate_fn=list, num_workers=workers
        )

    whole = list(load())
    loader = load()
    done = list(itertools.islice(loader, 4))
    resumed = load()
    resumed.load_state_dict(loader.state_dict())
    assert done + list(resumed) == whole


@pytest.mark.parametrize("kind", MAKERS)
def test_nodes_of_torchdata_resume_and_count_epochs(kind: str) -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def load() -> Any:
        wrapped = nodes.SamplerWrapper(MAKERS[kind](seed=1))
        return nodes.Loader(nodes.Prefetcher(wrapped, prefetch_factor=3))

    loader = load()
    epochs = [list(loader) for _ in range(2)]
    assert (epochs[0] == epochs[1]) == (kind == "ordered")
    stopped = load()
    done = list(itertools.islice(stopped, 4))
    resumed = load()
    resumed.load_state_dict(stopped.state_dict())
    assert done + list(resumed) == epochs[0]
    assert list(resumed) == epochs[1]


# ---------------------------------------------------------------- whole jobs

PRELUDE = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from brim.data import BucketBatchSampler, PackedBatchSampler

torch.set_num_threads(1)
SIZES = [(7 * i) % 19 + 1 for i in range(97)]
seen = [[]]
rank = int(os.environ["RANK"])

def loader(**options):
    sampler = PackedBatchSampler(SIZES, 40, shuffle=True, **options)
    return DataLoader(range(97), batch_sampler=sampler, collate_fn=torch.tensor)

def finish():
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        json.dump(seen, file)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads can outlive the interpreter
"""

LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
    def training_step(self, batch):
        seen[-1].append(batch.tolist())
        return self.layer(batch[:, None].float()).mean()
    def on_train_epoch_end(self):
        seen.append([])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), loader())
seen.pop()
finish()
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
prepared = accelerator.prepare(loader())
for _ in range(2):
    for batch in prepared:
        count = count if seen[-1] else len(prepared)
        seen[-1].append(batch.tolist())
    assert count == len(seen[-1])
    seen.append([])
seen.pop()
finish()
"""

TRAINER = """
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
    def forward(self, batch):
        seen[-1].append(batch.tolist())
        return {"loss": self.layer(batch[:, None].float()).mean()}

def load():
    sampler = PackedBatchSampler(SIZES, 40, shuffle=True)
    return DataLoader(
        range(97), batch_sampler=sampler, collate_fn=lambda batch: {"batch": torch.tensor(batch)}
    )

class Sized(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(load())

from transformers import TrainerCallback
class Count(TrainerCallback):
    def on_epoch_end(self, *args, **kwargs):
        seen.append([])

arguments = TrainingArguments(
    sys.argv[1], num_train_epochs=2, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True, learning_rate=1e-6, logging_strategy="no",
)
Sized(Model(), arguments, train_dataset=range(97), callbacks=[Count()]).train()
seen.pop()
finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "script"),
    [("lightning", LIGHTNING), ("accelerate", ACCELERATE), ("transformers", TRAINER)],
)
def test_two_processes_train_on_each_sample_once(package: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate" if package == "transformers" else package)
    pytest.importorskip(package)
    program = tmp_path / "train.py"
    program.write_text(PRELUDE + script)
    torchrun(program, tmp_path)
    shares = results_of(tmp_path)
    epochs = []
    for mine, others in zip(*shares, strict=True):
        assert len(mine) == len(others)
        assert samples_of(mine + others) == list(range(97))
        epochs.append(mine)
    assert len(epochs) == 2
    assert epochs[0] != epochs[1]
