"""Encoders and a contrastive loss for tests of losses of all items."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize


class Tower(nn.Module):
    """With dropout, a frozen weight, a shared one, and random numbers of other generators."""

    def __init__(self, dropout: float = 0.0, noise: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.dropout, self.noise = nn.Dropout(dropout), noise
        self.first.bias.requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.first(x).tanh())
        if self.noise:  # as of masks that a model draws with NumPy
            hidden = hidden * (1 + np.random.rand()) + random.random()
        return self.last(hidden)  # type: ignore[no-any-return]


class Clip(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, pair: Any) -> torch.Tensor:
        a, b = (normalize(each, dim=-1) for each in pair)
        scores = self.scale.exp() * a @ b.T
        labels = torch.arange(len(a))
        return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2


def clip() -> tuple[nn.ModuleList, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    towers = nn.ModuleList([Tower(), Tower(), Clip()])
    return towers, (torch.rand(10, 6).double(), torch.rand(10, 6).double())


def close(found: Any, expected: Any) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.allclose(b, 0, 1e-12))
        for a, b in zip(found, expected, strict=True)
    )


def encode_with(towers: Any) -> Callable[[Any], Any]:
    return lambda part: (towers[0](part[0]), towers[1](part[1]))
