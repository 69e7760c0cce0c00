"""Layers that ask for their input through views, copies, attention and residual sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brim
import brim.nn.functional as own

Grads = list[Tensor]


def grads_of(net: nn.Module, x: Tensor) -> Grads:
    leaf = x.detach().requires_grad_()
    torch.manual_seed(1)
    output = net(leaf).float().square().sum()
    return list(torch.autograd.grad(output, [leaf, *net.parameters()]))


def kept_by(net: nn.Module, x: Tensor) -> int:
    leaf = x.detach().requires_grad_()
    with brim.PeakMeter("cpu") as meter:
        output = net(leaf)
        return meter.left - output.untyped_storage().nbytes()


def equal(a: Grads, b: Grads) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Between(nn.Module):
    """A normalisation, what is between, and a layer with a weight."""

    def __init__(self, between: Callable[[Tensor], Tensor], last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.between, self.last = nn.LayerNorm(8), between, last
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.between(self.norm(x)))
        return output


BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], nn.Module]]] = {
    "view": (lambda y: y.view(24, 2, 8), lambda: nn.Linear(8, 4)),
    "flatten": (lambda y: y.flatten(1), lambda: nn.Linear(128, 4)),
    "unsqueeze": (lambda y: y.unsqueeze(0).squeeze(0), lambda: nn.Linear(8, 4)),
    "transpose": (lambda y: y.transpose(1, 2), lambda: nn.Linear(8, 4)),
    "matrix": (lambda y: y.view(48, 8).t(), lambda: nn.Linear(48, 4)),
    "slice": (lambda y: y[:, 1:, ::2], lambda: nn.Linear(8, 4)),
    "select": (lambda y: y[:, 0], lambda: nn.Linear(8, 4)),
    "clone": (lambda y: y.clone(), lambda: nn.Linear(8, 4)),
    "contiguous": (lambda y: y.transpose(1, 3).contiguous(), lambda: nn.Linear(2, 4)),
    "reshape": (lambda y: y.transpose(1, 2).reshape(3, 128), lambda: nn.Linear(128, 4)),
    "cast": (lambda y: y.view(48, 8).double().t(), lambda: nn.Linear(48, 4).double()),
    "to images": (lambda y: y.permute(0, 3, 1, 2), lambda: nn.Conv2d(8, 4, 2)),
    "to channels_last": (
        lambda y: y.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last),
        lambda: nn.Conv2d(8, 4, 2),
    ),
    "through an activation": (
        lambda y: torch.ops.brim.gelu(y.transpose(1, 2).contiguous(), "none", True).mT,
        lambda: nn.Linear(2, 4),
    ),
}
INPUT = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", BETWEEN)
def test_a_layer_asks_through_views_and_a_copy(name: str) -> None:
    between, last = BETWEEN[name]
    net = Between(between, last())
    expected = grads_of(net, INPUT)
    brim.convert(net, recompute="cheap")
    assert equal(grads_of(net, INPUT), expected)
    statistics, weights = 2 * 48 * 4, 2 * 8 * 4
    assert kept_by(net, INPUT) == statistics + weights


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "the base of a view": lambda y: changed(y, y.view(48, 8)),
    "a view": lambda y: changed(view := y.view(48, 8), view),
    "a view of a view": lambda y: changed(y.view(48, 8)[1:], y.view(48, 8)),
    "what was cloned": lambda y: changed(y, y.clone()),
    "the clone": lambda y: changed(copy := y.clone(), copy),
    "the clone, before its cast": lambda y: changed(copy := y.clone(), copy).double().float(),
    "the base, before the clone": lambda y: changed(y, y).clone(),
    "the reshaped copy": lambda y: changed(copy := y.mT.reshape(48, 8), copy),
}


def changed(value: Tensor, result: Tensor) -> Tensor:
    with torch.no_grad():
        value.mul_(2)
    return result


@pytest.mark.parametrize("name", WRITTEN)
def test_what_somebody_wrote_to_is_not_recomputed(name: str) -> None:
    net = Between(WRITTEN[name], nn.Linear(8, 4))
    expected = grads_of(net, INPUT)
    brim.convert(net, recompute="cheap")
    assert equal(grads_of(net, INPUT), expected)
    assert kept_by(net, INPUT) >= INPUT.nbytes


def test_a_second_derivative_through_views() -> None:
    results = []
    for recompute in (False, True):
        net = Between(lambda y: y.transpose(1, 2).reshape(3, 128), nn.Linear(128, 4)).double()
        if recompute:
            brim.convert(net, recompute="cheap")
        leaf = INPUT.double().requires_grad_()
        (grad,) = torch.autograd.grad(net(leaf).square().sum(), net.last.weight, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), [leaf, *net.norm.parameters()]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_views_inside_of_a_checkpoint() -> None:
    net = Between(lambda y: y.transpose(1, 2).reshape(3, 128), nn.Linear(128, 4))
    expected = grads_of(net, INPUT)
    brim.convert(net, recompute="cheap")

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return output

    assert equal(grads_of(Checkpointed(), INPUT), expected)


# -- Attention keeps its output -------------------------------------------------------------------


def attention(x: Tensor) -> Tensor:
    q, k, v = x.view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 64)


class Adapter(nn.Module):
    """As peft's LoRA behind attention: the adapter is float32, the rest bfloat16."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.Linear(64, 3 * 64).bfloat16()
        self.dropout, self.down = nn.Dropout(p), nn.Linear(64, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.dropout(attention(self.heads(x)).float()))
        return output


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_an_adapter_asks_attention_for_its_output(p: float) -> None:
    net, x = Adapter(p), torch.randn(2, 16, 64).bfloat16()
    expected, kept = grads_of(net, x), kept_by(net, x)
    brim.convert(net, recompute="cheap")
    assert equal(grads_of(net, x), expected)
    elements = 2 * 16 * 64
    in_float32 = 4 * elements  # and for dropout its factors, which brim keeps as bits
    assert kept_by(net, x) == kept - in_float32 - (in_float32 - elements // 8 if p else 0)


def test_an_attention_output_that_is_written_to_is_kept_in_float32() -> None:
    class Patched(Adapter):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
            y = (
                nn.functional.scaled_dot_product_attention(q, k, v)
                .transpose(1, 2)
                .reshape(2, 16, 64)
            )
            y = changed(copy := y.clone(), copy)
            output: Tensor = self.down(self.dropout(y.float()))
            return output

    net, x = Patched(0.0), torch.randn(2, 16, 64).bfloat16()
    expected = grads_of(net, x)
    brim.convert(net, recompute="cheap")
    assert equal(grads_of(net, x), expected)


# -- Residual sums --------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Residual blocks with a trained scale, whose gradient needs what it scales."""

    def __init__(self, depth: int, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(4, 4, 1)
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(depth)])
        self.scales = nn.ParameterList([torch.randn(4, 1, 1) for _ in range(depth)])
        self.in_place = in_place
        self.sums: list[Tensor] = []
        self.change: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        ours = isinstance(self.first, brim.nn.Conv2d)
        for i, (conv, scale) in enumerate(zip(self.convs, self.scales, strict=True)):
            y = conv(x)
            if ours:
                x = own.add(own.mul(scale, y, recompute=True), x, inplace=self.in_place)
            else:
                y = scale * y
                x = y.add_(x) if self.in_place else y + x
            if i == self.change:
                changed(x, x)
        return x


IMAGES = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("change", [None, 1])
@pytest.mark.parametrize("in_place", [False, True])
def test_residual_sums_are_recomputed(in_place: bool, change: int | None) -> None:
    net = Scaled(6, in_place)
    net.change = change
    expected, kept = grads_of(net, IMAGES), kept_by(net, IMAGES)
    brim.convert(net, recompute="cheap")
    assert equal(grads_of(net, IMAGES), expected)
    # torch keeps the inputs of six convolutions and of six scales. Of the former two remain: the
    # first, and one after three sums in a row. A change ends a chain, and begins another.
    inputs = 2 if change is None else 3
    copies = 6 * 4 * 4
    assert kept_by(net, IMAGES) <= kept - (6 - inputs) * IMAGES.nbytes + copies


class SideBranch(nn.Module):
    """A sum that a branch keeps is overwritten. Only the other results are used."""

    def __init__(self, overwrite: nn.Module, others: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.side = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.overwrite, self.last = overwrite, nn.Conv2d(4, 4, 1)
        self.other = nn.ReLU() if others else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x) + x.sin()
        unused = self.side(x)
        other = 0.0 if self.other is None else self.other(x)
        return self.last(self.overwrite(x)) + other, unused


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    "overwrite",
    [nn.ReLU, nn.SiLU, nn.Hardswish, nn.ELU, nn.Dropout],
    ids=lambda kind: kind.__name__,
)
def test_a_sum_kept_by_an_unused_branch_may_be_overwritten(
    overwrite: Callable[..., nn.Module], others: bool
) -> None:
    net = SideBranch(overwrite(inplace=True), others)
    used = [p for name, p in net.named_parameters() if not name.startswith("side")]
    results = []
    for convert in (False, True):
        if convert:
            brim.convert(net, recompute="cheap")
        torch.manual_seed(1)
        output, _unused = net(IMAGES)
        results.append(torch.autograd.grad(output.square().sum(), used))
    assert equal(*map(list, results))


def test_a_sum_of_other_shapes_and_types_is_torchs() -> None:
    pairs = [
        (torch.randn(3, 4), torch.randn(4)),
        (torch.randn(3, 4), torch.randn(3, 4).bfloat16()),
        (torch.randn(3, 1), torch.randn(1, 4)),
    ]
    for pair in pairs:
        results = []
        for add in (torch.add, own.add):
            leaves = [each.detach().requires_grad_() for each in pair]
            output = add(*leaves)
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
        assert equal(*results)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        own.add(torch.ones(2, requires_grad=True), torch.ones(2), inplace=True)
