"""brim.nn on CUDA beside torch.nn on CUDA. Needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import brim

from .nn_cases import (
    CASES,
    FLOATS,
    ONE_OF_EACH,
    Case,
    compare,
    cotangent_of,
    near,
    pair,
    same_bits,
    set_needs,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    # In a process whose first product is that of a backward.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in FLOATS}


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
    )
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.cuda.synchronize()
    (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
    ) = before


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_nn(case: Case) -> None:
    found = []
    for dtype in FLOATS:
        found += [f"{dtype}, {what}" for what in compare(case, dtype, "cuda")]
    if case.layer == "AvgPool2d":
        # With padding torch's own gradient is wrong there (pytorch issue 188344): the next test.
        found = [what for what in found if "channels_last" not in what]
    assert found == []


@pytest.mark.parametrize("args", [(3, 2, 1), ((2, 3), (1, 2), (1, 0))], ids=str)
def test_padded_average_in_channels_last_has_the_gradient_of_the_cpu(args: tuple[Any, ...]) -> None:
    x = torch.randn(2, 3, 9, 10, dtype=torch.float64)
    grads = []
    for device, layout in (("cpu", torch.contiguous_format), ("cuda", torch.channels_last)):
        leaf = x.to(device, memory_format=layout).requires_grad_()
        output = brim.nn.AvgPool2d(*args)(leaf)
        weights = torch.arange(output.numel(), dtype=x.dtype).view(output.shape).to(device)
        grads.append(torch.autograd.grad(output, leaf, weights)[0].cpu())
    torch.testing.assert_close(grads[1], grads[0])


# -- The bit kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("layer", ["ReLU", "Hardtanh", "LeakyReLU", "Dropout"])
def test_odd_sizes_and_unaligned_views(layer: str, dtype: torch.dtype) -> None:
    for n in (1, 2, 7, 8, 9, 15, 31, 32, 33, 63, 255, 256, 257, 1023, 4097, 100_003):
        for offset in (0, 1, 3):
            base = torch.randn(n + offset, device="cuda").to(dtype)
            results = []
            for of in (brim.nn, nn):
                x = base[offset:].detach().requires_grad_()
                torch.manual_seed(n)
                y = getattr(of, layer)()(x)
                results.append([y.detach(), *torch.autograd.grad(y, x, cotangent_of(y, ""))])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b), (n, offset)


@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("layer", ["ReLU", "ReLU6", "LeakyReLU", "Hardtanh"])
def test_special_numbers(layer: str, dtype: torch.dtype) -> None:
    special = [0.0, -0.0, 1.0, -1.0, 6.0, 0.5, torch.nan, torch.inf, -torch.inf, 1e-40]
    results = []
    for of in (brim.nn, nn):
        x = torch.tensor(special * 13, dtype=dtype, device="cuda", requires_grad=True)
        y = getattr(of, layer)()(x)
        results.append([y.detach(), *torch.autograd.grad(y, x, cotangent_of(y, ""))])
    (ours, our_grad), (torchs, torch_grad) = results
    # Where torch takes the larger of 0 and -0, the machine chooses.
    assert same_bits(ours, torchs, sign_of_zero=layer not in ("ReLU6", "Hardtanh"))
    told = ~torchs.isnan() if layer in ("ReLU6", "Hardtanh") else torch.ones_like(torchs).bool()
    assert same_bits(our_grad[told], torch_grad[told])


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_draws_the_random_numbers_of_torch(inplace: bool) -> None:
    for p in (0.1, 0.5, 0.9):
        results = []
        for layer in (brim.nn.Dropout(p, inplace), nn.Dropout(p, inplace)):
            torch.manual_seed(7)
            x = torch.randn(3, 1001, device="cuda", requires_grad=True)
            first, second = layer(x * 1), layer(x * 1)
            assert not torch.equal(first, second)
            rest = torch.rand(3, device="cuda")
            results.append([first, second, *torch.autograd.grad((first * second).sum(), x), rest])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


# -- Autocast, recomputation ----------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.layer) for c in ONE_OF_EACH])
def test_autocast(case: Case, low: torch.dtype, frozen: bool) -> None:
    results = []
    for layer in pair(case, torch.float32, "cuda"):
        set_needs(layer, frozenset() if frozen else frozenset(["weight", "bias"]))
        leaf = case.input(torch.float32, device="cuda").requires_grad_()
        torch.manual_seed(0)
        with torch.autocast("cuda", low):
            y = layer(leaf)
        wanted = [t for t in (leaf, *layer.parameters()) if t.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y, wanted, cotangent_of(y, ""))])
    ours, torchs = results
    assert same_bits(ours[0], torchs[0], case.keeps_sign_of_zero)
    needs = frozenset(["input"] if frozen else ["input", "weight", "bias"])
    for a, b in zip(ours[1:], torchs[1:], strict=True):
        if case.exact(needs, "cuda"):
            assert same_bits(a, b, case.keeps_sign_of_zero)
        else:  # summed in the low type
            scale = b.abs().max().item()
            torch.testing.assert_close(a, b, rtol=0, atol=16 * torch.finfo(low).eps * scale)


def net_of(of: Any, p: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        of.Conv2d(8, 16, 3, padding=1),
        of.BatchNorm2d(16),
        of.ReLU(True),
        of.MaxPool2d(2),
        of.Dropout(p),
        of.Conv2d(16, 8, 3, padding=1),
        of.BatchNorm2d(8),
        of.ReLU(),
        of.Conv2d(8, 8, 3),
    ).cuda()


def grads_of(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    y = net(x)
    wanted = [t for t in (x, *net.parameters()) if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, cotangent_of(y, ""))]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_recompute_cheap(layout: torch.memory_format) -> None:
    x = torch.randn(4, 8, 32, 32, device="cuda").to(memory_format=layout)
    kept = {}
    results = {}
    for recompute in (None, "cheap"):
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True)),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            nn.Conv2d(16, 8, 3),
        ).to("cuda", memory_format=layout)
        brim.convert(net, recompute=recompute)
        results[recompute] = grads_of(net, x)
        with brim.PeakMeter("cuda") as meter:
            loss = net(x).sum()
        kept[recompute] = meter.left
        del loss
    for a, b in zip(results[None], results["cheap"], strict=True):
        assert torch.equal(a, b)
    assert kept["cheap"] < 0.6 * kept[None]


# -- Bytes ----------------------------------------------------------------------------------------

BLOCK = 512  # the allocator hands out multiples of it


def rounded(size: int) -> int:
    return math.ceil(size / BLOCK) * BLOCK


@pytest.mark.parametrize(
    ("case", "needs", "least"),
    [
        (Case("Conv2d", (4, 8, 32, 32), (8, 8, 3)), {"input"}, 0),
        (Case("Conv2d", (4, 8, 32, 32), (8, 8, 3)), {"input", "weight"}, 4 * 32768),
        (Case("Linear", (64, 128), (128, 32)), {"input", "bias"}, 0),
        (Case("BatchNorm2d", (4, 8, 32, 32), (8,), train=False), {"input"}, 0),
        (Case("BatchNorm2d", (4, 8, 32, 32), (8,), train=False), {"input", "bias"}, 0),
        (Case("ReLU", (4, 8, 32, 32)), {"input"}, 32768 // 8),
        (Case("Hardtanh", (4, 8, 32, 32)), {"input"}, 32768 // 8),
        (Case("Dropout", (4, 8, 32, 32), (0.1,)), {"input"}, 32768 // 8),
        (Case("MaxPool2d", (4, 8, 32, 32), (2,)), {"input"}, 32768 // 4),
        (Case("AvgPool2d", (4, 8, 32, 32), (2,)), {"input"}, 0),
        (Case("AdaptiveAvgPool2d", (4, 8, 32, 32), (7,)), {"input"}, 0),
        (Case("AdaptiveAvgPool2d", (4, 8, 32, 32), (1,)), {"input"}, 0),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_bytes_kept(case: Case, needs: set[str], least: int) -> None:
    layer, _ = pair(case, torch.float32, "cuda")
    set_needs(layer, frozenset(needs))
    leaf = case.input(torch.float32, device="cuda").requires_grad_("input" in needs)
    layer(leaf.clone()).sum().backward()  # libraries take their workspaces
    with brim.PeakMeter("cuda") as meter:
        loss = layer(leaf.clone()).sum()
    assert meter.left - rounded(loss.nbytes) == rounded(least)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_never_keeps_more_than_torch_nn(case: Case) -> None:
    for needs in case.needs():
        kept = []
        for layer in pair(case, torch.float32, "cuda"):
            set_needs(layer, needs)
            leaf = case.input(torch.float32, device="cuda").requires_grad_("input" in needs)

            def call(
                layer: nn.Module = layer, leaf: torch.Tensor = leaf, case: Case = case
            ) -> torch.Tensor:
                y = layer(leaf.clone(), **case.forward)
                return (y[0] if isinstance(y, tuple) else y).sum()

            call().backward()
            with brim.PeakMeter("cuda") as meter:
                loss = call()
            kept.append(meter.left)
            del loss
        assert kept[0] <= kept[1], needs


def test_autocast_keeps_no_copy_of_a_frozen_weight() -> None:
    layer = brim.nn.Linear(256, 256).cuda().requires_grad_(False)
    x = torch.randn(16, 256, device="cuda", requires_grad=True)

    def call() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return layer(x.clone()).sum()

    call().backward()
    with brim.PeakMeter("cuda") as meter:
        loss = call()
    assert meter.left == rounded(loss.nbytes)


# -- Streams, graphs, sizes -----------------------------------------------------------------------


def test_two_streams() -> None:
    net = net_of(brim.nn, p=0.0).eval()
    batches = [torch.randn(4, 8, 32, 32, device="cuda") for _ in range(2)]
    expected = [grads_of(net, x) for x in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    found: list[list[torch.Tensor]] = []
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for stream, x in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                found.append(grads_of(net, x))
    torch.cuda.synchronize()
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


def test_another_device_is_not_touched() -> None:
    """Kernels run on the current stream of the tensor's device."""
    side = torch.cuda.Stream()
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        y = brim.nn.ReLU()(x * 2)
        (grad,) = torch.autograd.grad(y.sum(), x)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(grad, (x > 0) * 2.0)


def test_graph_capture_of_a_frozen_net() -> None:
    net = net_of(brim.nn, p=0.1).requires_grad_(False)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    x = torch.randn(4, 8, 32, 32, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch asks: warm up outside of the capture
        for _ in range(3):
            torch.autograd.grad(net(x).sum(), x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = net(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(1)
    graph.replay()
    first = (y.clone(), grad.clone())
    graph.replay()
    assert not torch.equal(first[0], y), "each replay draws other random numbers"
    torch.manual_seed(1)
    graph.replay()
    assert torch.equal(first[0], y)
    assert torch.equal(first[1], grad)
    with torch.no_grad():
        x.mul_(0.5)
    graph.replay()
    assert not torch.equal(first[1], grad), "the graph reads its input anew"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_more_than_two_to_the_31_elements(dtype: torch.dtype) -> None:
    n = 2**31 + 1000
    if torch.cuda.mem_get_info()[0] < 5 * n * dtype.itemsize:
        pytest.skip("needs more memory")
    x = torch.full((n,), -1.0, device="cuda", dtype=dtype)
    places = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 7, n - 1], device="cuda")
    x[places] = 2.0
    x.requires_grad_()
    y = brim.nn.ReLU()(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for tensor, value in ((y.detach(), 2.0), (grad, 1.0)):
        assert torch.equal(tensor[places], torch.full_like(tensor[places], value))
        assert tensor.count_nonzero() == len(places)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_max_pool_of_more_than_two_to_the_31_elements(layout: torch.memory_format) -> None:
    shape = (2, 16, 2**13 + 2, 2**13)  # 2**31 elements and a little
    n = math.prod(shape)
    assert n > 2**31
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("needs more memory")
    x = torch.zeros(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=layout)
    places = [(0, 0, 0, 1), (1, 15, 2**13 + 1, 2**13 - 1), (1, 0, 5, 6), (1, 15, 0, 0)]
    for place in places:
        x[place] = 3.0
    x.requires_grad_()
    y = brim.nn.MaxPool2d(2)(x)
    for n_, c, h, w in places:
        assert y[n_, c, h // 2, w // 2] == 3.0
    cotangent = torch.where(y == 3.0, 1.0, 0.0).to(y.dtype)
    (grad,) = torch.autograd.grad(y, x, cotangent)
    assert grad.count_nonzero() == len(places)
    for place in places:
        assert grad[place] == 1.0


@pytest.mark.parametrize("case", [pytest.param(c, id=c.layer) for c in ONE_OF_EACH])
def test_save_on_cpu(case: Case) -> None:
    results = []
    ours, torchs = pair(case, torch.float32, "cuda")
    for layer in (ours, torchs):
        x = case.input(torch.float32, device="cuda").requires_grad_()
        torch.manual_seed(0)
        with torch.autograd.graph.save_on_cpu(pin_memory=layer is ours):
            y = layer(x)
        results.append(torch.autograd.grad(y, [x, *layer.parameters()], cotangent_of(y, "")))
    for a, b in zip(*results, strict=True):
        if case.exact(frozenset(["input", "weight", "bias"]), "cuda"):
            assert torch.equal(a, b)
        else:
            assert near(a, b)
