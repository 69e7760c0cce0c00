"""Losses that need all items of all ranks, for microbatches_job.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import brim

from microbatches_rank_cases import error_of, gradients, result  # isort: skip: run as a script

JOINT: dict[str, Callable[[int], Any]] = {}


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    JOINT[function.__name__] = function
    return function


class Loss(nn.Module):
    """With a temperature, a mask and an output that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5).double())

    def forward(self, rows: Any) -> torch.Tensor:
        (a, is_hard), b = rows["a"], rows["b"]
        scores = self.scale.exp() * a @ b["rows"].T
        losses = cross_entropy(scores, torch.arange(len(a)), reduction="none")
        return (losses * (1 + is_hard)).mean()


def towers(dropout: float = 0.0, ddp: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).double()
    second = nn.Linear(4, 3).double()
    wrap = DistributedDataParallel if ddp else lambda module: module
    return nn.ModuleList([wrap(first), wrap(second), Loss()])


def encoders(model: nn.ModuleList) -> Any:
    return {
        "a": lambda x: (model[0](x), x[:, 0] > 0.5),
        "b": lambda x: {"rows": model[1](x), "unused": model[1](x).exp()},
    }


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    """Ranks have batches of different lengths, and on rank 1 `b` is shorter than `a`."""
    generator = torch.Generator().manual_seed(20 + rank)
    lengths = (7, 11) if rank == 0 else (6, 3)
    return {
        name: torch.rand(n, 4, generator=generator, dtype=torch.float64)
        for name, n in zip("ab", lengths, strict=True)
    }


def whole() -> dict[str, torch.Tensor]:
    parts = [batch_of(rank) for rank in range(dist.get_world_size())]
    return {name: torch.cat([part[name] for part in parts]) for name in "ab"}


def expected() -> Any:
    model = towers()
    functions, batch = encoders(model), whole()
    loss = model[2]({name: functions[name](batch[name]) for name in "ab"})
    loss.backward()
    return result(model, loss)


@case
def joint(rank: int) -> Any:
    found = []
    for size, ddp, sync in ((3, False, "always"), (None, True, "always"), (4, True, "settled")):
        model = towers(ddp=ddp)
        step = brim.Microbatches(
            encode=encoders(model), loss=model[2], model=model, ranks=True, size=size, sync=sync
        )
        for _ in range(3 if sync == "settled" else 1):
            model.zero_grad()
            loss = step(batch_of(rank))
        found.append(result(model, loss))
    return found, expected()


class JointStep:
    """A step with dropout of which an allocation of rank 1 may fail."""

    def __init__(self, size: int) -> None:
        self.model = towers(0.4)
        self.model[2].scale.grad = torch.ones((), dtype=torch.float64)
        self.step = brim.Microbatches(
            encode=encoders(self.model), loss=self.model[2], model=self.model, ranks=True, size=size
        )

    def run(self, rank: int, fails_at: int) -> Any:
        batch = batch_of(rank)
        torch.manual_seed(4 + rank)
        with brim.testing.inject_oom(at=fails_at if rank == 1 else 2**40) as injector:
            loss = self.step(batch)
        self.allocations = injector.allocations
        return [loss.item(), gradients(self.model), torch.rand(1).item()]


@case
def joint_failures(rank: int) -> Any:
    """One rank fails at each allocation; the result is that of the size that all then take."""
    without: dict[int, Any] = {}
    for size in range(1, 12):
        step = JointStep(size)
        without[size] = [step.run(rank, 2**40), step.step.size]
    first = JointStep(5)
    first.run(rank, 2**40)
    count = torch.tensor(first.allocations)
    dist.broadcast(count, 1)
    wrong, sizes = [], []
    for at in range(1, int(count) + 1, 6):
        step = JointStep(5)
        left = step.run(rank, at)
        sizes.append(step.step.size)
        if left != without[step.step.size][0]:
            wrong.append(at)
    return {"wrong": wrong, "sizes": sizes}


@case
def joint_errors(rank: int) -> Any:
    """Each is an error on all ranks, and the next step works."""
    model = towers()
    functions = encoders(model)
    errors = []

    def run(encode: Any, loss: Any) -> None:
        step = brim.Microbatches(
            encode=encode, loss=loss, model=model, ranks=True, size=3, check=False
        )
        step(batch_of(rank))

    def fails(x: torch.Tensor) -> Any:
        if rank == 1:
            raise KeyError("no such sample")
        return functions["b"](x)

    def wider(x: torch.Tensor) -> Any:
        rows = model[1](x)
        return {"rows": rows, "unused": torch.cat([rows] * (1 + rank), 1)}

    def drawing(rows: Any) -> torch.Tensor:
        return model[2](rows) * torch.rand(1).double().sum()  # type: ignore[no-any-return]

    counter = nn.Module()
    counter.register_buffer("calls", torch.tensor(0))
    model.append(counter)

    def counting(x: torch.Tensor) -> Any:
        counter.calls.add_(1)  # type: ignore[operator]
        return functions["b"](x)

    def assigning(rows: Any) -> torch.Tensor:
        counter.calls = counter.calls + 1  # type: ignore[operator]
        return model[2](rows)  # type: ignore[no-any-return]

    for encode, loss in (
        ({**functions, "b": counting}, model[2]),
        (functions, assigning),
        ({**functions, "b": fails}, model[2]),
        ({**functions, "b": wider}, model[2]),
        (functions, drawing),
        (functions, lambda rows: rows["a"][0]),
    ):
        errors.append(error_of(lambda encode=encode, loss=loss: run(encode, loss)))
        errors.append([g for g in gradients(model) if g is not None])
    assert counter.calls == 0
    run(functions, model[2])
    return errors, gradients(model), expected()["gradients"]
