"""Gated perceptrons, down(act(gate(x)) * up(x)), as the models of Hugging Face write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from brim.nn import functional, modules
from brim.nn._compiled import asking
from brim.nn._derived import Forward, Kind, Options, recipe_of
from brim.nn._elementwise import ELEMENTWISE
from brim.nn.recognisers._recogniser import Recogniser, agree, names_in, numbers, small_copy

__all__ = ["gated_mlp"]

_SEPARATE = (
    ("gate_proj", "up_proj", "act_fn", "down_proj"),  # Llama, Mistral, Qwen, Gemma and most others
    ("w1", "w3", "act_fn", "w2"),
)
_PACKED = (("gate_up_proj", "activation_fn", "down_proj"),)  # Phi3, GLM: the gate is the first half


def _candidates(module: nn.Module) -> Iterator[Options]:
    """The names of the parts, the gate first."""
    names = names_in(type(module), "forward")
    for parts in (*_SEPARATE, *_PACKED):
        more = {"chunk"} if parts in _PACKED else set()
        if names == {*parts} | more and {*module._modules} == {*parts}:
            yield parts


def _forward(kind: Kind, options: Options) -> Forward:
    *inner, act, last = options
    work = kind.forward

    def forward(self: Any, x: Tensor) -> Any:
        name = _name_of(getattr(self, act))
        if name is None:
            return work(self, x)
        made = [getattr(self, part)(x) for part in inner]
        run: Any = functional.gated if len(made) == 2 else functional.gated_packed
        return getattr(self, last)(
            run(*made, name, recompute=asking(self._brim_recompute)["recompute"])
        )

    return forward


def _name_of(act: Any) -> str | None:
    """The name of the activation that a module computes; None if it must be called itself."""
    if not isinstance(act, nn.Module):
        return None
    if act._forward_hooks or act._forward_pre_hooks or act._backward_hooks:
        return None
    if act._backward_pre_hooks or (_has_any_global_hook() and not _only_estimates()):
        return None
    kind = type(act)
    if kind is modules.GELU:
        return "gelu" if act.approximate == "none" else "gelu_tanh"
    recipe = recipe_of(kind)
    if recipe is not None:
        name = recipe.options[0] if recipe.maker == "activation" else None
        return name if name in ELEMENTWISE else None
    return _NAMES.get(kind)


_torchs: Any = torch.nn.modules.module  # has no types
_has_any_global_hook: Any = _torchs._has_any_global_hook


def _only_estimates() -> bool:
    """Whether all hooks are those of `brim.estimate`, which wants to see what runs without it."""
    forward = (_torchs._global_forward_pre_hooks, _torchs._global_forward_hooks)
    return not (_torchs._global_backward_pre_hooks or _torchs._global_backward_hooks) and all(
        getattr(hook, "of_estimate", False) for hooks in forward for hook in hooks.values()
    )


_NAMES: dict[type[nn.Module], str] = {
    getattr(modules, name): name.lower()
    for name in ("SiLU", "ReLU", "Sigmoid", "Tanh", "Hardswish")
}


def _agrees(module: nn.Module, ours: Forward, options: Options) -> bool:
    *inner, act, last = options
    width = 24 // len(inner)
    plain: Any = {"device": "cpu", "dtype": torch.float32}
    children = {part: nn.Linear(8, width, **plain) for part in inner}
    children[last] = nn.Linear(12, 8, **plain)
    copy = small_copy(module, modules={**children, act: modules.SiLU()})
    return agree(copy, ours, [numbers(2, 5, 8)])


gated_mlp = Recogniser("gated MLP", _candidates, _forward, _agrees)
