"""A model and its gradients, for the tests of Microbatches."""

from __future__ import annotations

import torch
from torch import nn


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(
        (x is None and y is None) or (x is not None and y is not None and x.equal(y))
        for x, y in zip(a, b, strict=True)
    )


class Net(nn.Module):
    """With dropout, a shared weight, a frozen one and one that is not used."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 8)
        self.shared, self.unused = nn.Linear(8, 8), nn.Linear(2, 2)
        self.dropout = nn.Dropout(dropout)
        self.first.bias.requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.shared(self.first(x).tanh()))
        return self.last(self.shared(x)).mean(1)  # type: ignore[no-any-return]
