"""What would save more memory in a model, in words."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm


def frozen_batch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that use the batch's statistics although nothing of them is trained.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).eval())
        >>> len(frozen_batch_norms(model)), len(frozen_batch_norms(model.requires_grad_(False)))
        (0, 1)
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        and module.training
        and module.track_running_stats
        and not any(parameter.requires_grad for parameter in module.parameters())
    ]


def conversion_hint(model: torch.nn.Module, recompute: str | None) -> str:
    """What would save more, without inputs to measure it; or what a compiler is told."""
    if recompute is not None and any(map(_is_compiled, model.modules())):
        return (
            f'note: the model is compiled. recompute="{recompute}" tells the compiler what to '
            "recompute when it compiles again"
        )
    measure = "brim.audit(model, *inputs) measures it"
    if found := frozen_batch_norms(model):
        layers = "1 BatchNorm layer" if len(found) == 1 else f"{len(found)} BatchNorm layers"
        return (
            f"hint: {layers} with frozen weights, but in training mode, in which the input is "
            f"kept: call .eval(). {measure}"
        )
    trained = [parameter.requires_grad for parameter in model.parameters()]
    if recompute is None and trained and all(trained):
        return f'hint: all weights are trained, where recompute="cheap" saves most. {measure}'
    return ""


def _is_compiled(module: torch.nn.Module) -> bool:
    """By `module.compile()` or `torch.compile(module)`."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
