"""Frameworks that ask for the number of batches once, and then stop every epoch there.

Epochs of a shuffled sampler differ in the number of their batches, and a resumed epoch has fewer.
Lightning and the `Trainer` of transformers read `len(loader)` when training begins: without what is
here they would leave out the last batches of longer epochs.
"""

from __future__ import annotations

import sys
from itertools import islice
from math import ceil
from traceback import walk_stack
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from brim._state.undoing import Undoing
from brim._warn import warn

_LOADERS = ("brim.data.", "torch.", "torchdata.", "accelerate.")
_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_fabric.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def asked_by() -> FrameType | None:
    """The frame that asks for the length of a sampler, or of a loader of it."""
    for frame, _ in islice(walk_stack(sys._getframe(2)), 16):
        if not _module(frame).startswith(_LOADERS):
            return frame
    return None


def fetched_ahead(caller: FrameType) -> int:
    """How many batches the caller asks for before it needs them: a DataLoader that has workers."""
    if not _module(caller).startswith(_LOADERS):  # a frame keeps the locals that are asked for
        return 0
    owner = caller.f_locals.get("self")
    if not isinstance(owner, _BaseDataLoaderIter):
        return 0
    factor = getattr(owner, "_prefetch_factor", None) or 0
    return int(getattr(owner, "_num_workers", 0) * factor)


# ---- Lightning ---------------------------------------------------------------------------------


class LightningAsks:
    """A question of one of Lightning's loops, which read the length again in each epoch.

    A loop compares it with the length that it read at first, and takes the smaller one. If the user
    asked for no limit, that is replaced by the length of this epoch.
    """

    def __init__(self, frame: FrameType) -> None:
        found = [each.f_locals.get("self") for each, _ in islice(walk_stack(frame), 12)]
        self._mode: Any = next((each for each in found if hasattr(each, "iterables")), None)
        loops = (each for each in found if hasattr(each, "trainer"))
        self._loop: Any = next(loops, None)

    @classmethod
    def now(cls, frame: FrameType | None) -> LightningAsks | None:
        """None if another program asks."""
        return cls(frame) if frame is not None and _module(frame).startswith(_LIGHTNING) else None

    @property
    def done(self) -> int:
        """Batches of the resumed epoch that Lightning counts as done, and counts on from."""
        fit_loop = getattr(getattr(self._loop, "trainer", None), "fit_loop", None)
        if fit_loop is None or self._loop not in (fit_loop, fit_loop.epoch_loop):
            return 0
        return int(fit_loop.epoch_loop.batch_progress.current.ready)

    def set_limit(self, sampler: object, count: int) -> None:
        """Let the loop run all batches of this epoch."""
        limits = getattr(self._mode, "limits", None)
        if limits is None or not self._takes_all():
            return
        for place, loader in enumerate(self._mode.iterables):
            if getattr(loader, "batch_sampler", None) is sampler and limits[place] != count:
                limits[place] = count  # of the list that the loop itself has
                self._tell_fit_loop(count)

    def _takes_all(self) -> bool:
        trainer = getattr(self._loop, "trainer", None)
        stage = getattr(getattr(trainer, "state", None), "stage", None)
        if trainer is None or stage is None or trainer.sanity_checking:
            return False
        limit = getattr(trainer, f"limit_{stage.dataloader_prefix}_batches", None)
        return isinstance(limit, float) and limit == 1.0

    def _tell_fit_loop(self, count: int) -> None:
        """The same for the number of batches after which an epoch ends, and validation begins."""
        trainer = self._loop.trainer
        # When the fit loop itself asks, it works them out from this length.
        if self._loop is not trainer.fit_loop.epoch_loop:
            return
        if len(self._mode.iterables) > 1:
            count = len(self._mode)
        trainer.fit_loop.max_batches = count
        by_share = isinstance(trainer.val_check_interval, float)
        by_time = getattr(trainer, "_val_check_time_interval", None) is not None
        if by_share and not by_time and trainer.val_check_batch != float("inf"):
            trainer.val_check_batch = max(1, int(count * trainer.val_check_interval))


# ---- transformers ------------------------------------------------------------------------------


def epochs_of_trainer(frame: FrameType | None, batches: int) -> int:
    """How many epochs a Trainer that asks will run, by `batches` in each; 0 if none asks.

    It runs as many batches in every epoch as it was told at first, or fewer if there are no more.
    """
    if frame is None or _module(frame) != "transformers.trainer":
        return 0
    arguments = frame.f_locals.get("args")
    if frame.f_code.co_name not in ("set_initial_training_values", "_inner_training_loop"):
        return 0
    if arguments is None or batches == 0:
        return 0
    if arguments.max_steps > 0:
        return ceil(int(arguments.max_steps) * int(arguments.gradient_accumulation_steps) / batches)
    return ceil(float(arguments.num_train_epochs))


def most_batches(sampler: Any, epochs: int, count: int) -> int:
    """The most batches of any of these epochs; the first is the coming one, with `count`."""
    if not sampler._epochs_are_known():
        warn(
            "a transformers.Trainer runs as many batches in each epoch as the first one has, "
            f"{count}, and epochs of this {type(sampler).__name__} have other numbers: pass seed=, "
            "so that the largest is known, or the last batches of some epochs are left out"
        )
        return count
    first, counts = sampler.epoch, [count]
    with Undoing() as undo:
        undo.callback(lambda: sampler._enter(first))
        for epoch in range(first + 1, first + epochs) if sampler._epoch_decides() else ():
            sampler._enter(epoch)
            seed = sampler._coming_seed()
            place = (seed, *sampler._ranks.now(), [], [])
            counts.append(sampler._ready().count(*place, *sampler._epochs_kept()))
    return max(counts)
