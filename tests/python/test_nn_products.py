"""`recompute="products"`: linear layers and convolutions whose output is larger run again."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import brim

from .nn_product_models import (
    IMAGES,
    MODELS,
    ROWS,
    TOKENS,
    WIDTH,
    Gated,
    Halves,
    Residual,
    bottleneck,
    mlp,
)


def built(name: str, training: str = "full") -> tuple[nn.Module, Tensor]:
    make, shape, _ = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    for key, parameter in model.named_parameters():
        trains = {"full": True, "frozen": False, "BitFit": key.endswith("bias")}
        parameter.requires_grad_(trains[training])
    return model, torch.randn(shape)


def converted(model: nn.Module, recompute: str | None) -> nn.Module:
    ours = copy.deepcopy(model)
    brim.convert(ours, recompute=recompute)
    return ours


def steps(model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    """The losses and gradients of three steps, and the parameters behind them."""
    torch.manual_seed(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1) if trained else None
    found = []
    for _ in range(3):
        leaf = x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(leaf).float().square().mean()
        loss.backward()
        found += [loss.detach(), leaf.grad, *(p.grad.clone() for p in trained)]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(p.detach() for p in trained)]


def kept_by(model: nn.Module, x: Tensor) -> int:
    leaf = x.detach().requires_grad_()
    with brim.PeakMeter("cpu") as meter:
        output = model(leaf)
        return meter.left - output.untyped_storage().nbytes()


def products_in_backward(model: nn.Module, x: Tensor) -> int:
    """How many forward products a backward pass runs: gradients are other operators."""
    loss = copy.deepcopy(model)(x.detach().requires_grad_()).square().mean()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as run:
        loss.backward()
    names = ("aten::addmm", "aten::convolution")
    return sum(each.count for each in run.key_averages() if each.key in names)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("training", ["full", "BitFit", "frozen"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_same_bits(name: str, autocast: bool, training: str) -> None:
    model, x = built(name, training)
    found = steps(converted(model, "products"), x, autocast)
    assert equal(found, steps(converted(model, None), x, autocast))
    expected = steps(model, x, autocast)
    if (name, training) in ROUNDED:
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    else:
        assert equal(found, expected)


# Without recomputation too: an RMS norm and the bias of a frozen convolution sum in another order.
ROUNDED = {*(("gated", each) for each in ("full", "BitFit", "frozen")), ("convnext", "BitFit")}


@pytest.mark.parametrize("training", ["full", "BitFit", "frozen"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_product_can_give_again_is_not_kept(name: str, training: str) -> None:
    model, x = built(name, training)
    cheap, products = (kept_by(converted(model, level), x) for level in ("cheap", "products"))
    # Biases, and where the product's weight is frozen those of the normalisation, are copied.
    copies = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    expected = 4 * MODELS[name][2]
    assert expected - copies <= cheap - products <= expected


def test_only_the_bias_is_copied_for_a_product() -> None:
    model, x = built("mlp")
    cheap, products = (kept_by(converted(model, level), x) for level in ("cheap", "products"))
    assert cheap - products == 4 * (ROWS * 4 * WIDTH - 4 * WIDTH)


ONCE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (lambda: Residual(*mlp()), TOKENS, 1),
    "gated": (lambda: Residual(nn.LayerNorm(WIDTH), Gated(WIDTH, 3 * WIDTH, True)), TOKENS, 2),
    "halves": (lambda: Residual(nn.LayerNorm(WIDTH), Halves(WIDTH)), TOKENS, 1),
    "bottlenecks": (lambda: nn.Sequential(bottleneck(), bottleneck()), IMAGES, 2),
    "two askers": (
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), Twice(4 * WIDTH)),
        TOKENS,
        1,
    ),
}


class Twice(nn.Module):
    """Two activations of the same value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.GELU(), nn.SiLU()
        self.down, self.other = nn.Linear(width, WIDTH), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.first(x)) + self.other(self.second(x))
        return output


@pytest.mark.parametrize("training", ["full", "frozen"])
@pytest.mark.parametrize("name", ONCE)
def test_a_product_runs_again_once_per_backward(name: str, training: str) -> None:
    make, shape, again = ONCE[name]
    torch.manual_seed(0)
    model, x = make().requires_grad_(training == "full"), torch.randn(shape)
    assert products_in_backward(converted(model, "cheap"), x) == 0
    ours = converted(model, "products")
    assert products_in_backward(ours, x) == again
    assert equal(steps(ours, x, False), steps(model, x, False))


def test_a_product_that_does_not_widen_is_not_run_again() -> None:
    layers = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    model, x = nn.Sequential(*layers), torch.randn(TOKENS)
    ours = converted(model, "products")
    assert products_in_backward(ours, x) == 0
    assert kept_by(ours, x) == kept_by(converted(model, "cheap"), x)


def test_no_product_runs_again_for_bits() -> None:
    """A ReLU keeps one bit per element; for a trained layer behind it, a product is worth it."""
    layers = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 8)]
    model, x = nn.Sequential(*layers), torch.randn(TOKENS)
    assert products_in_backward(converted(model, "products"), x) == 1
    model.requires_grad_(False)
    ours = converted(model, "products")
    assert products_in_backward(ours, x) == 0
    assert kept_by(ours, x) == kept_by(converted(model, "cheap"), x)


def test_a_first_layer_runs_again() -> None:
    """Its own input is a batch, which needs no gradient."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    expected = torch.autograd.grad(stem(x).square().sum(), [*stem.parameters()])
    brim.convert(stem, recompute="products")
    with brim.PeakMeter("cpu") as meter:
        output = stem(x)
        kept = meter.left - output.nbytes
    assert kept < output.nbytes // 2
    found = torch.autograd.grad(output.square().sum(), [*stem.parameters()])
    assert equal([*found], [*expected])


@pytest.mark.parametrize("name", ["mlp", "gated", "bottleneck"])
def test_a_weight_that_is_changed_before_backward_is_an_error(name: str) -> None:
    model, x = built(name)
    ours = converted(model, "products")
    loss = ours(x.requires_grad_()).square().sum()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_bias_that_is_changed_before_backward_does_not_count() -> None:
    """As in torch, whose backward does not read it."""
    model, x = built("mlp")
    grads = []
    for net in (model, converted(model, "products")):
        loss = net(x.requires_grad_()).square().sum()
        with torch.no_grad():
            net.block[1].bias.mul_(2)
        grads.append([*torch.autograd.grad(loss, [x, net.block[1].weight])])
    assert equal(*grads)


@pytest.mark.parametrize("name", MODELS)
def test_hooks_see_each_kept_tensor_once(name: str) -> None:
    model, x = built(name)
    ours = converted(model, "products")
    expected = steps(copy.deepcopy(ours), x, False)
    open_ones: set[int] = set()

    def pack(tensor: Tensor) -> tuple[int, Tensor]:
        key = len(open_ones)
        open_ones.add(key)
        return key, tensor.detach().clone()

    def unpack(packed: tuple[int, Tensor]) -> Tensor:
        seen.append(packed[0])
        return packed[1]

    seen: list[int] = []
    torch.manual_seed(1)
    leaf = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = ours(leaf).float().square().mean()
    loss.backward()
    assert torch.equal(loss, expected[0])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected[1])
    assert len(seen) == len(set(seen))


def test_copies_and_pickles_run_again_too() -> None:
    model, x = built("mlp")
    ours = converted(model, "products")
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for each in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert kept_by(each, x) == kept_by(ours, x)
        assert products_in_backward(each, x) == 1


def test_a_second_backward_is_an_error_as_before() -> None:
    model, x = built("mlp")
    loss = converted(model, "products")(x.requires_grad_()).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad
    x.grad = None
    loss.backward()
    assert first is not None
    assert x.grad is not None
    assert torch.equal(x.grad, first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("level", ["cheap", "products"])
@pytest.mark.parametrize("name", ["mlp", "gated", "bottleneck", "halves", "split", "unbound"])
def test_second_derivatives(name: str, level: str) -> None:
    """Bit for bit: a value that was computed again has its old place in the graph."""
    model, x = built(name)
    model, x = model.double(), x.double()
    found = []
    for net in (model, converted(model, level)):
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(net(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [leaf, *net.parameters()]))
    for mine, other in zip(*found, strict=True):
        if name == "gated":  # runs again as a whole, beside its first derivative
            torch.testing.assert_close(mine, other)
        else:
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["mlp", "bottleneck"])
def test_compiled(name: str) -> None:
    model, x = built(name)
    ours = torch.compile(converted(model, "products"), backend="aot_eager")
    for mine, other in zip(steps(ours, x, False), steps(model, x, False), strict=True):
        torch.testing.assert_close(mine, other)


def test_backward_inside_of_autocast() -> None:
    model, x = built("mlp")
    found = []
    for level in ("cheap", "products"):
        leaf = x.detach().requires_grad_()
        loss = converted(model, level)(leaf).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("level", ["cheap", "products"])
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_what_is_measured(name: str, level: str) -> None:
    model = converted(nn.Sequential(built(name)[0], built(name)[0]), level)
    x = torch.randn(32, *MODELS[name][1][1:])

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    step()
    with brim.PeakMeter("cpu") as meter:
        step()
    assert brim.estimate(step, device="cpu").peak == pytest.approx(meter.peak, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed(name: str) -> None:
    model, x = built(name)
    ours = converted(model, "products")
    expected = steps(copy.deepcopy(ours), x, False)
    assert equal(steps(Checkpointed(ours), x, False), expected)


class Checkpointed(nn.Module):
    """A model that runs again as a whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.model, x, use_reentrant=False)
        return output


class Adapted(nn.Module):
    """As peft writes LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x)) * 0.5
        return output


def test_an_adapter_beside_a_product() -> None:
    norm, first, act, last = mlp()
    model = nn.Sequential(norm, Adapted(first), act, last)  # type: ignore[arg-type]
    x = torch.randn(TOKENS)
    ours = converted(model, "products")
    assert kept_by(ours, x) <= kept_by(converted(model, "cheap"), x)
    assert equal(steps(ours, x, False), steps(model, x, False))


def test_functions_run_again_too() -> None:
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True)

    def kept(recompute: str) -> int:
        with brim.PeakMeter("cpu") as meter, brim.saving(recompute):
            y = nn.functional.gelu(nn.functional.linear(x, weight))
        return meter.left - y.nbytes

    assert kept("cheap") == y_bytes(8, 16)
    assert kept("products") == 0


def y_bytes(*sizes: int) -> int:
    return 4 * torch.Size(sizes).numel()


class Merged(nn.Module):
    """A first layer whose weight is computed in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * WIDTH, WIDTH))
        self.down, self.up = (
            nn.Parameter(torch.randn(4 * WIDTH, 2)),
            nn.Parameter(torch.randn(2, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(nn.functional.linear(x, self.weight + self.down @ self.up))


@pytest.mark.parametrize("level", ["cheap", "products"])
def test_a_computed_weight_is_not_kept_for_a_product(level: str) -> None:
    x = torch.randn(4, WIDTH)
    torch.manual_seed(0)
    assert kept_by(converted(Merged(), level), x) <= kept_by(Merged(), x)


def test_the_level_can_be_changed_and_undone() -> None:
    model, x = built("mlp")
    ours = converted(model, "products")
    assert ours.block[1].runs_again is True  # type: ignore[union-attr, index]
    brim.convert(ours, recompute="cheap")
    assert kept_by(ours, x) == kept_by(converted(model, "cheap"), x)
    brim.convert(ours, recompute="products")
    brim.restore(ours)
    assert not any("runs_again" in key for module in ours.modules() for key in vars(module))
