"""Activations written by hand: any module that computes one of brim's functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brim.nn import functional
from brim.nn._derived import Kind
from brim.nn.recognisers._recogniser import (
    Forward,
    Options,
    Recogniser,
    agree,
    names_in,
    numbers,
    small_copy,
)

__all__ = ["activation"]

_FUNCTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gelu", {}),
    ("gelu", {"approximate": "tanh"}),
    ("silu", {}),
    ("relu", {}),
    ("sigmoid", {}),
    ("tanh", {}),
    ("hardswish", {}),
    ("hardsigmoid", {}),
    ("softplus", {}),
    *((name, {}) for name in ("new_gelu", "quick_gelu", "relu_squared", "fast_gelu")),
)

_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        torch nn functional F math Tensor input x act activation inplace float to dtype pi sqrt exp
        pow square mul mul_ add add_ div div_ clamp tanh tanh_ erf sigmoid sigmoid_ relu relu_ relu6
        gelu silu swish hardtanh hardsigmoid hardswish hard_sigmoid hard_swish softplus
        precomputed_constant _gelu_python _gelu_tanh_python
        """,
    )
)
"""What the code of an activation may name: then it depends on its input alone."""


def _candidates(module: torch.nn.Module) -> Iterator[Options]:
    kind = type(module)
    state = (module._parameters, module._buffers, module._modules)
    helpers = [name for name in names_in(kind, "forward") if name.startswith("_")]
    if any(state) or not names_in(kind, "forward", *helpers) <= _WORDS:
        return
    for name, options in _FUNCTIONS:
        if hasattr(functional, name):
            yield name, tuple(options.items()), bool(getattr(module, "inplace", False))


def _forward(kind: Kind, options: Options) -> Forward:
    name: Any
    given: Any
    name, given, inplace = options
    run = getattr(functional, name)
    fixed = dict(given) | ({"inplace": True} if inplace else {})

    def forward(self: Any, input: Tensor) -> Any:
        return run(input, **fixed, recompute=self._brim_recompute)

    return forward


def _agrees(module: torch.nn.Module, ours: Forward, options: Options) -> bool:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-30, 30.0, -30.0, 200.0, -200.0])
    inputs = [torch.cat([numbers(503), edges.to("cpu")]).to(dtype) for dtype in dtypes]
    return agree(small_copy(module), ours, inputs)


activation = Recogniser("{0}", _candidates, _forward, _agrees, by_results=True)
