"""Programs that run out of memory on purpose: ten kinds, of any size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import brim
from brim import _C

KINDS = 10
_MIB = 1 << 20


class Failure(NamedTuple):
    """A failure to explain.

    Attributes:
        cause: the right one.
        run: raises the out-of-memory error, inside of a block of `brim.explain`.
        budget: bytes of the CPU; 0 for none.
    """

    cause: str
    run: Callable[[], None]
    budget: int


def failure(kind: int, seed: int) -> Failure:
    """The failure of a kind, 0 to 9, with sizes drawn from a seed."""
    draw = random.Random(1000 * kind + seed)
    return [
        _activations,
        _first_optimizer_step,
        _one_tensor,
        _losses_that_are_kept,
        _outputs_that_are_kept,
        _loss_that_is_added_up,
        _hook_that_keeps,
        _workspace,
        _other_process,
        _fragments,
    ][kind](draw)


def network(draw: random.Random) -> tuple[torch.nn.Module, torch.Tensor]:
    """A small network and a batch, whose activations exceed its weights."""
    width, depth = draw.choice([64, 96, 128]), draw.randint(3, 8)
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), draw.choice([torch.nn.GELU, torch.nn.Tanh])()]
    return torch.nn.Sequential(*layers), torch.randn(draw.choice([2048, 3000, 4096]), width)


def need_of(run: Callable[[], None]) -> int:
    """Bytes that a piece of work holds at once, beside what is held before."""
    with brim.PeakMeter("cpu") as meter:
        run()
    return meter.peak


def held() -> int:
    """Bytes that tensors hold now."""
    return brim.memory_stats("cpu").allocated


def _activations(draw: random.Random) -> Failure:
    model, batch = network(draw)

    def step() -> None:
        model(batch).square().mean().backward()

    need = need_of(step)
    for weight in model.parameters():
        weight.grad = None
    return Failure("real need", step, held() + int(need * draw.uniform(0.4, 0.8)))


def _first_optimizer_step(draw: random.Random) -> Failure:
    width = draw.choice([256, 384, 512])
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(8, width)
    weights = sum(each.nbytes for each in model.parameters())

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    return Failure("real need", train, held() + int(weights * draw.uniform(1.4, 2.6)))


def _one_tensor(draw: random.Random) -> Failure:
    rows = draw.randint(2000, 4000)
    points = torch.randn(rows, 3)

    def distances() -> None:
        torch.cdist(points, points)

    return Failure("real need", distances, held() + int(4 * rows * rows * draw.uniform(0.2, 0.8)))


def _losses_that_are_kept(draw: random.Random) -> Failure:
    model, batch = network(draw)
    losses: list[torch.Tensor] = []

    def evaluate() -> None:
        for _ in range(100):
            losses.append(model(batch).square().mean())

    one = need_of(lambda: model(batch).square().mean())
    return Failure("memory that grows", evaluate, held() + int(one * draw.uniform(4, 9)))


def _outputs_that_are_kept(draw: random.Random) -> Failure:
    model, batch = network(draw)
    outputs = []

    @torch.no_grad()
    def predict() -> None:
        for _ in range(1000):
            outputs.append(model(batch))

    return Failure("memory that grows", predict, held() + int(batch.nbytes * draw.uniform(8, 30)))


def _loss_that_is_added_up(draw: random.Random) -> Failure:
    model, batch = network(draw)

    def evaluate() -> None:
        total: Any = 0.0
        for _ in range(100):
            total = total + model(batch).square().mean()

    one = need_of(lambda: model(batch).square().mean())
    return Failure("memory that grows", evaluate, held() + int(one * draw.uniform(4, 9)))


def _hook_that_keeps(draw: random.Random) -> Failure:
    model, batch = network(draw)
    seen = []
    next(iter(model.children())).register_forward_hook(
        lambda module, inputs, output: seen.append(output.detach().clone())
    )

    def train() -> None:
        for _ in range(1000):
            model.zero_grad()
            model(batch).square().mean().backward()

    one = need_of(train_once(model, batch))
    seen.clear()
    extra = batch.nbytes * draw.uniform(6, 20)
    return Failure("memory that grows", train, held() + int(one + extra))


def train_once(model: torch.nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    """One step of training."""

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return step


def _workspace(draw: random.Random) -> Failure:
    name = draw.choice(["CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED"])

    def product() -> None:
        raise RuntimeError(f"CUDA error: {name} when calling `cublasCreate(handle)`")

    return Failure("library workspace", product, 0)


def _raised(requested: float, allocated: float) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {requested:.2f} GiB. GPU 0 has a total capacity of "
        f"80.00 GiB of which 0.10 GiB is free. Of the allocated memory {allocated:.2f} GiB is "
        "allocated by PyTorch, and 0.20 GiB is reserved by PyTorch but unallocated."
    )


def _diagnosed(requested: float, allocated: float, others: float) -> str:
    """What the core says of torch's message, on a GPU of 80 GiB that is not there."""
    gib = 1 << 30
    stats = _C.MemoryStats.__new__(_C.MemoryStats)
    free = 80 - allocated - others
    held = (allocated, allocated, allocated, 80, free, 80)
    stats.__setstate__((*(int(each * gib) for each in held), 0, 0, 1))
    cause = brim.classify_error(_raised(requested, allocated))
    return _C.diagnose(cause, stats, 0, [], 0).cause


class DiagnosedError(Exception):
    """Not a failure to be explained: the core has diagnosed one, of a device that is not there."""


def _other_process(draw: random.Random) -> Failure:
    allocated, others = draw.uniform(5, 40), draw.uniform(20, 35)
    requested = 80 - allocated - others + draw.uniform(0.5, 10)

    def run() -> None:
        raise DiagnosedError(_diagnosed(requested, allocated, others))

    return Failure("other processes", run, 0)


def _fragments(draw: random.Random) -> Failure:
    allocated = draw.uniform(40, 70)
    requested = (80 - allocated) * draw.uniform(0.3, 0.9)

    def run() -> None:
        raise DiagnosedError(_diagnosed(requested, allocated, 0.5))

    return Failure("fragmentation", run, 0)
