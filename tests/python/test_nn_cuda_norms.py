"""Normalisation layers on CUDA: torch's values bit for bit, also where they are given again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import brim

from .nn_cases import HALVES, cotangent_of, near, same_bits
from .test_nn_cuda import _deterministic  # noqa: F401  for all tests here

pytestmark = pytest.mark.cuda

NORMS = {"LayerNorm": (64,), "RMSNorm": (64,), "GroupNorm": (4, 64)}


def same_as(output: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """How the gradients of a norm with this output equal torch's.

    torch 2.11 does not cast RMSNorm, and composes its gradients of other operators then.
    """
    return same_bits if output.dtype == torch.float32 else near


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own
@pytest.mark.parametrize("layer", NORMS)
def test_autocast_keeps_the_low_precision_input_of_a_norm_as_it_is(layer: str) -> None:
    x = torch.randn(256, 64, 64, device="cuda").bfloat16()
    kept, results = [], []
    for of in (nn, brim.nn):
        norm = getattr(of, layer)(*NORMS[layer]).cuda()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16), brim.PeakMeter("cuda") as meter:
            y = norm(leaf.clone())
            kept.append(meter.left - y.nbytes)
        wanted = [leaf, *norm.parameters()]
        results.append([y.detach(), *torch.autograd.grad(y, wanted, cotangent_of(y, ""))])
    assert kept[0] >= 2 * x.nbytes
    assert x.nbytes <= kept[1] < 1.1 * x.nbytes
    assert same_bits(results[1][0], results[0][0])
    assert all(map(same_as(results[0][0]), results[1], results[0]))


LOW = pytest.mark.parametrize("low", HALVES, ids=["bfloat16", "float16"])

# Below and above a warp, with and without whole vectors of four, a block, several blocks.
SIZES = (1, 3, 4, 7, 24, 31, 64, 96, 100, 128, 192, 256, 320, 384, 512, 768, 1000, 1024, 1280)
MORE_SIZES = (1536, 2048, 3072, 4096, 5120, 8192, 12288, 16384)


@LOW
@pytest.mark.parametrize("shape", [*((n,) for n in SIZES + MORE_SIZES), (5, 8), (6, 128)], ids=str)
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_autocast_layer_norm_of_low_precision_is_torchs_bit_for_bit(
    shape: tuple[int, ...], low: torch.dtype, affine: str
) -> None:
    options = {"elementwise_affine": affine != "none", "bias": affine == "both"}
    # The rows decide, with the size, which of its kernels torch takes for the weights' gradient.
    for rows, offset, needs in ((1, 0, 1), (37, 3, 1), (300, 0, 1), (2100, 5, 1), (37, 0, 0)):
        torch.manual_seed(rows)
        norm = nn.LayerNorm(shape, device="cuda", **options)
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        x = (torch.randn(rows, *shape, device="cuda") + offset).to(low)
        results = []
        for run in (norm, brim.nn.LayerNorm(shape, device="cuda", **options)):
            run.load_state_dict(norm.state_dict())
            leaf = x.clone().requires_grad_(bool(needs) or affine == "none")
            with torch.autocast("cuda", low):
                y = run(leaf)
            wanted = [t for t in (leaf, *run.parameters()) if t.requires_grad]
            results.append([y.detach(), *torch.autograd.grad(y, wanted, cotangent_of(y, ""))])
        for ours, torchs in zip(results[1], results[0], strict=True):
            assert same_bits(ours, torchs), f"{rows} rows"
            assert ours.stride() == torchs.stride()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own
@LOW
@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm", "GroupNorm"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "channels_last"])
def test_autocast_norm_of_any_layout_is_torchs_bit_for_bit(
    layer: str, low: torch.dtype, layout: str
) -> None:
    torch.manual_seed(0)
    whole = (torch.randn(8, 64, 16, 64, device="cuda") + 1).to(low)
    x = {
        "contiguous": whole,
        "transposed": whole.transpose(1, 3),
        "sliced": whole[:, :, ::2],
        "channels_last": whole.contiguous(memory_format=torch.channels_last),
    }[layout]
    for frozen in (False, True):
        results = []
        for of in (nn, brim.nn):
            torch.manual_seed(1)
            norm = getattr(of, layer)(*NORMS[layer]).cuda()
            for parameter in norm.parameters():
                nn.init.normal_(parameter).requires_grad_(not frozen)
            leaf = x.detach().requires_grad_()
            with torch.autocast("cuda", low):
                y = norm(leaf)
            wanted = [t for t in (leaf, *norm.parameters()) if t.requires_grad]
            results.append([y.detach(), *torch.autograd.grad(y, wanted, cotangent_of(y, ""))])
        assert same_bits(results[1][0], results[0][0])
        assert all(map(same_as(results[0][0]), results[1], results[0]))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own
@LOW
@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm", "GroupNorm"])
@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_norm_of_low_precision_has_no_higher_peak_than_torchs(
    layer: str, low: torch.dtype, frozen: bool
) -> None:
    x = torch.randn(64, 64, 64, device="cuda").to(low).requires_grad_()
    up = torch.randn(64, 64, 64, device="cuda")
    peaks = []
    for of in (nn, brim.nn):
        norm = getattr(of, layer)(*NORMS[layer]).cuda().requires_grad_(not frozen)
        for _ in range(2):  # the first call allocates for good
            with brim.PeakMeter("cuda") as meter:
                with torch.autocast("cuda", low):
                    y = norm(x.mul(1))
                    dtype = y.dtype
                y.backward(up.to(y.dtype))
            del y
        peaks.append(meter.peak)
    # Without a kernel of torch's (see same_as) the gradients are worked out in float32.
    assert peaks[1] <= peaks[0] * (1.25 if dtype == low else 1)


@LOW
@pytest.mark.parametrize("level", ["cheap", "products"])
@pytest.mark.parametrize("size", [7, 64, 100, 768, 1000, 4096])
def test_a_norm_of_low_precision_is_given_again_as_it_was(
    size: int, level: str, low: torch.dtype
) -> None:
    """What the layer behind asks for, from the statistics of torch's kernel."""
    torch.manual_seed(0)
    torchs = nn.Sequential(
        nn.Linear(16, size), nn.LayerNorm(size), nn.Linear(size, 16), nn.LayerNorm(16), nn.GELU()
    ).cuda()
    ours = copy.deepcopy(torchs)
    brim.convert(ours, recompute=level)
    x = torch.randn(257, 16, device="cuda")
    for net in (torchs, ours):
        with torch.autocast("cuda", low):
            net(x).float().square().sum().backward()
    for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert same_bits(mine.grad, theirs.grad)


@LOW
@pytest.mark.parametrize("size", [7, 24, 768, 1000, 8192])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_layer_norm_is_given_again_in_the_type_of_the_layers_behind(
    size: int, affine: str, low: torch.dtype
) -> None:
    torch.manual_seed(0)
    options = {"elementwise_affine": affine != "none", "bias": affine == "both"}
    norm = nn.LayerNorm(size, **options).cuda()
    layers = nn.ModuleList([norm, nn.Linear(size, 3).cuda(), nn.Linear(size, 2).cuda()])
    with torch.no_grad():
        for each in norm.parameters():
            each.normal_()
    ours = copy.deepcopy(layers)
    brim.convert(ours, recompute="cheap")
    x = torch.randn(33, size, device="cuda")
    for net in (layers, ours):
        with torch.autocast("cuda", low):
            normal = net[0](x.requires_grad_())
            sum(layer(normal).float().square().sum() for layer in (net[1], net[2])).backward()
    for mine, theirs in zip(ours.parameters(), layers.parameters(), strict=True):
        assert same_bits(mine.grad, theirs.grad)


@LOW
@pytest.mark.parametrize("view", ["transpose", "view", "slice"])
def test_layer_norm_is_given_again_through_a_view(view: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.LayerNorm(64), nn.Linear(64, 8)]).cuda()
    ours = copy.deepcopy(model)
    brim.convert(ours, recompute="cheap")
    x = torch.randn(5, 6, 64, device="cuda")
    kept = []
    for net in (model, ours):
        with torch.autocast("cuda", low), brim.PeakMeter("cuda") as meter:
            normal = net[0](x.requires_grad_())
            if view == "transpose":
                normal = normal.transpose(0, 1)
            normal = normal.view(2, 15, 64) if view == "view" else normal
            loss = net[1](normal[:3] if view == "slice" else normal).float().square().sum()
            kept.append(meter.left)
        loss.backward()
    assert kept[1] < kept[0]
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert same_bits(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("side", [(7, 7), (14, 14), (3, 3), (2, 3), (1, 1), (8, 8), (5, 13)])
@pytest.mark.parametrize("channels", [16, 5])
@pytest.mark.parametrize("adds", [False, True], ids=["", "sum"])
def test_batch_norm_is_given_again_where_packs_cross_channels(
    channels: int, side: tuple[int, int], adds: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(8, channels, 1), nn.BatchNorm2d(channels)).cuda()
    last = nn.Conv2d(channels, 4, 1).cuda()
    model = nn.ModuleList([first, nn.ReLU(), last])
    with torch.no_grad():
        for each in first[1].parameters():
            each.normal_()
    ours = copy.deepcopy(model)
    brim.convert(ours, recompute="cheap")
    x = torch.randn(3, 8, *side, device="cuda")
    for net in (model, ours):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            normal = net[0](x)
            normal = normal + net[0](x.flip(0)) if adds else normal
            net[2](net[1](normal)).float().square().sum().backward()
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert same_bits(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(
    "shape", [(1, 16, 8, 8), (7, 16, 7, 7), (5, 5, 3, 3), (8, 5, 3, 3), (9, 16, 128, 129)], ids=str
)
def test_batch_norm_gives_an_element_the_same_bits_wherever_it_lies(
    shape: tuple[int, ...], last: bool, dtype: torch.dtype
) -> None:
    order = torch.channels_last if last else torch.contiguous_format
    x, added = (torch.randn(shape, device="cuda").to(dtype, memory_format=order) for _ in range(2))
    params = [*torch.randn(3, shape[1], device="cuda"), torch.rand(shape[1], device="cuda")]

    def run(formula: int, *, one: int | None = None, offset: int = 0) -> torch.Tensor:
        each = slice(None) if one is None else slice(one, one + 1)
        given = []
        for tensor in (x, added):
            dense = tensor[:, each].contiguous(memory_format=order)
            room = torch.empty(dense.numel() + offset, dtype=dtype, device="cuda")[offset:]
            given.append(room.as_strided(dense.shape, dense.stride(), offset).copy_(dense))
        values = [value[each] for value in params]
        y = torch.ops.brim.batch_norm_normalise(given[0], *values, 1e-5, formula, given[1], True)
        return y.contiguous()

    for formula in range(3):
        whole = run(formula)
        alone = [run(formula, one=channel) for channel in range(shape[1])]
        assert torch.equal(whole, torch.cat(alone, 1))
        assert torch.equal(whole, run(formula, offset=1))  # not aligned: element by element


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("shape", [(3, 12, 7, 5), (2, 8, 16), (2, 64, 64, 64), (5, 320, 8, 8)])
@LOW
def test_group_norm_is_given_again_from_its_statistics(
    shape: tuple[int, ...], dtype: torch.dtype, low: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").to(dtype)
    weight, bias = torch.randn(2, shape[1], device="cuda")
    sizes = (shape[0], shape[1], math.prod(shape[2:]), 4)
    for affine in ((weight, bias), (weight, None), (None, bias)):
        wide, mean, rstd = torch.native_group_norm(x.float(), *affine, *sizes, 1e-5)
        for kind in (torch.float32, low):
            again = torch.ops.brim.group_norm_as_type(x, 4, mean, rstd, *affine, 1e-5, kind)
            assert same_bits(again, wide.to(kind))


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "float32"])
@pytest.mark.parametrize("between", [nn.Identity, nn.SiLU])
def test_layers_behind_a_group_norm_ask_it(between: type[nn.Module], enabled: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), between(), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        for each in layers[1].parameters():
            each.normal_()
    ours = copy.deepcopy(layers.cuda())
    brim.convert(ours, recompute="cheap")
    x = torch.randn(2, 3, 18, 18, device="cuda")
    for net in (layers, ours):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            net(x).float().square().sum().backward()
    for mine, theirs in zip(ours.parameters(), layers.parameters(), strict=True):
        assert same_bits(mine.grad, theirs.grad)
