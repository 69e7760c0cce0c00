"""The layers under torch.func and torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import brim

from .nn_cases import ONE_OF_EACH, Case, near, pair
from .nn_steps import ALL, IMAGES, small_net, step

# torch's own: it loads parts of itself late, and tells of slow ways that give the right result.
TORCH_LOADS = pytest.mark.filterwarnings("ignore:`torch.jit.script")
NO_BATCHING_RULE = pytest.mark.filterwarnings("ignore:There is a performance drop")


# -- torch.func -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_func_grad(case: Case) -> None:
    ours, torchs = pair(case, torch.float32)
    results = []
    for layer in (ours, torchs):
        parameters = dict(layer.named_parameters())

        def loss(p: dict[str, torch.Tensor], x: torch.Tensor, layer: nn.Module = layer) -> Any:
            return functional_call(layer, p, (x,)).square().sum()

        torch.manual_seed(0)
        layer.train(layer.training and not case.layer.startswith("BatchNorm"))
        for_parameters, for_input = grad(loss, argnums=(0, 1))(
            parameters, case.input(torch.float32)
        )
        results.append([*for_parameters.values(), for_input])
    for a, b in zip(*results, strict=True):
        assert near(a, b)  # norms take their differentiable formula here


@pytest.mark.parametrize("recompute", [None, "cheap"])
def test_gradients_further_out(recompute: Any) -> None:
    """A second torch.func.grad, and autograd, around the one that a layer runs in."""
    results = []
    for convert in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
            nn.BatchNorm2d(4).eval(),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.ReLU6(),
            nn.MaxPool2d(2),
            nn.AvgPool2d(2, 1),
            nn.Flatten(),
            nn.LayerNorm(16),
            nn.GELU(),
            nn.Linear(16, 2),
        )
        if convert:
            brim.convert(net, recompute=recompute)
        x = IMAGES[:2].clone()

        def loss(p: Any, x: torch.Tensor, net: nn.Module = net) -> Any:
            return functional_call(net, p, (x,)).square().sum()

        def penalty(p: Any, x: torch.Tensor, loss: Any = loss) -> Any:
            return grad(loss, argnums=1)(p, x).square().sum()

        parameters = {name: value.detach() for name, value in net.named_parameters()}
        inner, outer = grad(penalty, argnums=(0, 1))(parameters, x)
        x.requires_grad_()
        penalty(dict(net.named_parameters()), x).backward()
        results.append([*inner.values(), outer, *(p.grad for p in net.parameters()), x.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# torch's Hardsigmoid has no second derivative.
@pytest.mark.parametrize("case", [each for each in ALL if each.id != "Hardsigmoid"])
def test_a_gradient_that_depends_on_what_comes_later_in_an_outer_graph(case: Case) -> None:
    """Nothing that the layer reads is of the outer graph, only the gradient that it is handed."""
    ours, torchs = pair(case, torch.float64)
    results = []
    for layer in (ours, torchs):
        layer.requires_grad_(requires_grad=False)
        layer.train(layer.training and not case.layer.startswith("BatchNorm"))
        x = case.input(torch.float64)
        torch.manual_seed(0)
        factor = torch.rand_like(layer(x)).requires_grad_()

        def loss(x: torch.Tensor, layer: nn.Module = layer, factor: Any = factor) -> Any:
            torch.manual_seed(1)
            return (layer(x) * factor).square().sum()

        inner = grad(loss)(x)
        assert inner.requires_grad
        results.append([inner, *torch.autograd.grad(inner.square().sum(), factor)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@NO_BATCHING_RULE
@pytest.mark.parametrize("case", [each for each in ONE_OF_EACH if "Pool" in each.layer], ids=str)
def test_vectorized_hessian(case: Case) -> None:
    """By torch's older vmap, which knows fewer operators."""
    results = []
    for layer in pair(case, torch.float32):
        x = case.input(torch.float32)[:1, :2]

        def loss(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
            return layer(x).pow(3).sum()

        results.append(torch.autograd.functional.hessian(loss, x, vectorize=True))
    torch.testing.assert_close(*results)


@NO_BATCHING_RULE
@TORCH_LOADS
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 3, 3),
        nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4).eval(),
        nn.ReLU(),
        nn.ReLU6(),
        nn.LeakyReLU(),
        nn.Dropout(1.0),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(2),
    ],
    ids=str,
)
def test_batched_gradients_in_channels_last(layer: nn.Module, frozen: bool) -> None:
    """vmap has strides of its own, which no kernel in backward may ask for."""
    layer.requires_grad_(not frozen)
    results = []
    ours = copy.deepcopy(layer)
    brim.convert(ours)
    for each in (ours, layer):
        x = IMAGES[:2, [0, 1, 2, 0]].to(memory_format=torch.channels_last).requires_grad_()
        output = each(x * 1)
        many = torch.stack([output.detach(), torch.ones_like(output)])
        results.append(
            [
                *torch.autograd.grad(output, x, many, is_grads_batched=True),
                torch.func.jacrev(each)(x.detach()),
            ]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@NO_BATCHING_RULE
@TORCH_LOADS
@pytest.mark.parametrize("case", ALL)
def test_vmap_gives_the_result_or_says_why_not(case: Case) -> None:
    ours, torchs = pair(case, torch.float32)
    layers = [layer.eval().requires_grad_(False) for layer in (ours, torchs)]
    x = torch.stack([case.input(torch.float32)] * 3)
    try:
        mine = vmap(layers[0])(x)
    except (RuntimeError, NotImplementedError) as error:
        assert any(word in str(error) for word in ("vmap", "batching rule")), error  # noqa: PT017
    else:
        torch.testing.assert_close(mine, vmap(layers[1])(x))


@TORCH_LOADS
@pytest.mark.parametrize("case", ALL)
def test_forward_mode_gives_what_torch_gives(case: Case) -> None:
    """brim has no forward-mode derivatives: torch's operators run."""
    x = case.input(torch.float32)
    results = []
    for layer in pair(case, torch.float32):
        if case.layer.startswith("BatchNorm"):
            layer.eval()
        torch.manual_seed(0)
        results.append(jvp(layer, (x,), (torch.ones_like(x),)))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@TORCH_LOADS
@pytest.mark.parametrize(
    "call",
    [
        lambda of, x, w: of.linear(x, w),
        lambda of, x, w: grad(lambda v: of.relu(of.linear(x, v)).square().sum())(w),
    ],
    ids=["through the weight", "over a gradient"],
)
def test_forward_mode_of_functions(call: Callable[..., torch.Tensor]) -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    mine, theirs = (
        jvp(partial(call, of, x), (weight,), (weight,)) for of in (brim.nn.functional, F)
    )
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("case", "frozen"),
    [pytest.param(case, False, id=case.layer) for case in ONE_OF_EACH]
    + [
        pytest.param(case, True, id=f"{case.layer}-frozen")
        for case in ONE_OF_EACH
        if len(case.needs()) > 1
    ],
)
def test_compile_with_one_graph(case: Case, frozen: bool) -> None:
    ours, torchs = pair(case, torch.float32)
    for layer in (ours, torchs):
        layer.requires_grad_(not frozen)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = case.input(torch.float32)
    mine, theirs = step(ours, x, compiled), step(torchs, x)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(ours.buffers(), torchs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_compile_gets_brims_operator_only_where_it_keeps_less(inplace: bool) -> None:
    net = nn.Sequential(brim.nn.Hardsigmoid(inplace), brim.nn.ReLU(inplace), brim.nn.SiLU(inplace))
    called: set[str] = set()

    def record(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(net, fullgraph=True, backend=record)(torch.randn(4))
    ours = {target.split(".")[1] for target in called if target.startswith("brim.")}
    assert ours == {"hardsigmoid", "relu"}, called


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "frozen",
    [pytest.param(False, id="trainable", marks=pytest.mark.slow), pytest.param(True, id="frozen")],
)
def test_compile_of_a_net_with_changing_batches(frozen: bool) -> None:
    ours, torchs = small_net(), small_net(nn)
    for net in (ours, torchs):
        net.requires_grad_(not frozen)
        net[6].p = 0.0  # the compiler draws other random numbers
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (2, 5, 7):
        x = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(n))
        for a, b in zip(step(ours, x, compiled), step(torchs, x), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@TORCH_LOADS
@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_inductor(frozen: bool) -> None:
    ours, torchs = small_net(), small_net(nn)
    for net in (ours, torchs):
        net.requires_grad_(not frozen)
        net[6].p = 0.0
    compiled = torch.compile(ours, fullgraph=True)
    for a, b in zip(step(ours, IMAGES, compiled), step(torchs, IMAGES), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
