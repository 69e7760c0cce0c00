"""Functions of torch that a trace replaces in its own thread, until a block ends."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, dataloader

from brim._estimate._cuda import choose_cuda, instead_of
from brim._estimate._errors import EstimateError
from brim._estimate._places import current_line
from brim._estimate._threads import OneThread
from brim._estimate._tracer import Tracer
from brim._state.uncompiled import run_uncompiled
from brim._state.undoing import Undoing, set_attribute


def follow(
    tracer: Tracer, mode: OneThread, undo: Undoing, target: torch.device, moves: bool
) -> None:
    """Follow modules and optimizers, and take the choices that torch takes on the target.

    Args:
        tracer: sees them.
        mode: knows the traced thread.
        undo: puts everything back.
        target: the device whose memory counts.
        moves: whether tensors on the CPU are taken to be there.
    """

    def replace(holder: Any, name: str, replacement: Any) -> None:
        set_attribute(
            undo, holder, name, instead_of(getattr(holder, name), replacement, mode.is_here)
        )

    # Hooks of all modules and optimizers: they are kept with the surroundings.
    torch_optimizer.register_optimizer_step_pre_hook(tracer.before_step)
    torch_optimizer.register_optimizer_step_post_hook(tracer.after_step)
    tracer.modules.follow()
    tracer.in_place.follow(undo, mode.is_here)
    mode.watch_starts(undo)
    # An operator that fails raises: torch would print the same with a traceback of its own.
    log = logging.getLogger(fake_tensor.__name__)
    undo.callback(functools.partial(log.removeFilter, _is_other))
    log.addFilter(_is_other)
    types = [*torch_optimizer._foreach_supported_types, FakeTensor]
    set_attribute(undo, torch_optimizer, "_foreach_supported_types", types)
    replace(torch.amp.GradScaler, "_maybe_opt_step", _always_step)
    replace(weakref, "getweakrefs", lambda _: [])  # lets modules move and change their type
    replace(torch.Tensor, "__format__", tracer.formatted)
    replace(DataLoader, "__iter__", _no_data)
    replace(dataloader._BaseDataLoaderIter, "__next__", _no_data)
    random_state = tracer.watched(torch.get_rng_state)
    for holder in (torch, torch.random):
        replace(holder, "get_rng_state", random_state)
    masking = sys.modules.get("transformers.masking_utils")
    if hasattr(masking, "find_packed_sequence_indices"):
        # It looks for packed sequences in the values of positions, which are not known.
        replace(masking, "find_packed_sequence_indices", tracer.not_packed)
    if target.type == "cuda":
        choose_cuda(undo, moves, mode.is_here, tracer.log.empty_cache)
    run_uncompiled(undo)


def _is_other(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def _always_step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a gradient scaler: it is not known whether values overflow."""
    return optimizer.step(*args, **kwargs)


def _no_data(loader: Any) -> Any:
    raise EstimateError(
        f"{current_line()}: the call takes batches from a DataLoader, which would load data and go "
        "on in it. Estimate the work on one batch, and pass that as an argument: "
        "brim.estimate(step, next(iter(loader)))"
    )
