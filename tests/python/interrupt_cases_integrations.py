"""Brim inside other frameworks, as calls that interrupts are tried at."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import signal
import warnings
from typing import Any

import torch
from torch import nn

import brim
from brim.data import PackedBatchSampler, pack_stream
from brim.integrations.accelerate import find_executable_batch_size

from .interrupt_cases import LENGTHS, case, fails_above_two
from .interrupt_cases_tools import Folder, needs
from .interrupts import Case, state_of_module


@case
def executable_batch_size() -> Case:
    find = functools.partial(find_executable_batch_size, starting_batch_size=8)

    def call() -> Any:
        sizes = iter([4, 2, 0])
        slowly = find(reduce_batch_size_fn=lambda: next(sizes))(fails_above_two)
        return find(fails_above_two)(), slowly()

    return Case(call)


@needs("pyarrow")
def arrow_files() -> Case:
    import pyarrow as pa
    import pyarrow.parquet

    from brim.integrations.arrow import arrow_shards, column_lengths
    from brim.integrations.datasets import lengths_of

    folder = Folder()
    table = pa.table({"ids": [list(range(length)) for length in LENGTHS]})
    file = folder.path / "part.parquet"
    pa.parquet.write_table(table, file, row_group_size=4)

    def call() -> Any:
        rows = arrow_shards([file], row_groups=True, shuffle=True)
        blocks = arrow_shards(file, ["ids"], blocks=True)
        options: dict[str, Any] = {"max_total_size": 18, "sharded": "divide"}
        packed = pack_stream(rows, sizeof=lambda row: len(row["ids"]), **options)
        in_blocks = pack_stream(blocks, sizeof=column_lengths("ids"), blocks=True, **options)
        return (
            lengths_of(table, "ids").tolist(),
            [[len(row["ids"]) for row in batch] for batch in packed],
            [[len(part) for part in batch] for batch in in_blocks],
        )

    return Case(call, leaves=folder.leaves)


@needs("datasets")
def streamed_dataset() -> Case:
    import datasets

    from brim.integrations.datasets import WholeStream, lengths_of

    whole = datasets.Dataset.from_dict({"text": ["a" * length for length in LENGTHS]})
    stream = WholeStream(whole.to_iterable_dataset())
    packed = pack_stream(stream, 18, sizeof=lambda sample: len(sample["text"]))

    def call() -> Any:
        packed.set_epoch(0)
        return lengths_of(whole.select([3, 1]), "text").tolist(), list(packed)

    return Case(call)


@needs("torchdata")
def torchdata_nodes() -> Case:
    from torchdata import nodes

    def call() -> Any:
        source = nodes.SamplerWrapper(PackedBatchSampler(LENGTHS, 18, seed=1))
        loader = nodes.Loader(nodes.ParallelMapper(source, sorted, num_workers=0))
        batches = list(loader)
        return batches, len(loader.state_dict()), list(loader)

    return Case(call)


@needs("torch_geometric")
def batches_of_graphs() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its import calls torch.jit.script
        from torch_geometric.data import Batch

    from brim.integrations import pyg

    from .graph_samples import graphs

    data = graphs(12)

    def work(batch: Any) -> Any:
        return (batch.x @ torch.ones(4, 8))[batch.edge_index[0]].square().sum()

    def call() -> Any:
        sampler = pyg.graph_sampler(data, max_nodes=80, max_edges=900)
        held = brim.memory_stats("cpu").allocated
        fitted = pyg.fit_graph_sampler(data, work, held + 200_000, "cpu", progress=False, probes=3)
        batch = Batch.from_data_list(data[:4])
        net = nn.Linear(4, 1)
        step = brim.Microbatches(
            lambda part: net(part.x).square().sum(),
            model=net,
            reduction="sum",
            size=2,
            split=pyg.part,
            length=pyg.length,
            check=False,
        )
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        return list(sampler), sum(map(len, fitted)), step(batch).item()

    return Case(call)


def hooks_of_lightning(trainer: Any, module: Any) -> dict[str, Any]:
    """What a callback must not leave on."""
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    return {
        "closures": "_make_closure" in vars(optimization),
        "log": "log" in vars(module),
        "callbacks": len(trainer.callbacks),
        "loggers": len(trainer.loggers),
        "restarting": trainer.fit_loop.restarting,
        "hooks": [type(each).__name__ for each in module._forward_pre_hooks.values()],
    }


def fitted_by_lightning(callback: Any, *others: Any) -> Any:
    """A trainer and its module; what Lightning makes of Ctrl-C is a KeyboardInterrupt again."""
    from .lightning_modules import Net, trainer

    module = Net(samples=16)
    made = trainer(callback, *others, max_epochs=1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it tells of each call

    def fit() -> None:
        handler = signal.getsignal(signal.SIGINT)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made.fit(module)
        except SystemExit:
            signal.signal(signal.SIGINT, handler)  # it is ignored from then on
            raise KeyboardInterrupt from None

    return made, module, fit


@needs("lightning")
def lightning_steps() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from brim.integrations.lightning import AdaptiveSteps
    latest: list[Any] = []

    def call() -> Any:
        trainer, module, fit = fitted_by_lightning(AdaptiveSteps(size=3))
        latest[:] = trainer, module
        fit()
        return [each.tolist() for each in module.parameters()]

    return Case(call, leaves=lambda: hooks_of_lightning(*latest))


@needs("lightning")
def lightning_finder() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning.pytorch.callbacks import Callback

        from brim.integrations.lightning import BatchSizeFinder

    class FoundError(Exception):
        pass

    class Stop(Callback):
        def on_train_start(self, *_: Any) -> None:
            raise FoundError

    latest: list[Any] = []

    def leaves() -> dict[str, Any]:
        trainer, module = latest
        assert module.batch_size in (8, 15)
        weights = [each.tolist() for each in module.parameters()]
        gradients = [each.grad for each in module.parameters()]
        state = [dict(each.state) for each in trainer.optimizers]
        return {
            **hooks_of_lightning(trainer, module),
            "weights": weights,
            "gradients": gradients,
            "optimizers": any(state),
        }

    def call() -> Any:
        finder = BatchSizeFinder("binsearch", max_val=16)
        trainer, module, fit = fitted_by_lightning(finder, Stop())
        latest[:] = trainer, module
        with contextlib.suppress(FoundError):
            fit()
        return module.batch_size, finder.optimal_batch_size

    return Case(call, leaves=leaves)


@needs("transformers", "accelerate")
def transformers_trainer() -> Case:
    import transformers

    from brim.integrations.transformers import BrimCallback

    from .test_integrations_transformers import llama, tokens

    folder = Folder()
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    steps = {"per_device_train_batch_size": 6, "max_steps": 1, "optim": "sgd"}
    arguments = transformers.TrainingArguments(str(folder.path), **quiet, **steps)
    latest: list[Any] = []

    def call() -> Any:
        gc.unfreeze()  # the first trainer, too, is garbage by now
        net = llama(num_hidden_layers=1)
        options: dict[str, Any] = {"callbacks": [BrimCallback(size=4)], "train_dataset": tokens()}
        trainer = transformers.Trainer(net, arguments, **options)
        trainer.remove_callback(transformers.PrinterCallback)
        latest[:] = trainer, net
        trainer.train()
        return [each.sum().item() for each in net.parameters()]

    def leaves() -> dict[str, Any]:
        trainer, net = latest
        hooks = [name for name in state_of_module(net) if "hook" in name]
        return {
            "hooks": hooks,
            "backward": "backward" in vars(trainer.accelerator),
            "training": net.training,
        }

    return Case(call, leaves=leaves)
