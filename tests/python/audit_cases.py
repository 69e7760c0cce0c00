"""What the tests of brim.audit and brim.assert_saved share: an input, layers, figures by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import brim

N, C, H = 4, 8, 16
ELEMENTS = N * C * H * H


def image(**options: Any) -> Tensor:
    return torch.randn(N, C, H, H, **options)


def by_name(audit: brim.Audit) -> dict[str, tuple[int, int, int, int]]:
    """torch.nn, brim, cheap, least."""
    assert audit.least <= min(audit.torch_nn, audit.brim, audit.cheap)
    return {each.name: (each.torch_nn, each.brim, each.cheap, each.least) for each in audit.layers}


def make() -> nn.Module:
    """Its output cannot be recomputed cheaply; it keeps nothing itself."""
    return nn.Linear(H, H, bias=False).requires_grad_(False)


def frozen(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).requires_grad_(False)


GRADIENT = {"requires_grad": True}
