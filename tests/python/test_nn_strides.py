"""Strides of outputs and gradients are those of torch.nn, however tensors lie in memory.

Kernels further on sum in the order of memory, so other strides would mean other roundings.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import brim

from .nn_cases import ONE_OF_EACH, Case, in_layout, pair

LAYOUTS = ("contiguous", "channels_last", "permuted", "sliced", "permuted with gaps", "expanded")

IMAGES = [
    *(Case(name, (2, 3, 5, 7)) for name in ("ReLU", "ReLU6", "LeakyReLU", "Hardtanh")),
    *(Case(name, (2, 3, 2, 4, 3)) for name in ("ReLU", "Hardtanh", "SiLU", "Dropout")),
    *(Case(f"BatchNorm{d}d", (2, 3, 5, 4, 2)[: d + 2], (3,), train=False) for d in (1, 2, 3)),
    Case("LayerNorm", (2, 3, 5, 7), (7,)),
    Case("RMSNorm", (2, 3, 5, 7), (7,)),
    Case("Conv2d", (2, 3, 5, 7), (3, 4, 3), {"padding": 1, "padding_mode": "reflect"}),
    Case("Conv2d", (2, 3, 5, 7), (3, 4, 3), {"padding": 1, "padding_mode": "replicate"}),
    Case("Conv2d", (2, 3, 5, 7), (3, 4, 3), {"padding": 1, "padding_mode": "circular"}),
    Case("Linear", (2, 3, 5, 7), (7, 4)),
]


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "expanded":
        return values[:1].expand(values.shape)
    if layout == "permuted":  # the first dimension is the innermost
        return values.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "permuted with gaps":
        return torch.stack([values.movedim(0, -1)] * 2, -1)[..., 0].movedim(-1, 0)
    if layout == "channels_last" and values.dim() not in (4, 5):
        return values
    return in_layout(values, layout)


@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if c.shape] + IMAGES, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_layer_has_torchs_strides(case: Case, frozen: bool) -> None:
    ours, torchs = (layer.requires_grad_(not frozen) for layer in pair(case, torch.float32))
    for layout, back in itertools.product(LAYOUTS, LAYOUTS):
        strides = []
        for layer in (ours, torchs):
            torch.manual_seed(0)
            x = laid_out(case.input(torch.float32), layout).requires_grad_()
            y = layer(x)
            wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
            grads = torch.autograd.grad(y, wanted, laid_out(torch.randn(y.shape), back))
            strides.append([t.stride() for t in (y, *grads)])
        assert strides[0] == strides[1], f"input {layout}, gradient {back}"


@pytest.mark.parametrize("frozen", [False, True])
def test_a_linear_layer_rounds_as_torchs_does_whatever_the_strides(frozen: bool) -> None:
    """torch multiplies some inputs by the batch, also where a dimension of one has odd strides."""
    for shape in ((1, 5, 3), (1, 7, 3), (1, 1, 5, 3), (2, 7, 3), (3, 1, 3), (1, 0, 3)):
        values = torch.randn(shape)
        for order in itertools.permutations(range(len(shape))):
            back = [order.index(d) for d in range(len(shape))]
            x = values.permute(order).contiguous().permute(back).requires_grad_()
            for bias in (False, True):
                layer = nn.Linear(3, 8, bias=bias).requires_grad_(not frozen)
                ours = nn.Sequential(copy.deepcopy(layer))
                assert brim.convert(ours).replaced
                y = layer(x)
                assert torch.equal(ours(x), y), (shape, x.stride())
                grad = torch.randn(y.shape)
                wanted = [torch.autograd.grad(model(x), x, grad)[0] for model in (ours, layer)]
                assert torch.equal(*wanted), (shape, x.stride())


class Transposed(nn.Module):
    """The same values, in another order in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, -1).contiguous().transpose(1, -1)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ReLU6])
@pytest.mark.parametrize("recompute", [None, "cheap", "products"])
def test_a_gradient_has_torchs_strides_after_a_copy(
    activation: type[nn.Module], recompute: Any
) -> None:
    """A batch norm sums in the order of its gradient's memory."""
    for seed in range(8):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.BatchNorm2d(4), Transposed(), activation()).bfloat16().eval()
        x = torch.randn(5, 4, 8, 6).bfloat16()
        if seed % 2:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        ours = copy.deepcopy(net)
        brim.convert(ours, recompute=recompute)
        grad = torch.randn(x.shape).bfloat16()
        found, expected = (
            torch.autograd.grad(model(x), [x, *model.parameters()], grad) for model in (ours, net)
        )
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def randomly_laid_out(choose: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Ones of this shape: dimensions in any order, with gaps, some of them expanded."""
    order = choose.sample(range(len(shape)), len(shape))
    gaps = [choose.choice([1, 1, 2]) for _ in shape]
    expanded = [choose.random() < 0.1 for _ in shape]
    sizes = [1 if expanded[d] else shape[d] * gaps[d] for d in order]
    values = torch.ones(sizes).permute([order.index(d) for d in range(len(shape))])
    return values[tuple(slice(None, None, gap) for gap in gaps)].expand(shape)


@pytest.mark.parametrize("layer", ["ReLU", "LeakyReLU", "Dropout"])
def test_random_strides_give_torchs_strides(layer: str) -> None:
    choose = random.Random(0)
    ours, torchs = getattr(brim.nn, layer)(), getattr(nn, layer)()
    for _ in range(400):
        shape = tuple(choose.choice([1, 2, 3, 5]) for _ in range(choose.randint(2, 5)))
        x, up = (randomly_laid_out(choose, shape) for _ in range(2))
        strides = []
        for run in (ours, torchs):
            leaf = x.detach().requires_grad_()
            y = run(leaf)
            strides.append((y.stride(), torch.autograd.grad(y, leaf, up)[0].stride()))
        assert strides[0] == strides[1], f"input {x.shape} {x.stride()}, gradient {up.stride()}"


@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if c.shape] + IMAGES, ids=str)
def test_no_python_runs_in_backward(case: Case) -> None:
    """torch registers Python functions as Meta kernels, which take 100 times as long."""
    seen: set[str] = set()
    depth = 0  # inside of the engine

    def note(frame: FrameType, event: str, of: Any) -> None:
        nonlocal depth
        if event.startswith("c_") and of.__name__ == "run_backward":
            depth += 1 if event == "c_call" else -1
        elif event == "call" and depth:
            seen.add(frame.f_code.co_filename)

    for frozen, back in itertools.product([False, True], LAYOUTS):
        layer = pair(case, torch.float32)[0].requires_grad_(not frozen)
        x = case.input(torch.float32).requires_grad_()
        y = layer(x)
        up = laid_out(torch.randn(y.shape), back)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            torch.autograd.backward(y, up)
        finally:
            sys.setprofile(before)
    assert not seen


@pytest.mark.parametrize(
    "act",
    [
        nn.ReLU(),
        nn.ReLU6(),
        nn.LeakyReLU(0.1),
        nn.Hardtanh(),
        nn.Dropout(0.2),
        nn.SiLU(),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
    ],
    ids=lambda act: type(act).__name__,
)
@pytest.mark.parametrize("train", [True, False])
def test_a_spatial_mean_behind_channels_last_layers_gives_torchs_gradients(
    act: nn.Module, train: bool
) -> None:
    torch.manual_seed(0)
    torchs = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), act)
    torchs = torchs.to(memory_format=torch.channels_last).train(train)  # type: ignore[call-overload]
    ours = copy.deepcopy(torchs)
    brim.convert(ours)
    x = torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    for net in (ours, torchs):
        torch.manual_seed(1)
        net(x).mean((2, 3)).pow(2).sum().backward()
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
