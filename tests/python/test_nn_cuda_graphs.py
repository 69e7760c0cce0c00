"""Training steps of converted models in CUDA graphs: captured once, replayed. Needs a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import brim

pytestmark = [
    pytest.mark.cuda,
    # In a process whose first product is that of a backward.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
LEVELS = [None, "cheap", "products"]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    backend: Any = torch.backends.cudnn
    before = (backend.deterministic, backend.benchmark, backend.allow_tf32)
    backend.deterministic, backend.benchmark, backend.allow_tf32 = True, False, False
    yield
    torch.cuda.synchronize()
    backend.deterministic, backend.benchmark, backend.allow_tf32 = before


class Attention(nn.Module):
    """Written with functions, so that it is a region; with a gate, sums and dropout."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            each.view(n, length, 4, width // 4).transpose(1, 2)
            for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(y), self.p, self.training)
        y = self.up(self.last(x))
        return x + self.down(F.silu(y) * y)


def tokens(p: float = 0.0) -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(Attention(64, p), Attention(64, p)), (8, 32, 64)


def images(p: float = 0.0) -> tuple[nn.Module, tuple[int, ...]]:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(2):
        layers += [nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)]
    layers += [nn.MaxPool2d(2), nn.GELU(), nn.Dropout(p), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 4)), (8, 3, 16, 16)


Make = Callable[..., tuple[nn.Module, tuple[int, ...]]]


def made(make: Make, recompute: str | None, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A converted model, torch's own with the same weights, and inputs of three steps."""
    torch.manual_seed(0)
    model, shape = make(**options)
    model = model.cuda()
    ours = copy.deepcopy(model)
    brim.convert(ours, recompute=recompute)
    return ours, model, [torch.randn(shape, device="cuda") for _ in range(3)]


def loss_of(model: Any, x: Tensor, autocast: bool) -> Tensor:
    # Its cache of casted weights must not outlive a capture.
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
        y: Tensor = model(x)
    return y.float().square().mean()


def eager_step(model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, x, autocast)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *gradients(model)]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def warm_up(step: Callable[[], object]) -> None:
    """On a stream of its own, as torch asks for before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def captured_step(model: nn.Module, static: Tensor, autocast: bool) -> tuple[Any, Tensor]:
    """A graph of forward and backward, and the loss that each replay writes.

    It reads `static`, which the caller holds.
    """
    warm_up(lambda: eager_step(model, static, autocast))
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_of(model, static, autocast)
        loss.backward()  # type: ignore[no-untyped-call]
    return graph, loss.detach()


def close(ours: list[Tensor], theirs: list[Tensor], autocast: bool) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if autocast else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("recompute", LEVELS)
@pytest.mark.parametrize("make", [tokens, images])
def test_a_captured_step_gives_the_gradients_of_torch(
    make: Make, recompute: str | None, autocast: bool
) -> None:
    ours, torchs, inputs = made(make, recompute)
    static = inputs[0].clone()
    graph, loss = captured_step(ours, static, autocast)
    for x in inputs:
        static.copy_(x)
        graph.replay()
        close([loss, *gradients(ours)], eager_step(torchs, x, autocast), autocast)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's own as well
@pytest.mark.parametrize("recompute", LEVELS)
@pytest.mark.parametrize("make", [tokens, images])
def test_graphed_callables_give_the_gradients_of_torch(make: Make, recompute: str | None) -> None:
    ours, torchs, inputs = made(make, recompute)
    graphed: Any = torch.cuda.make_graphed_callables(ours, (inputs[0].clone().requires_grad_(),))
    for x in inputs:
        found = []
        for model, call in ((ours, graphed), (torchs, torchs)):
            model.zero_grad(set_to_none=True)
            given = x.clone().requires_grad_()
            loss = call(given).square().mean()
            loss.backward()
            assert given.grad is not None
            found.append([loss.detach(), given.grad, *gradients(model)])
        close(*found, autocast=False)


@pytest.mark.parametrize("recompute", LEVELS)
def test_a_whole_step_with_the_optimizer_trains_as_torch(recompute: str | None) -> None:
    ours, torchs, inputs = made(tokens, recompute)
    static = inputs[0].clone()
    start = copy.deepcopy(ours.state_dict())
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-3, capturable=True)
    other = torch.optim.AdamW(torchs.parameters(), 1e-3, capturable=True)

    def step(model: nn.Module, x: Tensor, by: torch.optim.Optimizer) -> None:
        by.zero_grad(set_to_none=True)
        loss_of(model, x, False).backward()  # type: ignore[no-untyped-call]
        by.step()

    warm_up(lambda: step(ours, static, optimizer))
    ours.load_state_dict(start)
    with torch.no_grad():
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(ours, static, optimizer)
    for x in inputs:
        static.copy_(x)
        graph.replay()
        step(torchs, x, other)
    close([*ours.state_dict().values()], [*torchs.state_dict().values()], autocast=False)


@pytest.mark.parametrize("recompute", LEVELS)
@pytest.mark.parametrize("make", [tokens, images])
def test_each_replay_draws_other_numbers_for_dropout(make: Make, recompute: str | None) -> None:
    ours, _, inputs = made(make, recompute, p=0.5)
    static = inputs[0].clone()
    graph, loss = captured_step(ours, static, autocast=False)
    results = []
    for _ in range(2):
        graph.replay()
        results.append([loss.clone(), *gradients(ours)])
    assert not torch.equal(results[0][0], results[1][0])
    assert all(torch.isfinite(each).all() for each in results[1])


@pytest.mark.parametrize("recompute", ["cheap", "products"])
def test_a_graphs_pool_is_smaller_where_less_is_kept(recompute: str) -> None:
    sizes = []
    for level in (None, recompute):
        ours, _, inputs = made(tokens, level)
        static = inputs[0].repeat(32, 1, 1)
        warm_up(lambda ours=ours, x=static: eager_step(ours, x, False))  # type: ignore[misc]
        ours.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss_of(ours, static, False).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_reserved() - before)
        graph.replay()
        torch.cuda.synchronize()
        del graph, ours
    assert sizes[1] < sizes[0], sizes
