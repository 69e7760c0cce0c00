"""Activations by name, and gated activations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brim
import brim.nn.functional as F  # noqa: N812
from brim.nn._elementwise import ELEMENTWISE

from .nn_cases import FLOATS, HALVES
from .nn_functions import assert_same, run
from .nn_kept import really_held

GPU = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ["cpu", GPU]
NAMES = sorted(ELEMENTWISE)
ONE_OPERATOR = ["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "mish", "hardswish"]

Call = Callable[..., Tensor]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Small and large, and some that are not finite."""
    x = torch.randn(*shape, dtype=torch.float64) * 3
    if x.numel() > 8:
        x.view(-1)[:4] = torch.tensor([0.0, -0.0, 30.0, -30.0])
    return x.to(device, dtype)


def gated(name: str) -> tuple[Call, Call]:
    act = ELEMENTWISE[name]
    return lambda gate, up: F.gated(gate, up, name), lambda gate, up: act(gate) * up


# -- Values and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_an_activation_is_what_models_write(name: str, device: str) -> None:
    for dtype in FLOATS:
        for x in (
            numbers(5, 7, dtype=dtype, device=device),
            numbers(16, 264, dtype=dtype, device=device),
            numbers(4, 6, 8, dtype=dtype, device=device).transpose(0, 2),
        ):
            ours = run(lambda x: F.activation(x, name), [x], [True])
            assert_same(ours, run(ELEMENTWISE[name], [x], [True]), f"{dtype} {tuple(x.shape)}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_gated_activation_is_two_operators(name: str, device: str) -> None:
    mine, torchs = gated(name)
    for dtype in FLOATS:
        packed = numbers(6, 48, dtype=dtype, device=device)
        dense = [numbers(6, 24, dtype=dtype, device=device) for _ in range(2)]
        layouts = {
            "odd": [numbers(5, 7, dtype=dtype, device=device) for _ in range(2)],
            "halves": list(packed.chunk(2, -1)),
            "transposed": [x.t() for x in packed.chunk(2, -1)],
            "one of each": [packed[:, :24], dense[0]],
        }
        for layout, inputs in layouts.items():
            ours = run(mine, inputs, [True, True])
            assert_same(ours, run(torchs, inputs, [True, True]), f"{dtype} {layout}")
        for needs in ([True, True], [True, False], [False, True]):
            ours = run(mine, dense, needs)
            assert_same(ours, run(torchs, dense, needs), f"{dtype} {needs}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["silu", "new_gelu", "fast_gelu"])
def test_types_are_promoted_as_torch_does(name: str, device: str) -> None:
    mine, torchs = gated(name)
    for first, second in itertools.permutations(FLOATS, 2):
        inputs = [
            numbers(3, 8, dtype=first, device=device),
            numbers(3, 8, dtype=second, device=device),
        ]
        for needs in ([True, True], [True, False], [False, True]):
            ours = run(mine, inputs, needs)
            assert_same(ours, run(torchs, inputs, needs), f"{first} {second} {needs}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["silu", "gelu", "quick_gelu", "laplace"])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_halves_of_one_tensor(name: str, gate_first: bool, dim: int, device: str) -> None:
    def torchs(packed: Tensor) -> Tensor:
        first, second = packed.chunk(2, dim)
        gate, up = (first, second) if gate_first else (second, first)
        return ELEMENTWISE[name](gate) * up

    for dtype in FLOATS:
        for packed in (
            numbers(4, 6, 16, dtype=dtype, device=device),
            numbers(4, 10, 6, dtype=dtype, device=device).transpose(1, 2),
        ):
            ours = run(lambda x: F.gated_packed(x, name, gate_first, dim), [packed], [True])
            assert_same(ours, run(torchs, [packed], [True]), f"{dtype}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", HALVES)
@pytest.mark.parametrize(
    "name", ["silu", "new_gelu", "relu_squared", "softplus_mish", "quick_gelu"]
)
def test_under_autocast(name: str, low: torch.dtype, device: str) -> None:
    """Powers and softplus run in float32 on CUDA, and with them the result; again in backward."""

    def under_autocast(call: Call) -> Call:
        def run_it(*args: Tensor) -> Tensor:
            with torch.autocast(device, low):
                return call(*args)

        return run_it

    mine, torchs = map(under_autocast, gated(name))
    alone = under_autocast(lambda x: F.activation(x, name))
    for dtype in (low, torch.float32):
        inputs = [numbers(8, 24, dtype=dtype, device=device) for _ in range(2)]
        for needs in ([True, True], [True, False]):
            assert_same(run(mine, inputs, needs), run(torchs, inputs, needs), f"{dtype} {needs}")
        ours = run(alone, inputs[:1], [True])
        assert_same(ours, run(under_autocast(ELEMENTWISE[name]), inputs[:1], [True]), f"{dtype}")


@pytest.mark.slow  # imports transformers
def test_hugging_face_writes_them_the_same_way() -> None:
    activations = pytest.importorskip("transformers.activations")
    written = {
        "new_gelu": activations.NewGELUActivation(),
        "fast_gelu": activations.FastGELUActivation(),
        "quick_gelu": activations.QuickGELUActivation(),
        "erf_gelu": activations.GELUActivation(use_gelu_python=True),
        "clipped_gelu": activations.ClippedGELUActivation(-10, 10),
        "relu_squared": activations.ReLUSquaredActivation(),
        "laplace": activations.LaplaceActivation(),
        "mish": activations.MishActivation(),
    }
    also = {"new_gelu": activations.AccurateGELUActivation()}
    for name, module in [*written.items(), *also.items()]:
        for dtype in FLOATS:
            x = numbers(5, 33, dtype=dtype)
            ours = run(lambda x, name=name: F.activation(x, name), [x], [True])
            assert_same(ours, run(module, [x], [True]), f"{name} {dtype}")


def test_shapes_are_broadcast_by_torch() -> None:
    inputs = [numbers(3, 1, 4), numbers(5, 4)]
    mine, torchs = gated("silu")
    assert_same(run(mine, inputs, [True, True]), run(torchs, inputs, [True, True]))


# -- What is kept ----------------------------------------------------------------------------------


def test_the_two_inputs_are_kept() -> None:
    x = torch.randn(64, 512, requires_grad=True)

    def call(function: Call) -> Callable[[], Tensor]:
        return lambda: function(x.clone(), x.clone()).sum()

    for name in ONE_OPERATOR:
        mine, torchs = gated(name)
        assert really_held(call(mine)) == 2 * x.nbytes, name
        shares = name in ("relu", "sigmoid", "tanh")  # torch keeps their output, as mul does
        assert really_held(call(torchs)) == (2 if shares else 3) * x.nbytes, name


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_keeps_its_input(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 512, dtype=dtype, requires_grad=True)
        assert really_held(lambda x=x: F.activation(x.clone(), name).sum()) == x.nbytes


def test_halves_are_kept_once() -> None:
    x = torch.randn(64, 512, requires_grad=True)
    for call in (
        lambda: F.gated_packed(x.clone()).sum(),
        lambda: F.gated(*x.clone().chunk(2, -1)).sum(),
    ):
        assert really_held(call) == x.nbytes


class Mlp(nn.Module):
    """A gated MLP; `halves` with one linear layer for gate and up."""

    def __init__(self, halves: bool = False, name: str = "silu") -> None:
        super().__init__()
        self.halves, self.name = halves, name
        self.up = nn.Linear(16, 128)
        self.down = nn.Linear(64, 16)
        self.ours = False

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.ours and self.halves:
            return self.down(F.gated_packed(up, self.name))
        gate, up = up.chunk(2, -1)
        product = F.gated(gate, up, self.name) if self.ours else ELEMENTWISE[self.name](gate) * up
        return self.down(product)


def mlps(**options: Any) -> tuple[Mlp, Mlp]:
    torch.manual_seed(0)
    torchs, ours = Mlp(**options), Mlp(**options)
    ours.load_state_dict(torchs.state_dict())
    ours.ours = True
    brim.convert(ours, recompute="cheap", only=nn.Linear)
    return ours, torchs


def grads_of(model: nn.Module, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    model.zero_grad()
    leaf = x.detach().requires_grad_()
    output = call(model, leaf)
    output.square().sum().backward()
    return [output.detach(), leaf.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", ["silu", "new_gelu", "erf_gelu"])
@pytest.mark.parametrize("halves", [True, False])
def test_the_layer_behind_keeps_nothing(halves: bool, name: str) -> None:
    ours, torchs = mlps(halves=halves, name=name)
    x = torch.randn(256, 16)
    assert_same(grads_of(ours, x, nn.Module.__call__), grads_of(torchs, x, nn.Module.__call__))
    hidden = 256 * 128 * 4
    assert really_held(lambda: ours(x).sum()) == hidden
    assert really_held(lambda: torchs(x).sum()) >= 2 * hidden


def test_cheap_inputs_are_not_kept() -> None:
    """gate and up come from activations that keep their own input."""
    x = torch.randn(64, 512, requires_grad=True)

    def call(recompute: bool) -> Tensor:
        gate = F.activation(x, "quick_gelu")
        up = F.activation(x, "laplace")
        return F.gated(gate, up, "gelu", recompute=recompute)

    kept = {
        recompute: really_held(lambda r=recompute: call(r).sum()) for recompute in (True, False)
    }
    assert kept == {True: 0, False: 2 * x.nbytes}
    outcomes = []
    for recompute in (True, False):
        x.grad = None
        call(recompute).square().sum().backward()
        outcomes.append([x.grad])
    assert_same(*outcomes)


# -- With the rest of torch ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["silu", "new_gelu", "laplace"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("halves", [True, False])
def test_checkpoint(name: str, reentrant: bool, halves: bool) -> None:
    ours, torchs = mlps(halves=halves, name=name)
    x = torch.randn(8, 16)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    assert_same(grads_of(ours, x, call), grads_of(torchs, x, nn.Module.__call__))


@pytest.mark.parametrize("name", ["silu", "new_gelu", "laplace"])
def test_saved_tensor_hooks_see_the_inputs_alone(name: str) -> None:
    ours, torchs = mlps(name=name)
    x = torch.randn(8, 16)
    seen: list[torch.Size] = []

    def call(model: nn.Module, x: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor.shape)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = model(x)
            output.square().sum().backward()
            seen.append(torch.Size([0]))
            model.zero_grad()
            return model(x)

    ours_grads = grads_of(ours, x, call)
    first = seen[: seen.index(torch.Size([0]))]
    assert first.count(torch.Size([8, 64])) == 2  # gate and up, and nothing inside of backward
    assert_same(ours_grads[:2], grads_of(torchs, x, call)[:2])


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "new_gelu", "quick_gelu", "fast_gelu"])
def test_second_derivatives(name: str) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradgradcheck(gated(name)[0], (gate, up))
    assert torch.autograd.gradgradcheck(lambda x: F.activation(x, name), (gate,))
    packed = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: F.gated_packed(x, name), (packed,))


@pytest.mark.parametrize("name", ["silu", "new_gelu", "laplace"])
def test_a_change_in_place_is_noticed(name: str) -> None:
    for index in range(2):
        leaves = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
        inputs = [x * 2 for x in leaves]
        output = F.gated(*inputs, name)
        inputs[index].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("name", ["silu", "new_gelu", "laplace"])
def test_backward_twice(name: str) -> None:
    gate, up = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    output = F.gated(gate, up, name).sum()
    output.backward(retain_graph=True)
    first = gate.grad.clone()
    output.backward()
    assert torch.equal(gate.grad, first * 2)
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["silu", "new_gelu", "laplace"])
def test_torch_func(name: str) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    mine, torchs = gated(name)

    def of(function: Call) -> list[Tensor]:
        def total(x: Tensor) -> Tensor:
            return function(x, x * 2).sum()

        return [
            torch.func.grad(total)(x),
            torch.func.vmap(torch.func.grad(total))(x),
            torch.func.vmap(lambda row: function(row, row))(x),
            torch.func.jvp(total, (x,), (x,))[1],
            torch.func.hessian(total)(x[0]),
        ]

    for a, b in zip(of(mine), of(torchs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_torch_compile() -> None:
    for halves in (True, False):
        ours, torchs = mlps(halves=halves)
        x = torch.randn(8, 16)
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        result = grads_of(compiled, x, nn.Module.__call__)
        for a, b in zip(result, grads_of(torchs, x, nn.Module.__call__), strict=True):
            torch.testing.assert_close(a, b)
    again = torch.compile(
        lambda x: F.rerun(lambda x: x * x.sigmoid(), x), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(again(x), x * x.sigmoid())


def test_without_gradients_nothing_is_recorded() -> None:
    x = torch.randn(3, 4)
    assert F.gated(x, x).grad_fn is None
    with torch.no_grad():
        assert F.activation(x.requires_grad_(), "new_gelu").grad_fn is None


# -- Wrong arguments -------------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"activation must be one of silu, gelu.*; got selu"):
        F.gated(x, x, "selu")
    with pytest.raises(ValueError, match="got Silu"):
        F.activation(x, "Silu")
    with pytest.raises(ValueError, match="even size in dimension -1, got 5"):
        F.gated_packed(torch.randn(4, 5))
    with pytest.raises(IndexError, match="dim must be from -2 to 1, got 2"):
        F.gated_packed(x, dim=2)
    with pytest.raises(ValueError, match="at least one dimension"):
        F.gated_packed(torch.tensor(1.0))
    with pytest.raises(TypeError, match="up must be a Tensor, got None"):
        F.gated(x, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must match the size"):
        F.gated(x, torch.randn(4, 5))
