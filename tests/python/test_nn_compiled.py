"""`recompute` under torch.compile: the compiler's partitioner keeps as little."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._functorch import config

import brim

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # Some versions of torch use what they deprecate.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Block(nn.Module):
    """Layers alone, so that every one of them is brim's."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y


def perceptrons() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(), Block(), Block()), torch.randn(256, 64)


def with_a_large_table() -> tuple[nn.Module, Tensor]:
    """Whose parameters are larger than what is kept, where a budget would do nothing."""
    table = nn.Embedding(20_000, 64)
    return nn.Sequential(table, Block(), Block()), torch.randint(20_000, (256,))


def images() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(4, 16, 1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 4, 3, 1, 1)]
    return nn.Sequential(*layers), torch.randn(4, 4, 24, 24)


def with_bits() -> tuple[nn.Module, Tensor]:
    """Activations that keep bits without a compiler, and that it gets as operators of brim."""
    layers: list[nn.Module] = []
    for act in (nn.ReLU(inplace=True), nn.Hardtanh(), nn.ReLU()):
        layers += [nn.Conv2d(4, 16, 1), nn.BatchNorm2d(16), act, nn.Conv2d(16, 4, 3, 1, 1)]
    return nn.Sequential(*layers), torch.randn(4, 4, 24, 24)


def converted(model: nn.Module, recompute: str | None) -> nn.Module:
    model = copy.deepcopy(model)
    brim.convert(model, recompute=recompute)
    return model


def is_told() -> bool:
    """Whether torch's partitioner would recompute what is cheap."""
    return not config.ban_recompute_used_far_apart


def settings(seen: list[Any]) -> Callable[..., Any]:
    """A backend that looks at torch's setting and at the graph."""

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        tagged = [str(node.target) for node in graph.graph.nodes if "checkpoint" in str(node)]
        seen.append((is_told(), len(tagged)))
        return graph.forward

    return backend


@pytest.mark.parametrize(
    ("recompute", "expected"), [(None, (False, 0)), ("cheap", (True, 0)), ("products", (True, 3))]
)
def test_the_compiler_is_told_for_this_graph_alone(
    recompute: str | None, expected: tuple[bool, int]
) -> None:
    model, x = perceptrons()
    seen: list[Any] = []
    torch.compile(converted(model, recompute), backend=settings(seen), fullgraph=True)(x)
    assert seen == [expected]
    assert not is_told()
    torch.compile(converted(model, None), backend=settings(seen), fullgraph=True)(x)
    assert seen[-1] == (False, 0)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_report_says_what_a_compiled_model_will_do(in_place: bool) -> None:
    model: Any = Block()
    x = torch.randn(4, 64)
    seen: list[Any] = []
    options: Any = {"backend": settings(seen), "fullgraph": True}
    compiled: Any = model if in_place else torch.compile(model, **options)
    if in_place:
        model.compile(**options)
    compiled(x)
    report = brim.convert(compiled, recompute="cheap")
    assert 'recompute="cheap" tells the compiler' in str(report)
    compiled(x)
    assert [setting for setting, _ in seen] == [False, True]


def test_a_compilation_that_fails_leaves_no_setting() -> None:
    model, x = perceptrons()

    def fails(*_: object) -> Any:
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        torch.compile(converted(model, "cheap"), backend=fails)(x)
    assert not is_told()


def test_export_leaves_no_setting() -> None:
    model, x = perceptrons()
    torch.export.export(converted(model, "cheap"), (x,), strict=True)
    assert not is_told()


def test_a_setting_of_the_user_stays() -> None:
    model, x = perceptrons()
    with config.patch(ban_recompute_used_far_apart=False):
        torch.compile(converted(model, "cheap"), backend=settings([]))(x)
        assert is_told()


def test_regions_tell_it_too() -> None:
    class Recognised(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x)

    class Function(nn.Module):
        def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
            return F.gelu(x) * scale

    def region(x: Tensor) -> Tensor:
        with brim.saving("cheap"):
            return F.gelu(x)

    for work in (*(converted(kind(), "cheap") for kind in (Recognised, Function)), region):
        seen: list[Any] = []
        torch.compile(work, backend=settings(seen), fullgraph=True)(torch.randn(4))
        assert seen == [(True, 0)], work


class Noisy(nn.Module):
    """Random operators that torch's partitioner does not know as such, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        mask = torch.empty(len(x), 1).bernoulli_(0.5)
        return F.dropout(x * torch.rand_like(x), 0.3) + (y * mask).tanh()


@pytest.mark.parametrize("recompute", ["cheap", "products"])
def test_random_numbers_are_not_drawn_again(recompute: str) -> None:
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(16, 8)
    ours = converted(model, recompute)
    found = []
    for net, call in ((model, model), (ours, torch.compile(ours, backend="aot_eager"))):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        call(given).square().sum().backward()
        found.append([given.grad, *(parameter.grad for parameter in net.parameters())])
    torch.testing.assert_close(*found)


def kept_and_gradients(
    model: nn.Module, x: Tensor, call: Callable[..., Tensor]
) -> tuple[int, list[Tensor]]:
    for _ in range(2):  # the first call compiles
        model.zero_grad()
        with brim.PeakMeter("cpu") as meter:
            loss = call(x).square().mean()
            kept = meter.left
        loss.backward()
        del loss
    return kept, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["cheap", "products"])
@pytest.mark.parametrize("make", [perceptrons, with_a_large_table, images, with_bits])
def test_as_much_is_kept_as_without_a_compiler(
    make: Callable[[], tuple[nn.Module, Tensor]], recompute: str
) -> None:
    torch.manual_seed(0)
    model, x = make()
    plain = torch.compile(converted(model, None), backend="aot_eager_decomp_partition")
    most, expected = kept_and_gradients(plain, x, plain)
    eager = converted(model, recompute)
    least, _ = kept_and_gradients(eager, x, eager)
    ours = converted(model, recompute)
    compiled = torch.compile(ours, backend="aot_eager_decomp_partition", fullgraph=True)
    kept, gradients = kept_and_gradients(ours, x, compiled)
    assert kept <= 1.05 * least < 0.8 * most, (kept, least, most)
    for own, torchs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(own, torchs)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["cheap", "products"])
@pytest.mark.parametrize("make", [images, with_bits])
def test_frozen_layers_keep_no_more_than_with_plain_ones(
    make: Callable[[], tuple[nn.Module, Tensor]], recompute: str
) -> None:
    torch.manual_seed(0)
    model, x = make()
    model.requires_grad_(False)[0].requires_grad_(True)
    found = []
    for level in (None, recompute):
        ours = converted(model, level)
        compiled = torch.compile(ours, backend="aot_eager_decomp_partition", fullgraph=True)
        found.append(kept_and_gradients(ours, x, compiled))
    (most, expected), (kept, gradients) = found
    assert kept <= most
    torch.testing.assert_close(gradients, expected)
