"""Activations: any module that computes one of brim's functions of its input alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brim.nn import functional
from brim.nn._compiled import asking
from brim.nn._derived import Forward, Kind, Options
from brim.nn._elementwise import ELEMENTWISE
from brim.nn.recognisers._recogniser import (
    Recogniser,
    agree,
    names_in,
    numbers,
    saved_bytes,
    small_copy,
    words,
)

__all__ = ["activation"]

_TORCHS = ("gelu", "gelu_tanh", "silu", "relu", "sigmoid", "tanh", "hardswish", "hardsigmoid")
_BY_NAME = tuple(name for name in ELEMENTWISE if name not in _TORCHS)
_RERUN = "a function that runs again"
_WORDS = words(
    """
    torch nn functional F math Tensor input x act activation inplace float to dtype pi sqrt exp
    pow square mul mul_ add add_ div div_ clamp clip min max tanh tanh_ erf sigmoid sigmoid_
    relu relu_ relu6 gelu silu swish mish hardtanh hardsigmoid hardswish hard_sigmoid hard_swish
    hard_mish softplus where abs precomputed_constant _gelu_python _gelu_tanh_python
    """
)
"""What the code of an activation may name: then it depends on its input alone."""


def _candidates(module: torch.nn.Module) -> Iterator[Options]:
    """The name of the function, and whether it works in place."""
    kind = type(module)
    used = names_in(kind, "forward")
    used |= names_in(kind, *(name for name in used if name.startswith("_")))
    if used and used <= _WORDS and not (module._parameters or module._buffers or module._modules):
        inplace = bool(getattr(module, "inplace", False))
        for name in (*_TORCHS, *(() if inplace else (*_BY_NAME, _RERUN))):
            yield name, inplace


def _asks(module: Any) -> Any:
    return asking(module._brim_recompute)["recompute"]


def _forward(kind: Kind, options: Options) -> Forward:
    name, inplace = options
    work = kind.forward
    fixed: dict[str, Any] = {"inplace": True} if inplace else {}
    if name == "gelu_tanh":
        fixed["approximate"] = "tanh"
    run: Any = getattr(functional, name.removesuffix("_tanh"), None)

    def forward(self: Any, input: Tensor) -> Any:
        return run(input, **fixed, recompute=_asks(self))

    def by_name(self: Any, input: Tensor) -> Any:
        return functional.activation(input, name, recompute=_asks(self))

    def again(self: Any, input: Tensor) -> Any:
        return functional.rerun(lambda x: work(self, x), input, recompute=_asks(self))

    return forward if name in _TORCHS else again if name == _RERUN else by_name


def _agrees(module: torch.nn.Module, ours: Forward, options: Options) -> bool:
    copy = small_copy(module)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    edges = [0.0, -0.0, torch.inf, -torch.inf, 1e-30, 30.0, -30.0, 200.0, -200.0]
    values = torch.cat([numbers(503), torch.tensor(edges, device="cpu")])
    inputs = [*(values.to(dtype) for dtype in dtypes), numbers(64), numbers(64, scale=0.1)]
    if not agree(copy, ours, inputs):
        return False
    return options[0] != _RERUN or saved_bytes(copy, ours) < saved_bytes(copy, type(copy).forward)


activation = Recogniser("{0}", _candidates, _forward, _agrees, by_results=True)
