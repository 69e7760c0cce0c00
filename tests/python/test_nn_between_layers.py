"""What layers tell and ask each other, and where they must not: values that were written to, views,
parts of larger tensors, regions under other saved-tensor hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import brim

Grads = list[torch.Tensor]


def grads_of(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Grads:
    x = x.detach().clone().requires_grad_()
    net.zero_grad()
    run(x).square().sum().backward()
    return [p.grad.clone() for p in (x, *net.parameters()) if p.grad is not None]


def equal(a: Grads, b: Grads) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- Values that somebody wrote to ----------------------------------------------------------------

GATES = [nn.ReLU6(), nn.LeakyReLU(), nn.Hardtanh()]
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "neg": torch.Tensor.neg_,
    "add": lambda y: y.add_(0.7),
    "patch": lambda y: y[:, 0].fill_(-1.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recompute", [None, "cheap"])
@pytest.mark.parametrize("gate", [*GATES, nn.GELU(), nn.SiLU(), nn.LayerNorm(4)], ids=str)
def test_a_value_changed_without_autograd_on_its_way(
    gate: nn.Module, recompute: str | None, change: str
) -> None:
    """torch keeps what each layer saw; so nothing may be taken from the other's side."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    results = []
    for convert in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 4), gate, nn.Linear(4, 4))

        def change_it(_: nn.Module, __: object, y: torch.Tensor) -> None:
            with torch.no_grad():
                CHANGES[change](y)

        with net[1].register_forward_hook(change_it):
            if convert:
                brim.convert(net, recompute=recompute)
            results.append(grads_of(net, net, x))
            brim.restore(net)
    assert equal(*results)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("what", ["sum", "first", "second", "nothing"])
def test_a_sum_changed_without_autograd(what: str, in_place: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
            self.act = nn.LeakyReLU()
            self.last = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.norms[0](x), self.norms[1](x * 2)
            with torch.no_grad():
                if what in ("first", "second"):
                    (a if what == "first" else b).add_(1)
            y = a.add_(b) if in_place else a + b
            with torch.no_grad():
                if what == "sum":
                    y.add_(1)
            return self.last(self.act(y))

    x = torch.randn(16, 8)
    torchs, ours = Block(), Block()
    brim.convert(ours, recompute="cheap")
    assert equal(grads_of(ours, ours, x), grads_of(torchs, torchs, x))
    with brim.PeakMeter("cpu") as meter:
        loss = ours(x).sum()
    # x * 2 for its norm; and where somebody wrote to a value, the linear layer's own input.
    assert (meter.left < 2 * x.nbytes) == (what == "nothing"), meter.left / x.nbytes
    del loss


def test_a_freed_activation_is_not_brought_back() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = brim.nn.ReLU()(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        brim.nn.Linear(4, 4)(y).sum().backward()


# -- Views and parts ------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten": lambda y: y.flatten(1),
    "unflatten": lambda y: y.flatten(1).unflatten(1, (8, 8)),
    "transpose": lambda y: y.transpose(1, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_between_two_layers_costs_no_bits(view: str, held: int) -> None:
    kept = []
    for of in (nn, brim.nn):
        torch.manual_seed(0)
        act, last = of.ReLU(), of.Linear(64 if view == "flatten" else 8, 4)
        x = torch.randn(16, 8, 8, requires_grad=True)
        with brim.PeakMeter("cpu") as meter:
            y = last(VIEWS[view](act(x)))
            kept.append(meter.left - y.nbytes)
        y.sum().backward()
        kept.append(x.grad)
    assert kept[2] <= kept[0]
    assert torch.equal(kept[1], kept[3])


@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("layer", ["Linear", "GroupNorm", "RMSNorm", "LayerNorm", "Conv1d"])
def test_a_part_of_a_larger_tensor_does_not_pin_more_than_with_torch(
    layer: str, needs_input: bool, held: int
) -> None:
    arguments = {
        "Linear": (64, 64),
        "GroupNorm": (2, 8),
        "RMSNorm": (64,),
        "LayerNorm": (64,),
        "Conv1d": (8, 8, 3),
    }[layer]
    kept, results = [], []
    for of in (nn, brim.nn):
        torch.manual_seed(0)
        module = getattr(of, layer)(*arguments)
        leaf = torch.randn(32, 64, 64, requires_grad=needs_input)
        with brim.PeakMeter("cpu") as meter:
            y = module((leaf * 2)[:, :8])
            kept.append(meter.left - y.nbytes)
        y.square().sum().backward()
        results.append([p.grad for p in (leaf, *module.parameters()) if p.grad is not None])
    assert kept[1] <= kept[0]
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


# -- Under other hooks ----------------------------------------------------------------------------


class Net(nn.Module):
    """Residual blocks; each may be a checkpointed region."""

    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), act())
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), act(), nn.Conv2d(4, 4, 1)
                )
                for _ in range(3)
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(3)])
        self.act = act()

    def run(self, x: torch.Tensor, regions: Callable[[int], bool]) -> torch.Tensor:
        x = self.stem(x)
        for i, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):

            def body(
                x: torch.Tensor, block: nn.Module = block, norm: nn.Module = norm
            ) -> torch.Tensor:
                return self.act(norm(block(x)) + x)

            x = checkpoint(body, x, use_reentrant=False) if regions(i) else body(x)
        return x


@pytest.mark.parametrize("which", ["all", "some", "none"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [None, "cheap"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU])
def test_checkpointed_blocks(
    act: type[nn.Module], recompute: str | None, frozen: bool, which: str
) -> None:
    """A region must keep the same when it runs again, where nothing lies before it."""
    x = torch.randn(2, 3, 6, 6)
    results = []
    for convert in (False, True):
        net = Net(act)
        if frozen:
            net.eval()
            net.blocks[1].requires_grad_(False)
        if convert:
            brim.convert(net, recompute=recompute)
        regions = {"all": lambda i: True, "some": lambda i: i == 1, "none": lambda i: False}[which]
        results.append(grads_of(net, lambda x, net=net, r=regions: net.run(x, r), x))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    if not frozen:
        assert equal(*results)


@pytest.mark.parametrize("recompute", [None, "cheap"])
def test_nested_and_sequential_checkpoints(recompute: str | None) -> None:
    x = torch.randn(2, 3, 8, 8)
    results = []
    for convert in (False, True):
        net = Net(nn.ReLU)
        body = nn.Sequential(net.stem, *net.blocks)
        if convert:
            brim.convert(net, recompute=recompute)

        def nested(x: torch.Tensor, body: nn.Sequential = body) -> torch.Tensor:
            def inner(x: torch.Tensor) -> torch.Tensor:
                return checkpoint(body[1], body[0](x), use_reentrant=False)

            return body[2](checkpoint(inner, x, use_reentrant=False))

        results.append(grads_of(net, nested, x))
        results.append(
            grads_of(net, lambda x, b=body: checkpoint_sequential(b, 2, x, use_reentrant=False), x)
        )
    assert equal(results[0], results[2])
    assert equal(results[1], results[3])


def test_a_region_of_save_on_cpu_that_begins_behind_an_activation() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    grads = []
    for of in (nn, brim.nn):
        torch.manual_seed(0)
        first, act, last = of.Linear(4, 4), of.ReLU(), of.Linear(4, 4)
        y = act(first(x))
        with torch.autograd.graph.save_on_cpu():
            z = last(y)
        grads.append(list(torch.autograd.grad(z.square().sum(), [x, *last.parameters()])))
    assert equal(*grads)


# -- Several backward calls -----------------------------------------------------------------------


def layers(*kinds: nn.Module) -> list[nn.Module]:
    """Linear(8, 8), the kinds, Linear(8, 8): converted to ask each other, in float64."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(8, 8), *kinds, nn.Linear(8, 8)]).double()
    brim.convert(net, recompute="cheap")
    return list(net)


def torchs(net: list[nn.Module]) -> list[nn.Module]:
    copies = nn.ModuleList(net)
    copies = copy.deepcopy(copies)
    brim.restore(copies)
    return list(copies)


def test_a_second_derivative_through_a_value_that_was_kept_by_one_and_asked_for_by_another() -> (
    None
):
    x = torch.randn(16, 8, dtype=torch.float64)
    first, act, kept, asked = layers(nn.ReLU(), nn.Linear(8, 8))
    results = []
    for a, b, c, d in ((first, act, kept, asked), torchs([first, act, kept, asked])):
        y = b(a(x))
        loss = (c(y) + d(y)).pow(2).sum()
        for of in (c.weight, d.weight):
            (grad,) = torch.autograd.grad(loss, of, create_graph=True)
            results.append(torch.autograd.grad(grad.pow(2).sum(), a.weight, retain_graph=True)[0])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


@pytest.mark.parametrize("act", [nn.ReLU(), nn.LeakyReLU(), nn.Dropout(0.3), nn.GELU()], ids=str)
def test_what_one_backward_call_worked_out_is_not_part_of_another(act: nn.Module) -> None:
    x = torch.randn(16, 8, dtype=torch.float64)
    net = layers(nn.LayerNorm(8), act)
    results = []
    for first, norm, layer, last in (net, torchs(net)):
        torch.manual_seed(1)
        loss = last(layer(norm(first(x)))).pow(2).sum()
        torch.autograd.grad(loss, last.weight, retain_graph=True)
        (grad,) = torch.autograd.grad(loss, last.weight, create_graph=True)
        results.append(torch.autograd.grad(grad.pow(2).sum(), first.weight)[0])
    assert torch.equal(*results)


NORMS = [nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.LayerNorm(8)]


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_a_parameter_changed_between_two_backward_calls_counts_as_it_was(
    norm: nn.Module, partly: bool
) -> None:
    x = torch.randn(16, 8, dtype=torch.float64)
    first, middle, act, last = layers(norm, nn.ReLU())
    loss = last(act(middle(first(x)))).pow(2).sum()
    if partly:
        (expected,) = torch.autograd.grad(loss, last.weight, retain_graph=True)
    else:
        loss.backward(retain_graph=True)
        expected = last.weight.grad
    with torch.no_grad():
        middle.bias.add_(1)
    assert torch.equal(torch.autograd.grad(loss, last.weight)[0], expected)


@pytest.mark.parametrize("norm", [*NORMS, nn.RMSNorm(8), nn.GELU(), nn.SiLU()], ids=str)
def test_an_input_changed_between_two_backward_calls_is_seen(norm: nn.Module) -> None:
    x = torch.randn(16, 8, dtype=torch.float64)
    first, middle, last = layers(norm)
    value = first(x)
    loss = last(middle(value)).pow(2).sum()
    torch.autograd.grad(loss, last.weight, retain_graph=True)
    with torch.no_grad():
        value.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, first.weight)


# -- vmap -----------------------------------------------------------------------------------------


def test_vmap_draws_random_numbers_as_it_was_told() -> None:
    layer, x = brim.nn.Dropout(0.5), torch.ones(3, 64)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(layer)(x)
    same = torch.func.vmap(layer, randomness="same")(x)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(layer, randomness="different")(x)
    assert not torch.equal(different[0], different[1])


def test_vmap_does_not_update_running_statistics_in_silence() -> None:
    layer = brim.nn.BatchNorm1d(2)
    with pytest.raises(RuntimeError):
        torch.func.vmap(layer)(torch.randn(4, 5, 2))
    assert torch.equal(layer.running_mean, torch.zeros(2))
    x = torch.randn(4, 5, 2)
    assert torch.allclose(
        torch.func.vmap(layer.eval())(x), nn.BatchNorm1d(2).eval()(x.flatten(0, 1)).view_as(x)
    )


def test_vmap_over_the_weights_of_several_models() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
    x = torch.randn(5, 4)
    expected = torch.stack([net(x) for net in nets])
    for net in nets:
        brim.convert(net)
    params, buffers = torch.func.stack_module_state(nets)
    result = torch.func.vmap(
        lambda p, b: torch.func.functional_call(nets[0], (p, b), (x,)), in_dims=(0, 0)
    )(params, buffers)
    assert torch.allclose(result, expected, atol=1e-6)


# -- In low precision -----------------------------------------------------------------------------

IMAGES = {"GroupNorm": (8, 64), "BatchNorm2d": (64,)}
ROWS = {"LayerNorm": (64,), "RMSNorm": (64,), "BatchNorm1d": (64,)}


@pytest.mark.parametrize("act", [None, "GELU", "SiLU", "ReLU"])
@pytest.mark.parametrize("norm", [*IMAGES, *ROWS])
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_in_low_precision_the_layers_behind_a_norm_keep_nothing(
    norm: str, act: str | None, autocast: bool, held: int
) -> None:
    image = norm in IMAGES
    dtype = torch.float32 if autocast else torch.bfloat16
    x = torch.randn((4, 64, 8, 8) if image else (256, 64), dtype=dtype)
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        first, last = (nn.Conv2d(64, 64, 1) if image else nn.Linear(64, 64) for _ in range(2))
        norms = getattr(nn, norm)(*(IMAGES | ROWS)[norm])
        net = nn.Sequential(first, norms, getattr(nn, act)() if act else nn.Identity(), last)
        net.to(dtype)
        if ours:
            brim.convert(net, recompute="cheap")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with brim.PeakMeter("cpu") as meter:
                y = net(x)
                kept = meter.left - y.nbytes
            found.append(torch.autograd.grad(y.square().sum(), list(net.parameters())))
        del y
    # The norm's input and few numbers per row; of autocast the first layer's input and, until its
    # region ends, the weights.
    cast = (x.numel() + sum(p.numel() for p in net.parameters())) * 2 if autocast else 0
    assert kept < 1.15 * (x.numel() * 2 + cast)
    assert norm == "RMSNorm" or equal(*map(list, found))
