"""What a program changes between forward and backward changes no gradient in silence.

For every layer, alone and with recompute="cheap" behind others, and for every change: the gradients
are torch.nn's. Where torch raises an error, ours are those without the change, or the same error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import brim

from .nn_cases import ONE_OF_EACH, Case, pair

Change = Callable[[nn.Module], Any]
Grads = list[torch.Tensor] | str
"""Of input and parameters; the error's text where backward raises one."""


def in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(-1.5)


def through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(-1.5)


def parameters(name: str, change: Callable[[torch.Tensor], None]) -> Change:
    return lambda net: [change(p) for key, p in net.named_parameters() if key.endswith(name)]


def set_numbers(net: nn.Module) -> None:
    for module in net.modules():
        for name in ("eps", "momentum", "p", "negative_slope", "stride", "num_groups", "inplace"):
            if hasattr(module, name):
                setattr(module, name, 1)
        if isinstance(module, nn.Hardtanh):
            module.min_val, module.max_val = -0.1, 0.1


def move_statistics(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            training, dims = module.training, int(type(module).__name__[-2])
            module.train()(torch.randn(4, module.num_features, *[3] * dims) + 5)
            module.train(training)


def no_change(net: nn.Module) -> None:
    pass


CHANGES: dict[str, Change] = {
    "weight in place": parameters("weight", in_place),
    "weight through .data": parameters("weight", through_data),
    "bias in place": parameters("bias", in_place),
    "bias through .data": parameters("bias", through_data),
    "mode": lambda net: net.train(not net.training),
    "attributes": set_numbers,
    "frozen": lambda net: net.requires_grad_(False),
    "random state": lambda net: torch.manual_seed(99),
    "autocast": lambda net: torch.set_autocast_enabled("cpu", True),
}


@pytest.fixture(autouse=True)
def _autocast_as_before() -> Iterator[None]:
    yield
    torch.set_autocast_enabled("cpu", False)


def grads_with(net: nn.Module, x: torch.Tensor, change: Change) -> Grads:
    leaf = x.detach().requires_grad_()
    trained = [p for p in net.parameters() if p.requires_grad]
    torch.manual_seed(0)
    output = net(leaf * 1.0)
    up = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    change(net)
    try:
        return list(torch.autograd.grad(output, [leaf, *trained], up))
    except RuntimeError as error:
        return str(error)
    finally:
        torch.set_autocast_enabled("cpu", False)


def check(ours: Grads, torchs: Grads, unchanged: Grads, what: str) -> None:
    if isinstance(ours, str):
        assert isinstance(torchs, str), (what, ours)
        return
    expected = unchanged if isinstance(torchs, str) else torchs
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"{what} {i} {m}")  # type: ignore[misc]


def compare(
    torchs: nn.Module, ours: nn.Module, x: torch.Tensor, changes: dict[str, Change]
) -> None:
    unchanged = grads_with(copy.deepcopy(torchs), x, no_change)
    for what, change in changes.items():
        expected = grads_with(copy.deepcopy(torchs), x, change)
        check(grads_with(copy.deepcopy(ours), x, change), expected, unchanged, what)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_a_layer_alone(case: Case, train: bool) -> None:
    ours, torchs = (layer.train(train) for layer in pair(case, torch.float32))
    compare(torchs, ours, case.input(torch.float32), CHANGES)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "BatchNorm1d": nn.BatchNorm1d,
    "LayerNorm": nn.LayerNorm,
    "GroupNorm": lambda width: nn.GroupNorm(2, width),
    "RMSNorm": nn.RMSNorm,
    "GELU": lambda width: nn.GELU(),
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "Hardtanh": nn.Hardtanh,
    "Dropout": lambda: nn.Dropout(0.5),
    "nothing": nn.Identity,
}


class Residual(nn.Module):
    """Two blocks, the second with a sum: everything that can be asked for its value again."""

    def __init__(self, norm: str, activation: str, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.norms = nn.ModuleList([NORMS[norm](width) for _ in range(2)])
        self.activation = ACTIVATIONS[activation]()
        for name, parameter in self.norms.named_parameters():
            nn.init.normal_(parameter, float("weight" in name), 0.5)
        self.values: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.linears[0](x)
        b = self.norms[0](a)
        c = self.activation(b)
        d = self.linears[1](c)
        e = self.norms[1](d)
        f = self.activation(e + c)
        self.values = [a, b, c, d, e, f]
        return self.linears[2](f)  # type: ignore[no-any-return]


@pytest.mark.parametrize("recompute", [None, "cheap"])
@pytest.mark.parametrize(
    ("train", "width"),  # a weight and a bias of 64 bytes each are copied together
    [(True, 16), (False, 8)],
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layers_that_give_values_again(
    norm: str, activation: str, train: bool, width: int, recompute: str | None
) -> None:
    torchs = Residual(norm, activation, width).train(train)
    ours = copy.deepcopy(torchs)
    brim.convert(ours, recompute=recompute)
    x = torch.randn(6, width)
    changes = CHANGES | {
        f"value {i} in place": lambda net, i=i: in_place(net.values[i]) for i in range(6)
    }
    compare(torchs, ours, x, changes)


@pytest.mark.parametrize("recompute", [None, "cheap"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("under", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_statistics_that_move_after_a_forward_in_eval_mode(
    recompute: str | None, frozen: bool, under: Callable[[], Any]
) -> None:
    """torch's own backward in eval mode reads the moved ones; here it is the forward's."""
    net = Residual("BatchNorm1d", "ReLU").eval()
    net.norms.requires_grad_(not frozen)
    x = torch.randn(6, 8)
    expected = grads_with(copy.deepcopy(net), x, no_change)
    brim.convert(net, recompute=recompute)

    def move(net: nn.Module) -> None:
        with under():
            move_statistics(net)

    for _ in range(2):  # the second time with what the first one left
        found = grads_with(copy.deepcopy(net), x, move)
        assert not isinstance(found, str)
        assert not isinstance(expected, str)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    again = grads_with(net, x, move_statistics)
    moved = grads_with(net, x, no_change)
    assert not torch.equal(again[0], moved[0]), "a later forward sees what was moved"  # type: ignore[arg-type]


def test_losses_in_eval_mode_and_in_training_add_up() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.randn(6, 8), torch.randn(6, 8) * 3
    apart = copy.deepcopy(net)
    apart.eval()(x).pow(2).mean().backward()
    apart.train()(y).pow(2).mean().backward()
    for recompute in (None, "cheap"):
        ours = copy.deepcopy(net)
        brim.convert(ours, recompute=recompute)
        first = ours.eval()(x).pow(2).mean()
        second = ours.train()(y).pow(2).mean()
        (first + second).backward()
        for a, b in zip(ours.parameters(), apart.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_statistics_are_copied_only_where_they_move(held: int) -> None:
    norm = brim.nn.BatchNorm1d(1000).eval().requires_grad_(False)
    x = torch.randn(4, 1000, requires_grad=True)
    with brim.PeakMeter("cpu") as meter:
        outputs = [norm(x) for _ in range(3)]
        assert meter.left == 3 * x.nbytes
        norm.train()(x.detach())
        assert meter.left == 3 * x.nbytes + 4000, "the variances, once for all"
        del outputs
        assert meter.left == 0


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_a_weight_under_autocast_that_is_changed_is_an_error(frozen: bool) -> None:
    """torch keeps a copy in bfloat16; the weight itself is cast again in backward here."""
    layer = brim.nn.Linear(8, 8).requires_grad_(not frozen)
    layer.recompute = True
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(torch.randn(2, 8, requires_grad=True))
    in_place(layer.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_weight_that_has_no_memory_between_forward_and_backward() -> None:
    """As in FSDP: the next layer keeps its input instead of asking for it."""
    norm, linear = brim.nn.LayerNorm(8), brim.nn.Linear(8, 4)
    linear.recompute = True
    x = torch.randn(6, 8, requires_grad=True)
    expected = torch.autograd.grad(linear(norm(x)).sum(), [x, linear.weight])
    weights = [(p.untyped_storage(), p.detach().clone()) for p in norm.parameters()]
    normal = norm(x)
    for memory, _ in weights:
        memory.resize_(0)
    output = linear(normal)
    del normal
    for (memory, values), parameter in zip(weights, norm.parameters(), strict=True):
        memory.resize_(values.nbytes)
        parameter.data.copy_(values)
    found = torch.autograd.grad(output.sum(), [x, linear.weight])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
