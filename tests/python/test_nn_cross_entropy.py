"""`brim.nn.functional.cross_entropy`: torch's values, gradients and errors, and less kept."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import brim
from brim.nn._loss import _cross_entropy

ours = brim.nn.functional.cross_entropy
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
REDUCTIONS = ["none", "mean", "sum"]


def loss(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    smoothing: float = 0.0,
    in_float32: bool = True,
    recompute: bool = False,
) -> Tensor:
    """As converted language models call it."""
    return _cross_entropy(
        logits, target, None, ignore_index, reduction, smoothing, in_float32, recompute
    )


def classes(*shape: int, of: int = 7) -> Tensor:
    return torch.randint(0, of, shape)


def results(run: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the logits for a gradient that is not 1."""
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    value = run(leaf)
    value.backward(torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).view_as(value))
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(
        x.dtype == y.dtype
        and x.stride() == y.stride()
        and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(a, b, strict=True)
    )


CASES: dict[str, tuple[tuple[int, ...], Callable[[], Tensor], dict[str, Any]]] = {
    "rows": ((9, 7), lambda: classes(9), {}),
    "one row": ((1, 7), lambda: classes(1), {}),
    "one class": ((4, 1), lambda: classes(4, of=1), {}),
    "some ignored": ((5, 7), lambda: torch.tensor([1, -100, 6, 0, -100]), {}),
    "class 0 ignored": ((5, 7), lambda: torch.tensor([1, 0, 6, 0, 3]), {"ignore_index": 0}),
    "all ignored": ((3, 7), lambda: torch.full((3,), -100), {}),
    "smoothed": ((9, 7), lambda: classes(9), {"label_smoothing": 0.1}),
    "weighted": ((9, 7), lambda: classes(9), {"weight": True}),
    "no batch": ((7,), lambda: classes(), {}),
    "images": ((2, 7, 3, 4), lambda: classes(2, 3, 4), {}),
    "sequences, weighted, smoothed": (
        (2, 7, 5),
        lambda: classes(2, 5),
        {"weight": True, "label_smoothing": 0.2},
    ),
    "probabilities": ((4, 7), lambda: torch.rand(4, 7).softmax(1), {}),
    "no rows": ((0, 7), lambda: classes(0), {}),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_torchs_bit_for_bit(case: str, dtype: torch.dtype, reduction: str) -> None:
    shape, targets, options = CASES[case]
    torch.manual_seed(0)
    logits, target = torch.randn(shape).mul(3).to(dtype), targets()
    if target.is_floating_point():
        target = target.to(dtype)
    options = options | {"reduction": reduction}
    if options.pop("weight", False):
        options["weight"] = torch.rand(7).to(dtype)
    assert same(
        results(lambda x: ours(x, target, **options), logits),
        results(lambda x: F.cross_entropy(x, target, **options), logits),
    )
    assert torch.equal(
        ours(logits, target, **options).nan_to_num(),
        F.cross_entropy(logits, target, **options).nan_to_num(),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [5, 2500])  # the second in several parts
def test_in_float32_is_the_loss_of_a_copy(rows: int, dtype: torch.dtype, reduction: str) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(rows, 1000).mul(3).to(dtype), classes(rows, of=1000)
    target[::3] = -100
    assert same(
        results(lambda x: loss(x, target, reduction=reduction), logits),
        results(lambda x: F.cross_entropy(x.float(), target, reduction=reduction), logits),
    )


@pytest.mark.parametrize(
    "of", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:4]], ids=["t", "gaps", "part"]
)
def test_strides(of: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 6)
    target = classes(of(logits).shape[0], of=3)
    assert same(
        results(lambda x: ours(of(x), target), logits),
        results(lambda x: F.cross_entropy(of(x), target), logits),
    )


def test_deprecated_arguments() -> None:
    logits, target = torch.randn(3, 7), classes(3)
    for old in ({"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(ours(logits, target, **old), F.cross_entropy(logits, target, **old))


WRONG: dict[str, Callable[[Any], object]] = {
    "a class too large": lambda f: f(torch.zeros(2, 7), torch.tensor([0, 7])),
    "a class below 0": lambda f: f(torch.zeros(2, 7), torch.tensor([0, -1])),
    "another number of rows": lambda f: f(torch.zeros(2, 7), classes(3)),
    "a shape for nothing": lambda f: f(torch.zeros(2, 7, 3), classes(2, 4)),
    "int32 classes": lambda f: f(torch.zeros(2, 7), classes(2).int()),
    "whole numbers": lambda f: f(torch.zeros(2, 7).long(), classes(2)),
    "a reduction": lambda f: f(torch.zeros(2, 7), classes(2), reduction="median"),
    "too much smoothing": lambda f: f(torch.zeros(2, 7), classes(2), label_smoothing=1.5),
    "a weight for other classes": lambda f: f(torch.zeros(2, 7), classes(2), torch.ones(3)),
    "a scalar": lambda f: f(torch.tensor(1.0), torch.tensor(0)),
    "ignored probabilities": lambda f: f(torch.zeros(2, 7), torch.ones(2, 7), ignore_index=3),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_errors_are_torchs(case: str, trained: bool) -> None:
    def logits_of(f: Any) -> Any:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> object:
            return f(x.requires_grad_(trained and x.is_floating_point()), *args, **kwargs)

        return run

    with pytest.raises((RuntimeError, ValueError, IndexError)) as theirs:
        WRONG[case](logits_of(F.cross_entropy))
    with pytest.raises(type(theirs.value)) as own:
        WRONG[case](logits_of(ours))
    assert str(own.value) == str(theirs.value)


# -- What is kept ----------------------------------------------------------------------------------


def kept(run: Callable[[], Tensor]) -> int:
    """Bytes that are left after forward."""
    run()
    with brim.PeakMeter("cpu") as meter:
        value = run()
        left = meter.left
    value.backward()
    return left


@pytest.fixture
def head() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 1000, bias=False)).to(torch.bfloat16)
    brim.convert(net, recompute="cheap")
    return net


def test_the_logits_are_kept_in_their_own_type() -> None:
    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    target = classes(64, of=1000)
    small = 2000
    assert kept(lambda: F.cross_entropy((logits * 2).float(), target)) >= logits.nbytes * 2
    bytes_kept = kept(lambda: loss(logits * 2, target))
    assert logits.nbytes <= bytes_kept <= logits.nbytes + small


PEAKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "few rows": ((2, 20000), {}),
    "one row": ((1, 40000), {}),
    "few classes": ((4000, 10), {}),
    "many of both": ((600, 2000), {}),
    "small": ((8, 10), {}),
    "sum": ((300, 500), {"reduction": "sum"}),
    "ignored": ((300, 500), {"ignore_index": 3}),
    "smoothed": ((300, 500), {"label_smoothing": 0.1}),
    "weighted": ((300, 500), {"weight": True}),
    "images": ((4, 30, 20, 20), {}),
}


@pytest.mark.parametrize("case", PEAKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_of_a_step_is_not_above_torchs(
    case: str, dtype: torch.dtype, recompute: bool
) -> None:
    shape, options = PEAKS[case]
    options = dict(options)
    rows, width = math.prod(shape) // shape[1], shape[1]
    if options.get("weight"):
        options["weight"] = torch.rand(width)
    target = classes(shape[0], *shape[2:], of=width)

    def peak(linear: Callable[..., Tensor], of: Callable[..., Tensor]) -> int:
        torch.manual_seed(0)
        x = torch.randn(rows, 4, dtype=dtype, requires_grad=True)
        weight = torch.randn(width, 4, dtype=dtype, requires_grad=True)
        with brim.PeakMeter("cpu") as meter:
            logits = linear(x, weight)
            if len(shape) > 2:
                logits = logits.view(shape[0], *shape[2:], width).movedim(-1, 1)
            value = of(logits, target, **options)
            del logits
            value.backward()
        return meter.peak

    def own(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        low = dtype != torch.float32
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        usual = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
        given = [(usual | options)[name] for name in names]
        return _cross_entropy(logits, target, *given, low, recompute)

    def own_linear(x: Tensor, weight: Tensor) -> Tensor:
        return brim.nn.functional.linear(x, weight, recompute=recompute)

    for _ in range(2):  # the first call allocates for good
        most = peak(F.linear, lambda logits, *a, **k: F.cross_entropy(logits.float(), *a, **k))
        found = peak(own_linear, own)
    # In 16 bits on x86_64 a copy of the linear layer's input exists beside; not of the logits.
    assert found <= most + 2048 + (rows * 4 * dtype.itemsize if dtype != torch.float32 else 0)


@pytest.mark.parametrize("trained", ["all", "norm", "head"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_with_recompute_the_layer_before_runs_again(
    head: nn.Sequential, trained: str, smoothing: float, autocast: bool
) -> None:
    if autocast:
        head.float()
    head[0].requires_grad_(trained != "head")
    head[1].requires_grad_(trained != "norm")
    x = torch.randn(2, 32, 32, dtype=head[1].weight.dtype)
    target = classes(64, of=1000)

    def step(of: nn.Module, recompute: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = of(x).view(-1, 1000)
            if of is head:
                return loss(logits, target, smoothing=smoothing, recompute=recompute)
            return F.cross_entropy(logits.float(), target, label_smoothing=smoothing)

    def grads(of: nn.Module, recompute: bool) -> list[Tensor]:
        step(of, recompute).backward()
        return [p.grad for p in of.parameters() if p.grad is not None]

    logits_bytes = 64 * 1000 * 2
    if trained == "head":  # without the gradient of its input, torch allows changes of the weight
        assert kept(lambda: step(head, True)) >= logits_bytes
    else:
        weight_copy = head[1].weight.numel() * 2 if autocast else 0
        assert kept(lambda: step(head, True)) < logits_bytes / 4 + weight_copy
    head.zero_grad()
    plain = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 1000, bias=False)).to(x.dtype)
    plain.load_state_dict(head.state_dict())
    for own, other in zip(plain.parameters(), head.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)
    assert all(map(torch.equal, grads(head, True), grads(plain, False)))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda logits: logits.view(-1, 1000),
    "a view of float32": lambda logits: logits.float().view(-1, 1000),
    "shifted": lambda logits: logits[:, :-1].contiguous().view(-1, 1000),
    "a part": lambda logits: logits[0, 5:],
}


@pytest.mark.parametrize("way", WAYS)
def test_it_asks_for_logits_that_were_reshaped_or_cast(head: nn.Sequential, way: str) -> None:
    x = torch.randn(4, 32, 32, dtype=torch.bfloat16)
    target = classes(WAYS[way](head(x)).shape[0], of=1000)

    def value(recompute: bool) -> Tensor:
        return ours(WAYS[way](head(x)), target, recompute=recompute)

    assert kept(lambda: value(True)) < kept(lambda: value(False)) / 4
    found = []
    for recompute in (False, True):
        head.zero_grad()
        value(recompute).backward()
        found.append([p.grad.clone() for p in head.parameters()])
    assert all(map(torch.equal, *found))


def loss_of(head: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return loss(head(x), target, recompute=True)


def test_a_weight_changed_between_is_an_error(head: nn.Sequential) -> None:
    value = loss_of(head, torch.randn(4, 32, dtype=torch.bfloat16), classes(4))
    with torch.no_grad():
        head[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_logits_written_to_between_are_an_error() -> None:
    logits = torch.randn(4, 50, requires_grad=True) * 2.0
    value = loss(logits, classes(4))
    logits.div_(2.0)
    with pytest.raises(RuntimeError, match=r"keeps the logits themselves.*modified by an inplace"):
        value.backward()


def test_a_bias_changed_between_changes_nothing() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 50))
    brim.convert(net, recompute="cheap")
    x, target = torch.randn(4, 8), classes(4)
    found = []
    for change in (0.0, 1.0):
        net.zero_grad()
        value = loss_of(net, x, target)
        with torch.no_grad():
            net[1].bias.add_(change)
        value.backward()
        found.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.equal, *found))


def test_backward_twice(head: nn.Sequential) -> None:
    value = loss_of(head, torch.randn(4, 32, dtype=torch.bfloat16), classes(4))
    value.backward(retain_graph=True)
    first = head[1].weight.grad.clone()
    head.zero_grad()
    value.backward()
    assert torch.equal(head[1].weight.grad, first)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@pytest.mark.parametrize("of", ["norm", "both"])
def test_checkpointed(head: nn.Sequential, of: str) -> None:
    x, target = torch.randn(4, 32, dtype=torch.bfloat16), classes(4)
    loss_of(head, x, target).backward()
    expected = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    if of == "norm":
        hidden = checkpoint(head[0], x, use_reentrant=False)
        value = loss_of(head[1], hidden, target)
    else:
        value = checkpoint(loss_of, head, x, target, use_reentrant=False)
    value.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(head.parameters(), expected, strict=True))


def test_logits_that_were_changed_are_kept() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 50))
    brim.convert(net, recompute="cheap")
    x, target = torch.randn(4, 8), classes(4)
    found = []
    for recompute in (True, False):
        net.zero_grad()
        logits = net(x)
        with torch.no_grad():
            logits.mul_(0.5)
        loss(logits, target, recompute=recompute).backward()
        found.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.equal, *found))


# -- With the rest of torch ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1}, {"ignore_index": 2}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivatives(options: dict[str, Any], recompute: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 2, 4])

    def run(x: Tensor, weight: Tensor) -> Tensor:
        logits = brim.nn.functional.linear(x, weight, recompute=recompute)
        return loss(logits, target, in_float32=False, recompute=recompute, **options)

    torch.autograd.gradcheck(run, (x, weight))
    torch.autograd.gradgradcheck(run, (x, weight))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_transforms() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(3, 7), classes(3)

    def grads(f: Any) -> list[Tensor]:
        one = torch.func.grad(lambda x: f(x, target))(logits)
        per_row = torch.func.vmap(torch.func.grad(lambda x, t: f(x, t)))(logits, target)
        smooth = torch.func.grad(lambda x: f(x, target, label_smoothing=0.1))(logits)
        return [one, per_row, smooth, torch.func.hessian(lambda x: f(x, target))(logits)]

    for own, torchs in zip(grads(ours), grads(F.cross_entropy), strict=True):
        torch.testing.assert_close(own, torchs, rtol=0, atol=0)


def test_compiled() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(3, 7), classes(3)
    run = torch.compile(lambda x: ours(x, target), fullgraph=True, backend="aot_eager")
    assert same(results(run, logits), results(lambda x: F.cross_entropy(x, target), logits))


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_without_memory(device: str) -> None:
    def run() -> tuple[Tensor, Tensor]:
        logits = torch.empty(6, 7, dtype=torch.bfloat16, device=device, requires_grad=True)
        target = torch.empty(6, dtype=torch.long, device=device)
        value = loss(logits, target)
        if device != "cuda":  # whose backward asks the driver
            value.backward()
        return value, logits

    if device == "meta":
        value, logits = run()
    else:
        with FakeTensorMode():
            value, logits = run()
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert device == "cuda" or (logits.grad.shape, logits.grad.dtype) == ((6, 7), torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(7).to(torch.bfloat16)}], ids=str
)
def test_autocast(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 7).to(torch.bfloat16), classes(5)
    with torch.autocast("cpu", torch.bfloat16):
        own = results(lambda x: ours(x, target, **options), logits)
        assert same(own, results(lambda x: F.cross_entropy(x, target, **options), logits))
    assert own[0].dtype == torch.float32


def test_weights_and_targets_that_are_trained() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    probabilities = torch.rand(3, 5, requires_grad=True)
    ours(logits, probabilities).backward()
    expected = torch.autograd.grad(F.cross_entropy(logits, probabilities), probabilities)[0]
    assert torch.equal(probabilities.grad, expected)


# -- On CUDA, by brim's own kernel -----------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(7, 50257), (33, 1), (5, 7), (2000, 33)], ids=str)
def test_on_cuda_it_is_as_exact_as_torchs(
    shape: tuple[int, int], dtype: torch.dtype, reduction: str, in_float32: bool
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(shape, device="cuda").mul(4).to(dtype)
    target = torch.randint(0, shape[1], shape[:1], device="cuda")
    target[::4] = -100

    def found(run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = logits.to(dtype).requires_grad_()
        value = run(leaf)
        ones = torch.full_like(value, 1.5)
        return value.detach(), torch.autograd.grad(value, leaf, ones)[0]

    def torchs(x: Tensor) -> Tensor:
        wide = x.float() if in_float32 and x.dtype != torch.float64 else x
        return F.cross_entropy(wide, target, reduction=reduction)

    own = found(lambda x: loss(x, target, reduction=reduction, in_float32=in_float32), dtype)
    theirs = found(torchs, dtype)
    exact = found(torchs, torch.float64)
    for mine, other, right in zip(own, theirs, exact, strict=True):
        scale = right.abs().max().clamp_min(1e-30)
        errors = [(each.double() - right).abs().max() / scale for each in (mine, other)]
        assert mine.dtype == other.dtype or (dtype == torch.float64 and in_float32)
        assert errors[0] <= errors[1] * 1.5 + 1e-6


@pytest.mark.cuda
def test_on_cuda_rows_that_are_ignored_are_not_read() -> None:
    logits = torch.full((2, 1001), float("nan"), device="cuda")
    logits[0] = 0.0
    leaf = logits.requires_grad_()
    value = ours(leaf, torch.tensor([3, -100], device="cuda"))
    value.backward()
    torch.testing.assert_close(value.item(), math.log(1001))
    assert not leaf.grad.isnan().any()


@pytest.mark.cuda
def test_on_cuda_nothing_is_kept_of_the_logits(head: nn.Sequential) -> None:
    head.cuda()
    x = torch.randn(256, 32, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 1000, (256,), device="cuda")
    loss_of(head, x, target).backward()
    expected = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    with brim.PeakMeter("cuda") as meter:
        value = loss_of(head, x, target)
        left = meter.left
    value.backward()
    assert left < 256 * 1000 / 2
    assert all(map(torch.equal, expected, [p.grad for p in head.parameters()]))
