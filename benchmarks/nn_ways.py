"""The ways to keep less for backward that `bench_nn.py` compares."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import brim

Way = Callable[[nn.Module, Sequence[str]], None]  # changes a model, given its blocks' classes


class NotThereError(Exception):
    """A way that cannot run here; the text says why."""


def as_it_is(model: nn.Module, blocks: Sequence[str]) -> None:
    pass


def converted(model: nn.Module, blocks: Sequence[str], **options: Any) -> None:
    brim.convert(model, **options)


def checkpointed(model: nn.Module, blocks: Sequence[str], **options: Any) -> None:
    """Run each block again in backward."""
    for module in model.modules():
        if type(module).__name__ in blocks:
            again = functools.partial(checkpoint, module.forward, use_reentrant=False, **options)
            module.forward = again


def selective(model: nn.Module, blocks: Sequence[str]) -> None:
    """Run each block again except for its matrix products, convolutions and attention."""
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # must not change what is kept
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    checkpointed(model, blocks, context_fn=contexts)


_COSTLY = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution", "aten::_scaled_dot_product")


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator.name().startswith(_COSTLY):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def liger(model: nn.Module, blocks: Sequence[str]) -> None:
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise NotThereError("not installed") from None
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(inner, "config", None), "model_type", None) != "llama":
        raise NotThereError("has no kernels for this model")
    _apply_liger_kernel_to_instance(model=inner)


def compiled(model: nn.Module, blocks: Sequence[str]) -> None:
    model.compile()


BUDGETS: Mapping[str, float] = {f"compile {budget:g}": budget for budget in (1, 0.5, 0.2)}
"""What torch.compile may keep, as a share of what it would keep without recomputation."""

WAYS: Mapping[str, Way] = {
    "torch": as_it_is,
    "brim": converted,
    "brim cheap": functools.partial(converted, recompute="cheap"),
    "brim products": functools.partial(converted, recompute="products"),
    "checkpoint": checkpointed,
    "selective": selective,
    "Liger": liger,
    **dict.fromkeys(BUDGETS, compiled),
}


def with_budget(way: str) -> contextlib.AbstractContextManager[Any]:
    """Within, torch.compile compiles for the budget of a way, if it has one."""
    if way not in BUDGETS:
        return contextlib.nullcontext()
    from torch._functorch import config

    torch._dynamo.reset()  # else the code compiled for another budget is used
    return config.patch(activation_memory_budget=BUDGETS[way])
