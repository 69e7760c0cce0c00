"""Chains of layers: a layer drops what its consumer keeps anyway."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import brim

from .nn_kept import asked_to_keep, really_held

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def chain_keeps(
    build: Callable[[], nn.Module], shape: tuple[int, ...], trainable: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(asked, held) of brim's layers, and of the same chain in torch.nn."""
    found = []
    for convert in (True, False):
        torch.manual_seed(0)
        net = build()
        if convert:
            brim.convert(net)
        for parameter in net.parameters():
            parameter.requires_grad_(trainable)
        x = torch.randn(shape, requires_grad=True)

        def call(net: nn.Module = net, x: torch.Tensor = x) -> torch.Tensor:
            torch.manual_seed(0)
            return net(x.clone()).sum()

        found.append((asked_to_keep(call, net), really_held(call)))
    return found[0], found[1]


SHAPE = (4, 6, 8, 10)
NUMBERS = math.prod(SHAPE)

CHAINS: list[tuple[str, Callable[[], list[nn.Module]], int, int]] = [
    # name, layers, bytes kept when all is trainable, and when all is frozen
    ("relu-conv", lambda: [nn.ReLU(), nn.Conv2d(6, 4, 3)], 4 * NUMBERS, NUMBERS // 8),
    ("relu6-conv", lambda: [nn.ReLU6(), nn.Conv2d(6, 4, 3)], 4 * NUMBERS, NUMBERS // 8),
    ("leaky-conv", lambda: [nn.LeakyReLU(), nn.Conv2d(6, 4, 3)], 4 * NUMBERS, NUMBERS // 8),
    ("relu_-conv", lambda: [nn.ReLU(True), nn.Conv2d(6, 4, 3)], 4 * NUMBERS, NUMBERS // 8),
    ("relu-linear", lambda: [nn.ReLU(), nn.Linear(10, 4)], 4 * NUMBERS, NUMBERS // 8),
    (
        "relu-deconv",
        lambda: [nn.ReLU(), nn.ConvTranspose2d(6, 4, 3)],
        4 * NUMBERS,
        NUMBERS // 8,
    ),
    (
        "relu-batchnorm",
        lambda: [nn.ReLU(), nn.BatchNorm2d(6).eval()],
        4 * NUMBERS,
        NUMBERS // 8,
    ),
    (  # a sign turned below zero cannot be read off the output
        "leaky(-0.1)-conv",
        lambda: [nn.LeakyReLU(-0.1), nn.Conv2d(6, 4, 3)],
        4 * NUMBERS + NUMBERS // 8,
        NUMBERS // 8,
    ),
    ("relu-gelu", lambda: [nn.ReLU(), nn.GELU()], 4 * NUMBERS, 4 * NUMBERS),
    ("relu-relu", lambda: [nn.ReLU(), nn.ReLU()], 2 * NUMBERS // 8, 2 * NUMBERS // 8),
    (
        "relu-maxpool",
        lambda: [nn.ReLU(), nn.MaxPool2d(2)],
        NUMBERS // 8 + NUMBERS // 4,
        NUMBERS // 8 + NUMBERS // 4,
    ),
]


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain[0])
def test_chains(
    chain: tuple[str, Callable[[], list[nn.Module]], int, int], trainable: bool, held: int
) -> None:
    _, layers, if_trainable, if_frozen = chain
    ours, torchs = chain_keeps(lambda: nn.Sequential(*layers()), SHAPE, trainable)
    expected = if_trainable if trainable else if_frozen
    assert ours == (expected, expected)
    assert ours[0] <= torchs[0]
    assert ours[1] <= torchs[1]


def test_of_two_consumers_one_that_keeps_is_enough(held: int) -> None:
    relu, frozen, trained = brim.nn.ReLU(), brim.nn.Conv2d(6, 4, 3), brim.nn.Conv2d(6, 4, 3)
    frozen.requires_grad_(False)
    x = torch.randn(SHAPE, requires_grad=True)

    def call() -> torch.Tensor:
        y = relu(x.clone())
        return (frozen(y) + trained(y) + frozen(y)).sum()

    assert really_held(call) == 4 * NUMBERS
    trained.requires_grad_(False)
    assert really_held(call) == NUMBERS // 8


def test_bits_that_were_dropped_give_the_same_gradients() -> None:
    for name, layers, _, _ in CHAINS:
        torch.manual_seed(0)
        ours = nn.Sequential(*layers())
        torchs = nn.Sequential(*layers())
        torchs.load_state_dict(ours.state_dict())
        brim.convert(ours)
        grads = []
        for net in (ours, torchs):
            x = torch.linspace(-3, 7, NUMBERS).reshape(SHAPE).requires_grad_()
            output = net(x.clone())
            cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
            grads.append(torch.autograd.grad(output, [x, *net.parameters()], cotangent))
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b), name


def test_recompute_cheap_keeps_only_the_input_of_the_normalisation(held: int) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3))

    x = torch.randn(SHAPE, requires_grad=True)
    sizes = {}
    for recompute in (None, "cheap"):
        net = build()
        brim.convert(net, recompute=recompute)
        sizes[recompute] = really_held(lambda net=net: net(x.clone()).sum())  # type: ignore[misc]
    statistics = 2 * 6 * 4
    assert sizes[None] == 2 * 4 * NUMBERS + statistics
    assert sizes["cheap"] <= 4 * NUMBERS + statistics + NUMBERS // 8


class _Residual(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(blocks)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(blocks)])
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norms[0](self.linears[0](x)))
        for linear, norm in zip(self.linears[1:], self.norms[1:], strict=True):
            x = self.relu(norm(linear(x)) + x)
        return x.sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_recompute_in_a_deep_residual_network_holds_few_values_at_a_time(
    frozen: bool, held: int
) -> None:
    blocks = 40
    # Matrix products of doubles: no kernel of a CPU library takes workspace that counts.
    x = torch.randn(4096, 4, dtype=torch.float64)
    value = x.nbytes
    peaks, kept, grads = {}, {}, {}
    for recompute in (None, "cheap"):
        net = _Residual(blocks).double()
        if frozen:
            net.eval()
            net.linears.requires_grad_(False)
        brim.convert(net, recompute=recompute)
        with brim.PeakMeter("cpu") as meter:
            loss = net(x)
            kept[recompute] = meter.left
            loss.backward()
        peaks[recompute] = meter.peak
        grads[recompute] = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads[None], grads["cheap"], strict=True))
    assert len(grads[None]) == (2 if frozen else 3) * blocks
    # Eight layers are asked at most: that many values, the gradients, and what kernels need.
    assert peaks["cheap"] <= kept["cheap"] + 14 * value
    if frozen:
        assert kept["cheap"] < kept[None] <= (blocks + blocks / 32 + 2) * value
    else:  # nearly all of the ReLUs' outputs are gone
        assert kept[None] >= 2 * (blocks - 1) * value
        assert kept["cheap"] <= (blocks + blocks / 8 + 3) * value
