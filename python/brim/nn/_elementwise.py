"""Activations by name in torch's functions, for torch.compile and tensor classes of others.

The same operators as in the core (`src/nn/ops/elementwise.cpp`), in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["ELEMENTWISE", "activation", "gated", "gated_packed"]

ELEMENTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "new_gelu": lambda x: (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "fast_gelu": lambda x: (
        0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))
    ),
    "erf_gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "clipped_gelu": lambda x: torch.clip(F.gelu(x), -10, 10),
    "swish": lambda x: x * torch.sigmoid(x),
    "softplus_mish": lambda x: x * torch.tanh(F.softplus(x)),
    "sqrt_softplus": lambda x: F.softplus(x).sqrt(),
    "relu_squared": lambda x: torch.square(F.relu(x)),
    "laplace": lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0)))),
}


def _named(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ELEMENTWISE:
        raise ValueError(f"activation must be one of {', '.join(ELEMENTWISE)}; got {name}")
    return ELEMENTWISE[name]


def activation(input: Any, name: str, *_: object) -> Any:
    return _named(name)(input)


def gated(gate: Any, up: Any, name: str, *_: object) -> Any:
    return _named(name)(gate) * up


def gated_packed(packed: Any, name: str, gate_first: bool, dim: int, *_: object) -> Any:
    first, second = packed.chunk(2, dim)
    return gated(first, second, name) if gate_first else gated(second, first, name)
