"""`float32_rms_norm` beside the norms that Hugging Face's models write by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brim
from brim.nn.functional import float32_rms_norm

from .nn_cases import FLOATS, in_layout, near, same_bits

EPS = 1e-5
ROWS, SIZE = (3, 5), 24


def llama(x: Tensor, weight: Tensor | None, eps: float = EPS) -> Tensor:
    """As LlamaRMSNorm, MistralRMSNorm, Qwen3RMSNorm."""
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x.to(dtype) if weight is None else weight * x.to(dtype)


def gemma(x: Tensor, weight: Tensor | None, eps: float = EPS, offset: float = 1.0) -> Tensor:
    """As GemmaRMSNorm; with offset 0 as Olmo2RMSNorm."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        h = h * (offset + weight.float() if offset else weight.float())
    return h.type_as(x)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {}),
    "gemma": (gemma, {"offset": 1.0, "cast_first": False}),
    "olmo2": (lambda x, w, eps=EPS: gemma(x, w, eps, 0.0), {"cast_first": False}),
}
TYPES = [*itertools.product(FLOATS, [*FLOATS, None])]
NEEDS = ["input", "weight", "input+weight"]


def tensors(dtype: torch.dtype, weights: torch.dtype | None, shape: Any = ROWS) -> list[Any]:
    dice = torch.Generator().manual_seed(5)
    x = torch.randn(*shape, SIZE, generator=dice, dtype=torch.float64).to(dtype)
    weight = torch.randn(SIZE, generator=dice, dtype=torch.float64)
    return [x, None if weights is None else weight.to(weights)]


def run(function: Any, x: Tensor, weight: Tensor | None, needs: str, layout: str) -> list[Tensor]:
    """The value, then the gradients of what needs one."""
    x = x.detach().requires_grad_("input" in needs)
    leaves = [x] if "input" in needs else []
    if weight is not None:
        weight = weight.detach().requires_grad_("weight" in needs)
        leaves += [weight] if "weight" in needs else []
    value = function(x, weight)
    dice = torch.Generator().manual_seed(6)
    up = torch.randn(value.shape, generator=dice, dtype=torch.float64).to(value)
    return [value, *torch.autograd.grad(value, leaves, in_layout(up, layout))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "weights"), TYPES, ids=str)
def test_values_and_gradients_are_those_of_the_handwritten_norm(
    kind: str, dtype: torch.dtype, weights: torch.dtype | None
) -> None:
    theirs, options = KINDS[kind]
    x, weight = tensors(dtype, weights)
    for needs, layout in itertools.product(NEEDS, ["contiguous", "sliced"]):
        if weight is None and needs != "input":
            continue
        given = in_layout(x, layout)
        want = run(theirs, given, weight, needs, layout)
        got = run(lambda a, w: float32_rms_norm(a, w, EPS, **options), given, weight, needs, layout)
        for ours, torchs in zip(got, want, strict=True):
            assert same_bits(ours, torchs), (needs, layout)
        assert got[0].stride() == want[0].stride(), layout


@pytest.mark.parametrize("shape", [(), (1,), (0,), (700,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_any_number(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = tensors(dtype, dtype, shape)
    got = run(lambda a, w: float32_rms_norm(a, w, EPS), x, weight, "input+weight", "contiguous")
    want = run(llama, x, weight, "input+weight", "contiguous")
    assert all(map(same_bits, got, want))


# -- What is kept ----------------------------------------------------------------------------------


def kept(function: Any, x: Tensor, weight: Tensor | None, needs: str, part: bool = False) -> int:
    """Bytes held after forward; nobody else holds the input."""
    x = x.detach().requires_grad_("input" in needs)
    if weight is not None:
        weight = weight.detach().requires_grad_("weight" in needs)
    with brim.PeakMeter("cpu") as meter:
        value = function(x.clone()[:, :1] if part else x.clone(), weight)
        return meter.left - value.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keeps_its_input_and_one_number_per_row(
    kind: str, needs: str, dtype: torch.dtype, held: int
) -> None:
    theirs, options = KINDS[kind]
    x, weight = tensors(dtype, dtype, (64,))
    ours = kept(lambda a, w: float32_rms_norm(a, w, EPS, **options), x, weight, needs)
    if dtype != torch.float64:  # becomes float32: left to torch
        assert ours == x.nbytes + (64 * 4 if "input" in needs else 0)
    assert ours <= kept(theirs, x, weight, needs)


def test_without_gradients_nothing_is_kept(held: int) -> None:
    x, weight = tensors(torch.bfloat16, torch.float32, (64,))
    assert kept(lambda a, w: float32_rms_norm(a, w, EPS), x, weight, "") == 0


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_part_of_a_larger_tensor_pins_no_more_than_with_torch(
    needs: str, dtype: torch.dtype, held: int
) -> None:
    x, weight = tensors(dtype, dtype, (16, 8))
    ours = kept(lambda a, w: float32_rms_norm(a, w, EPS), x, weight, needs, part=True)
    assert ours <= kept(llama, x, weight, needs, part=True)


# -- Among other layers ----------------------------------------------------------------------------


class Norm(nn.Module):
    """A Llama's norm, by hand or by brim."""

    def __init__(self, ours: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter(torch.randn(SIZE, generator=dice).to(dtype))
        self.ours, self.eps = ours, EPS

    def forward(self, x: Tensor) -> Tensor:
        if self.ours:
            return float32_rms_norm(x, self.weight, self.eps)
        return llama(x, self.weight, self.eps)


def block(ours: bool, dtype: torch.dtype, recompute: str | None = "cheap") -> nn.Sequential:
    """With brim, the second linear layer asks the norm for its input."""
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(SIZE, SIZE), Norm(ours), nn.Linear(SIZE, 4, bias=False)).to(dtype)
    if ours:
        brim.convert(net, recompute=recompute)
    return net


def results(net: nn.Module, x: Tensor, run: Any = None, **backward: Any) -> list[Tensor]:
    x = x.detach().requires_grad_()
    value = (run or net)(x)
    return [value, *torch.autograd.grad(value.square().sum(), [x, *net.parameters()], **backward)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gives_its_output_again_to_the_layer_behind(
    dtype: torch.dtype, autocast: bool, held: int
) -> None:
    x = tensors(dtype, None, (512,))[0]
    found, sizes = [], []
    for ours in (False, True):
        net = block(ours, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(results(net, x))
            leaf = x.detach().requires_grad_()
            with brim.PeakMeter("cpu") as meter:
                value = net(leaf)
                sizes.append(meter.left - value.nbytes)
    assert all(map(same_bits, found[1], found[0]))
    copies = sum(p.nbytes for p in block(True, dtype).parameters())  # as they were at forward
    first = x.numel() * (2 if autocast else dtype.itemsize)  # what the norm gets
    cast = first if autocast and dtype == torch.float32 else 0  # of the first layer's input
    assert sizes[1] <= first + cast + 512 * 4 + copies
    assert sizes[1] < 0.7 * sizes[0]


def test_several_layers_that_ask_get_one_recomputation() -> None:
    x = tensors(torch.bfloat16, None)[0]
    found, runs = [], []
    for ours in (False, True):
        torch.manual_seed(9)
        norm = Norm(ours, torch.bfloat16)
        projections = nn.ModuleList(nn.Linear(SIZE, 8) for _ in range(3)).bfloat16()
        if ours:
            brim.convert(projections, recompute="cheap")
        leaf = x.detach().requires_grad_()
        normal = norm(leaf)
        loss = sum(each(normal).square().sum() for each in projections)
        wanted = [leaf, norm.weight, *projections.parameters()]
        first = torch.autograd.grad(loss, wanted, retain_graph=True)
        with torch.autograd.profiler.profile() as profile:
            found.append(torch.autograd.grad(loss, wanted))
        assert all(map(same_bits, first, found[-1]))
        names = [event.name for event in profile.function_events]
        runs.append(names.count("brim::float32_rms_norm_forward"))
    assert all(map(same_bits, *found))
    assert runs == [0, 1]


def test_checkpoint() -> None:
    x = tensors(torch.bfloat16, None)[0]
    net = block(True, torch.bfloat16)
    again = results(net, x, lambda a: checkpoint(net, a, use_reentrant=False))
    assert all(map(same_bits, again, results(block(False, torch.bfloat16), x)))


def test_a_weight_changed_between_forward_and_backward() -> None:
    x = tensors(torch.bfloat16, None)[0]

    def grads(net: Any, change: bool) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        loss = net(leaf).square().sum()
        if change:
            net[1].weight.data.mul_(-1.5)
            net[1].eps = 1.0
        return list(torch.autograd.grad(loss, [net[2].weight]))

    want = grads(block(False, torch.bfloat16), False)
    assert all(map(same_bits, grads(block(True, torch.bfloat16), True), want))
    net = block(True, torch.bfloat16)
    loss = net(x.detach().requires_grad_()).sum()
    with torch.no_grad():
        net[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_double_backward(kind: str) -> None:
    theirs, options = KINDS[kind]
    x, weight = tensors(torch.float32, torch.float32)
    found = []
    for function in (theirs, lambda a, w: float32_rms_norm(a, w, EPS, **options)):
        a, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        grads = torch.autograd.grad(function(a, w).pow(3).sum(), [a, w], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), [a, w]))
    assert all(map(near, *found))


def test_double_backward_through_a_layer_that_asks() -> None:
    x = tensors(torch.float32, None)[0]
    found = []
    for ours in (False, True):
        net, leaf = block(ours, torch.float32), x.detach().requires_grad_()
        wanted = [leaf, *net.parameters()]
        grads = torch.autograd.grad(net(leaf).pow(3).sum(), wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), wanted))
    assert all(map(near, found[1], found[0]))


# -- Other ways to run -----------------------------------------------------------------------------


def test_compiled_and_in_torch_func() -> None:
    x, weight = tensors(torch.bfloat16, torch.float32)
    compiled = torch.compile(
        lambda a, w: float32_rms_norm(a, w, EPS), backend="aot_eager", fullgraph=True
    )
    for got, want in zip(
        run(compiled, x, weight, "input+weight", "contiguous"),
        run(llama, x, weight, "input+weight", "contiguous"),
        strict=True,
    ):
        assert near(got, want, torch.bfloat16)

    def loss(a: Tensor) -> Tensor:
        return float32_rms_norm(a, weight, EPS).sum()

    want = torch.func.grad(lambda a: llama(a, weight).sum())(x[0])
    assert same_bits(torch.func.grad(loss)(x[0]), want)
    assert torch.func.vmap(torch.func.grad(loss))(x).shape == x.shape


def test_meta_device() -> None:
    x, weight = (
        each.to("meta").requires_grad_() for each in tensors(torch.bfloat16, torch.float32)
    )
    value = float32_rms_norm(x, weight, EPS)
    assert (value.shape, value.dtype) == (x.shape, torch.float32)
    value.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_wrong_arguments() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"weight .*size 4, got shape \[3\]"):
        float32_rms_norm(x, torch.ones(3), EPS)
    with pytest.raises(ValueError, match=r"weight .*got shape \[2, 4\]"):
        float32_rms_norm(x, torch.ones(2, 4), EPS)
    for eps in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="eps must be 0 or more, got"):
            float32_rms_norm(x, None, eps)
    with pytest.raises(ValueError, match="input must have at least one dimension"):
        float32_rms_norm(torch.ones(()), None, EPS)
    with pytest.raises(TypeError, match="input must be a Tensor, got None"):
        float32_rms_norm(None, None, EPS)  # type: ignore[arg-type]


# -- The kernels for CUDA --------------------------------------------------------------------------

# One row per warp and less, several packs per thread, rows that no pack divides, and rows whose
# weight's gradient does not fit into shared memory.
SIZES = [1, 7, 24, 128, 1000, 1024, 4096, 8192, 12288, 13001, 20000]


def on_cuda(size: int, rows: int, dtype: torch.dtype, weights: torch.dtype | None) -> list[Any]:
    dice = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(rows, size, generator=dice, device="cuda").to(dtype)
    weight = torch.randn(size, generator=dice, device="cuda")
    return [x, None if weights is None else weight.to(weights)]


def assert_rounding(got: list[Tensor], want: list[Tensor], low: torch.dtype) -> None:
    for ours, torchs in zip(got, want, strict=True):
        assert near(ours, torchs, low)


@pytest.mark.cuda
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_rows_of_any_size(size: int, dtype: torch.dtype) -> None:
    for rows, needs in itertools.product([1, 37, 700], NEEDS):
        x, weight = on_cuda(size, rows, dtype, dtype)
        got = run(lambda a, w: float32_rms_norm(a, w, EPS), x, weight, needs, "contiguous")
        want = run(llama, x, weight, needs, "contiguous")
        # For a sum over many rows torch rounds each summand. The gradient of a row of one number is
        # what two nearly equal numbers leave.
        assert_rounding(got, want, torch.float16 if size == 1 else dtype)
        again = run(lambda a, w: float32_rms_norm(a, w, EPS), x, weight, needs, "contiguous")
        assert all(map(same_bits, again, got))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "weights"), TYPES, ids=str)
def test_cuda_types_and_layouts(kind: str, dtype: torch.dtype, weights: torch.dtype | None) -> None:
    theirs, options = KINDS[kind]
    lows = [each for each in (dtype, weights) if each in (torch.bfloat16, torch.float16)]
    low = max(lows, key=lambda each: torch.finfo(each).eps, default=torch.float32)
    for (needs, layout), size in itertools.product(
        itertools.product(NEEDS, ["contiguous", "sliced"]), [24, 129]
    ):
        if weights is None and needs != "input":
            continue
        x, weight = on_cuda(size, 15, dtype, weights)
        given = in_layout(x, layout)
        want = run(theirs, given, weight, needs, layout)
        got = run(lambda a, w: float32_rms_norm(a, w, EPS, **options), given, weight, needs, layout)
        assert_rounding(got, want, low)
        assert [each.stride() for each in got] == [each.stride() for each in want]


@pytest.mark.cuda
def test_cuda_unaligned_rows_and_no_rows() -> None:
    x, weight = on_cuda(64, 20, torch.bfloat16, torch.bfloat16)
    for given, by in ((x.flatten()[1:-63].view(19, 64), weight), (x[:0], weight)):
        got = run(lambda a, w: float32_rms_norm(a, w, EPS), given, by, "input+weight", "contiguous")
        assert_rounding(got, run(llama, given, by, "input+weight", "contiguous"), torch.bfloat16)
    by = torch.randn(65, device="cuda").bfloat16()[1:]
    got = run(lambda a, w: float32_rms_norm(a, w, EPS), x, by, "input+weight", "contiguous")
    assert_rounding(got, run(llama, x, by, "input+weight", "contiguous"), torch.bfloat16)


@pytest.mark.cuda
def test_cuda_output_is_recomputed_bit_for_bit() -> None:
    x = on_cuda(SIZE, 64, torch.bfloat16, None)[0]
    nets = [block(True, torch.bfloat16, how).cuda() for how in (None, "cheap")]
    assert all(map(same_bits, *(results(net, x) for net in nets)))


@pytest.mark.cuda
def test_cuda_keeps_its_input_and_one_number_per_row() -> None:
    x, weight = on_cuda(2048, 1024, torch.bfloat16, torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    value = float32_rms_norm(x.clone(), weight, EPS)
    assert torch.cuda.memory_allocated() - before == value.nbytes + x.nbytes + 1024 * 4
