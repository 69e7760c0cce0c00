"""Normalisation layers whose input is in low precision, and what they compute again in backward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it

import brim

from .nn_cases import HALVES, same_bits

WAYS = ("autocast", "low", "mixed")
IMAGES = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def step(net: nn.Module, x: Tensor, autocast: bool, dtype: torch.dtype) -> list[Tensor]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = net(leaf)
    y.float().pow(2).mean().backward()
    found = [y.detach(), leaf.grad, *(p.grad for p in net.parameters()), *net.buffers()]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("level", ["cheap", "products"])
def test_batch_norm_computed_again_is_that_of_forward(dtype: torch.dtype, level: str) -> None:
    """Also its running statistics: they are updated once."""
    torch.manual_seed(0)
    for affine, tracks, momentum, trains, layout, how in itertools.product(
        [True, False],
        [True, False],
        [0.1, None],
        [True, False],
        IMAGES,
        ["autocast", "low", "mixed"],
    ):
        if dtype == torch.float32 and how != "low":
            continue
        norm = nn.BatchNorm2d(8, affine=affine, track_running_stats=tracks, momentum=momentum)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 1))
        x = torch.randn(4, 3, 8, 8).contiguous(memory_format=IMAGES[layout])
        if how != "autocast":
            net, x = net.to(dtype), x.to(dtype)
        if how == "mixed":  # as in models whose normalisation stays in float32
            norm.float()
        norm.train(trains)
        ours = copy.deepcopy(net)
        brim.convert(ours, recompute=level)
        torchs, own = (step(each, x, how == "autocast", dtype) for each in (net, ours))
        case = f"{affine=} {tracks=} {momentum=} {trains=} {layout} {how}"
        assert all(map(same_bits, own, torchs)), case


Norm = tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[int, ...]]

NORMS: dict[str, Norm] = {
    "layer_norm": (
        lambda x, w, b: torch.ops.brim.layer_norm(x, [64], w, b, 1e-5, True),
        lambda x, w, b: F.layer_norm(x.float(), [64], w, b, 1e-5),
        (256, 64),
    ),
    "group_norm": (
        lambda x, w, b: torch.ops.brim.group_norm(x, 4, w, b, 1e-5, True),
        lambda x, w, b: F.group_norm(x.float(), 4, w, b, 1e-5),
        (8, 64, 32),
    ),
    "rms_norm": (
        lambda x, w, b: torch.ops.brim.rms_norm(x, [64], w, 1e-5, True),
        lambda x, w, b: F.rms_norm(x.float(), [64], w, 1e-5),
        (256, 64),
    ),
}


def measured(run: Callable[..., Tensor], x: Tensor, trains: dict[str, bool]) -> Any:
    """Results and gradients, bytes kept, and the peak of backward."""
    torch.manual_seed(1)
    weight, bias = torch.randn(2, 64)
    leaves = {"input": x.detach().clone(), "weight": weight, "bias": bias.clone()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(trains[name])
    up = torch.randn(x.shape)
    with brim.PeakMeter("cpu") as meter:
        # Made here, so that it is freed where nobody keeps it.
        y = run(leaves["input"].mul(1), leaves["weight"], leaves["bias"])
        kept = meter.left - y.nbytes
        y.backward(up)
    return [y.detach(), *(t.grad for t in leaves.values() if t.grad is not None)], kept, meter.peak


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("trained", ["all", "input", "weights"])
def test_a_low_input_in_float32_has_torchs_values_and_no_higher_peak(
    norm: str, trained: str, dtype: torch.dtype
) -> None:
    """As autocast on CUDA runs them. Only one copy of the input exists beside the gradients."""
    ours, torchs, shape = NORMS[norm]
    trains = {name: trained in ("all", name) for name in ("input", "weight", "bias")}
    if trained == "weights":
        trains = {"input": False, "weight": True, "bias": True}
    if norm == "rms_norm":
        trains["bias"] = False
    torch.manual_seed(0)
    x = (torch.randn(shape) + 1).to(dtype)
    for _ in range(2):  # the first call allocates for good
        own, torch_nn = (measured(run, x, trains) for run in (ours, torchs))
    assert own[1] < torch_nn[1]
    assert own[2] <= torch_nn[2]
    exact = norm != "rms_norm" and not (norm == "group_norm" and trained == "weights")
    assert same_bits(own[0][0], torch_nn[0][0])
    for mine, theirs in zip(own[0], torch_nn[0], strict=True):
        assert same_bits(mine, theirs) if exact else torch.allclose(mine, theirs, rtol=1e-2)


@pytest.mark.parametrize("norm", NORMS)
def test_a_low_input_is_still_there_for_a_second_backward(norm: str) -> None:
    ours, _, shape = NORMS[norm]
    x = torch.randn(shape).bfloat16().requires_grad_()
    weight, bias = torch.ones(64, requires_grad=True), torch.zeros(64)
    y = ours(x, weight, bias)
    up = torch.randn(shape)
    first, second = (
        torch.autograd.grad(y, [x, weight], up, retain_graph=again) for again in (True, False)
    )
    assert all(map(same_bits, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, [x, weight], up)
