"""What cannot be run in parts, or is no loss function at all."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from brim._arguments import name_of, refused, shown


def refuse_whole_batch(models: list[torch.nn.Module], allow: Any) -> None:
    """Raise for layers that see the whole batch, unless they are of a class that is allowed."""
    layers = [m for model in models for m in model.modules() if isinstance(m, _BatchNorm)]
    layers = [m for m in layers if not isinstance(m, allow)]
    seeing = [m for m in layers if m.training or not m.track_running_stats]
    if not seeing:
        return
    names = {m: name for model in models for name, m in model.named_modules()}
    listed = ", ".join(
        f"{names[layer] or 'model'} ({type(layer).__name__})" for layer in seeing[:8]
    )
    more = f" and {len(seeing) - 8} more" if len(seeing) > 8 else ""
    raise ValueError(
        f"model has layers that see the whole batch, which would see a part of it: {listed}"
        f"{more}. Call eval() on them, replace them (GroupNorm), or pass "
        f"allow={type(seeing[0]).__name__} if statistics of parts are good enough"
    )


def check_loss_fn(loss_fn: Any, model: torch.nn.Module | None) -> None:
    """Raise for what cannot be called with a part of a batch."""
    if loss_fn is None:
        raise TypeError("Microbatches needs loss_fn, or loss= and encode=")
    if isinstance(loss_fn, torch.nn.Module) and model is None:
        raise TypeError(
            "loss_fn must be a function of a part of the batch that returns its loss, got "
            f"{shown(loss_fn)}: pass brim.Microbatches(loss_fn, model=model), or model= too if the "
            "module itself returns the loss"
        )
    if signature := refused(loss_fn, 1):
        raise TypeError(
            f"loss_fn is called with one argument, a part of the batch, but {name_of(loss_fn)} "
            f"takes {signature}: of a batch (x, y) the part is a tuple too, as in `x, y = part`"
        )
