"""The batch size finder for Lightning, of either package."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from brim._arguments import positive, real
from brim._state.undo import Undo
from brim._state.undoing import Undoing, set_attribute
from brim.adapt import _parts, batch
from brim.adapt import range as adaptive_range
from brim.data.agree import apart
from brim.integrations._lightning_records import Records
from brim.memory import release_cached

_log = logging.getLogger("brim")
_ENDLESS = 2**62
_SETTLED = 1.01  # times the largest size so far: another trial would gain too little


class BatchSizeFinderLogic:
    """Finds the largest batch size that fits, when a trainer begins to fit, test or predict.

    In place of Lightning's `BatchSizeFinder`, with the same arguments. It measures steps with small
    batches, works out how memory grows, and goes to the largest size that fits. So it rarely runs
    out of memory, and never ends with a size larger than one that it has run. Weights, optimizers,
    random state and progress are as before afterwards; no checkpoint is written. Works under DDP
    too, where the least size of all ranks is taken.

    The size found is written to the attribute `batch_arg_name` of the module, its `hparams` and the
    data module, wherever there is one. After an error of the work each has its own as before.

    Args:
        mode: `"power"` for the largest `init_val` times a power of 2, `"binsearch"` for the largest
            size at all, less `margin`.
        steps_per_trial: how many steps are run with a size.
        init_val: the first size.
        max_trials: how many sizes are tried at most; about ten are enough.
        batch_arg_name: the attribute that holds the batch size.
        margin: the share of the size that is taken off in the mode `"binsearch"`.
        max_val: the largest size to try. The size of the data set is a limit too.

    Attributes:
        optimal_batch_size: the size found, `init_val` before.

    Example:
        >>> from brim.integrations.lightning import BatchSizeFinder
        >>> finder = BatchSizeFinder(mode="binsearch")
        >>> # trainer = Trainer(callbacks=[finder]); trainer.fit(module)
    """

    _package: Any  # lightning.pytorch or pytorch_lightning

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if mode not in ("power", "binsearch"):
            raise ValueError(f"mode must be 'power' or 'binsearch', got {mode!r}")
        if not 0 <= real("margin", margin) < 1:
            raise ValueError(f"margin must be from 0 to 1, 1 excluded, got {margin}")
        self._mode, self._margin, self._name = mode, margin, batch_arg_name
        self._steps = positive("steps_per_trial", steps_per_trial)
        self._trials = positive("max_trials", max_trials)
        self._most = positive("max_val", max_val)
        self._init = positive("init_val", init_val)
        self.optimal_batch_size = self._init

    # ---- where Lightning calls ---------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Check what can be checked before anything runs."""
        if not self._package.utilities.parsing.lightning_hasattr(pl_module, self._name):
            raise ValueError(
                f"batch_arg_name is {self._name!r}, which neither the module, its hparams nor the "
                "data module has"
            )
        if trainer._active_loop is not None and not trainer._active_loop._data_source.is_module():
            raise ValueError(
                "the batch size can be set only where the module or a data module makes the "
                "dataloaders, not where they are passed to the trainer"
            )
        if any(isinstance(each, torch.nn.SyncBatchNorm) for each in pl_module.modules()):
            raise ValueError("SyncBatchNorm waits for other ranks, which may try another size")
        kind = type(trainer.strategy).__name__
        if kind not in ("SingleDeviceStrategy", "DDPStrategy"):
            raise ValueError(f"the batch size is found on one device or under DDP, not in a {kind}")
        if trainer.world_size > 1 and stage == "fit" and not pl_module.automatic_optimization:
            raise ValueError(
                "under DDP the batch size is found with automatic optimization alone: the backward "
                "passes of a training_step's own wait for ranks that may try another size"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the size of the batches of `trainer.fit`, `test` or `predict`."""
        self.scale_batch_size(trainer, pl_module)

    on_test_start = on_predict_start = on_fit_start

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The same for `trainer.validate`; validation also runs during `trainer.fit`."""
        if trainer.state.fn == "validate":
            self.scale_batch_size(trainer, pl_module)

    def scale_batch_size(self, trainer: Any, pl_module: Any) -> None:
        """Find the size now, and set it; also for callbacks of your own that call it later."""
        if trainer.fast_dev_run:
            warnings.warn("fast_dev_run: the batch size stays as it is", stacklevel=2)
            return
        trial = _Trial(self._package, trainer, pl_module, self._name, self._steps)
        with Undoing() as after, _changes_of(trainer, pl_module) as undo:
            trial.put_size_back(undo)  # an error of the work leaves none of ours
            _silence(after, undo, self._package, trainer, pl_module)
            self.optimal_batch_size = trial.least_of_ranks(self._search(trial))
        trial.set_size(self.optimal_batch_size)
        trial.reload()
        release_cached(trial.device)  # blocks cut for other sizes would be in the way
        _log.info("batch size %d (%s)", self.optimal_batch_size, self._name)

    # ---- the search --------------------------------------------------------------------------

    def _search(self, trial: _Trial) -> int:
        trial.set_size(self._init)
        most = min(self._most, trial.samples())
        first = min(self._init, most)
        done: list[int] = []

        def part(start: int, end: int) -> None:
            """One part of a range, whose steps grow to the largest that fits."""
            size = trial(end - start)
            settled = end > first and size <= _SETTLED * max(done)
            done.append(size)
            if settled or size == most or len(done) >= self._trials:
                raise _FoundError

        part.__qualname__ = "BatchSizeFinder"  # for messages
        grow = adaptive_range(most, device=trial.device)(part)
        with suppress(_FoundError):
            grow(0, first)  # the least that shows how memory grows
            grow(first, _ENDLESS)
        if self._mode == "binsearch":
            return max(1, int(max(done) * (1 - self._margin)))
        power = first << max(max(done) // first, 1).bit_length() - 1
        halve = batch(power, strategy="halving", remember="none", device=trial.device)
        return halve(trial)()


class _FoundError(Exception):
    """Ends the search."""


class _Trial:
    """Runs a few steps with a batch size."""

    def __init__(self, package: Any, trainer: Any, module: Any, name: str, steps: int) -> None:
        self._utilities, self._call = package.utilities, package.trainer.call
        self._trainer, self._module, self._name, self._steps = trainer, module, name, steps
        self._loop = trainer._active_loop
        self._lengths: dict[int, int] = {}  # of batches, by the size that was set
        self.device = trainer.strategy.root_device

    def put_size_back(self, undo: Undoing) -> None:
        """When the block ends, each holder of the attribute has its own of now."""
        name, holders = self._name, self._utilities.parsing._lightning_get_all_attr_holders
        for holder in holders(self._module, name):
            if isinstance(holder, dict):
                undo.callback(functools.partial(holder.update, {name: holder[name]}))
            else:
                undo.callback(functools.partial(setattr, holder, name, getattr(holder, name)))

    def set_size(self, size: int) -> None:
        """In the module, its `hparams` and the data module: in all that have the attribute."""
        self._utilities.parsing.lightning_setattr(self._module, self._name, size)

    def samples(self) -> int:
        """How many samples the largest data set has."""
        found: list[Any] = [getattr(each, "dataset", None) for each in self._loader().flattened]
        sizes = [len(data) if hasattr(data, "__len__") else _ENDLESS for data in found]
        return int(max(sizes, default=_ENDLESS)) // int(self._trainer.world_size) or 1

    def __call__(self, size: int) -> int:
        self.set_size(size)
        with Undoing() as undo:
            apart(undo)
            self._without_collectives(undo)
            for number, (data, *_) in enumerate(islice(iter(self._loader()), self._steps)):
                if number == 0:
                    self._check_use(size, data)
                data = self._trainer.precision_plugin.convert_input(data)
                data = self._module._on_before_batch_transfer(data, dataloader_idx=0)
                data = self._call._call_strategy_hook(
                    self._trainer, "batch_to_device", data, dataloader_idx=0
                )
                self._step(data, number)
        return size

    def _loader(self) -> Any:
        loader = self._loop._data_source.dataloader()
        combined = self._utilities.combined_loader.CombinedLoader
        if isinstance(loader, combined):
            return loader
        return combined(loader, "max_size_cycle" if self._trainer.training else "sequential")

    def _check_use(self, size: int, data: Any) -> None:
        """A loader that does not know the attribute would fit at any size."""
        try:
            self._lengths[size] = _parts.length(data, 0)
        except (TypeError, ValueError):  # a batch that brim cannot count
            return
        if len(self._lengths) > 1 and len(set(self._lengths.values())) == 1:
            raise ValueError(
                f"the dataloader gives batches of {self._lengths[size]} samples whatever "
                f"{self._name} is: let it use {self._name}"
            )

    def _without_collectives(self, undo: Undoing) -> None:
        """No rank waits for another, which may try other sizes, or fail, until the block ends."""
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            set_attribute(undo, model, "require_forward_param_sync", False)
            set_attribute(undo, model, "require_backward_grad_sync", False)  # as in its no_sync()

    def _step(self, data: Any, number: int) -> None:
        trainer, loop = self._trainer, self._loop
        if not trainer.training:
            stage = {"validate": "validation", "test": "test"}.get(trainer.state.fn, "predict")
            step = f"{stage}_step"
            kwargs = loop._build_kwargs(data, number, None)
            arguments = loop._build_step_args_from_hook_kwargs(kwargs, step)
            self._call._call_strategy_hook(trainer, step, *arguments)
            return
        kwargs = loop.epoch_loop._build_kwargs({}, data, number)
        if not self._module.automatic_optimization:
            loop.epoch_loop.manual_optimization.run(kwargs)
            return
        optimization = loop.epoch_loop.automatic_optimization
        optimizer = trainer.optimizers[0]
        # The method of the class, since a callback may have replaced that of the instance. The
        # last argument is a batch index: with 0, the closure sets gradients to zero first.
        closure = type(optimization)._make_closure(optimization, kwargs, optimizer, 0)
        optimizer.step(closure)

    def least_of_ranks(self, size: int) -> int:
        if self._trainer.world_size == 1:
            return size
        least = torch.tensor(size, device=self.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least)

    def reload(self) -> None:
        """Let the loop make its loaders anew, at once where it has begun."""
        begun, self._loop._combined_loader = self._loop._combined_loader is not None, None
        if begun:
            self._loop.setup_data()
        if not self._trainer.training:
            self._loop.reset()


def _state_of(part: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: copy.deepcopy(part.state_dict()), part.load_state_dict


def _changes_of(trainer: Any, module: Any) -> Undo:
    """Puts back what trial steps change."""
    records = Records(module)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    parts = (*schedulers, trainer.precision_plugin, trainer._active_loop)
    metrics = (records.save_metrics, records.put_metrics_back)
    return Undo([module, *trainer.optimizers, *map(_state_of, parts), metrics])


def _silence(after: Undoing, undo: Undoing, package: Any, trainer: Any, module: Any) -> None:
    """Trial steps log nothing and call no callbacks, until the blocks end."""
    # Last: the loop sets it when it takes its state back.
    after.callback(functools.partial(setattr, trainer._active_loop, "restarting", False))
    silent = [package.loggers.logger.DummyLogger() for _ in trainer.loggers]
    for name, value in (("callbacks", []), ("loggers", silent)):
        undo.callback(functools.partial(setattr, trainer, name, getattr(trainer, name)))
        setattr(trainer, name, value)
    set_attribute(undo, module, "log", lambda *_, **__: None)
