"""A model, batches of ranks and what they leave, for microbatches_job.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

DEVICE = os.environ.get("BRIM_TEST_DEVICE", "cpu")


class Net(nn.Module):
    """With layers that only some batches reach, and one that none does."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(2, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("one", torch.ones(1))  # DDP sends buffers in forward
        self.double()

    def forward(self, x: torch.Tensor, expert: int = 0) -> torch.Tensor:
        hidden = self.experts[expert](self.first(x).tanh())
        return self.last(self.dropout(hidden)).squeeze(1)  # type: ignore[no-any-return]


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout).to(DEVICE)


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks have batches of different lengths."""
    generator = torch.Generator().manual_seed(10 + rank)
    n = 10 - 3 * rank
    x = torch.rand(n, 4, generator=generator, dtype=torch.float64)
    y = torch.rand(n, generator=generator, dtype=torch.float64)
    return x.to(DEVICE), y.to(DEVICE)


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    """Those of all ranks."""
    parts = [batch_of(rank) for rank in range(dist.get_world_size())]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def gradients(model: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def result(model: nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    return {"loss": loss.item(), "gradients": gradients(model)}


def expected(loss_fn: Callable[[Net], torch.Tensor]) -> dict[str, Any]:
    model = net()
    loss = loss_fn(model)
    loss.backward()
    return result(model, loss)


def labels_of(rank: int) -> torch.Tensor:
    """Of which some are ignored: more on rank 1, and all of its first part."""
    y = torch.arange(len(batch_of(rank)[0]), device=DEVICE) % 3
    y[: 4 * rank + 1] = -100
    return y


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def layers(sharded: bool) -> nn.Module:
    """With `sharded`, a model whose ranks wait for each other in every part."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if sharded:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    return model


def whole_gradients(model: nn.Module) -> list[list[float]]:
    return [p.grad.full_tensor().flatten().tolist() for p in model.parameters()]  # type: ignore[union-attr]
