"""`brim.nn.functional.linear_cross_entropy`: the plain form's values and gradients, in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import brim

ours = brim.nn.functional.linear_cross_entropy
ROWS, FEATURES, CLASSES = 150, 16, 300


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(0, CLASSES, (ROWS,))
    target[::7] = -100
    return {
        "input": torch.randn(ROWS, FEATURES).to(dtype).requires_grad_(),
        "linear_weight": torch.randn(CLASSES, FEATURES).to(dtype).requires_grad_(),
        "linear_bias": torch.randn(CLASSES).to(dtype).requires_grad_(),
        "weight": torch.rand(CLASSES).to(dtype),
        "target": target,
    }


def plain(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    in_float32: bool = False,
    **options: Any,
) -> Tensor:
    logits = F.linear(input, linear_weight, linear_bias) * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits.float() if in_float32 else logits, target, **options)


def results(function: Any, given: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """The loss and the gradients of what is trained, for a gradient that is not 1."""
    loss = function(**given, **options)
    trained = [each for each in given.values() if each.requires_grad]
    grad = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view_as(loss)
    return [loss.detach(), *torch.autograd.grad(loss, trained, grad)]


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "smoothing": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 5},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.25},
    "all": {"label_smoothing": 0.2, "softcap": 3.0, "scale": 0.5},
}


@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_plain_form(name: str, weighted: bool, reduction: str, chunk: int | None) -> None:
    given = tensors()
    if "ignore_index" in OPTIONS[name]:
        given["target"].masked_fill_(given["target"] == -100, 5)
    if not weighted:
        del given["weight"]
    options = OPTIONS[name] | {"reduction": reduction}
    own = results(ours, given, chunk=chunk, **options)
    torch.testing.assert_close(own, results(plain, given, **options))


@pytest.mark.parametrize("trained", ["input", "linear_weight", "linear_bias"])
@pytest.mark.parametrize("chunk", [None, 1, 149])
def test_only_one_is_trained(trained: str, chunk: int | None) -> None:
    given = tensors()
    for name, each in given.items():
        each.requires_grad_(name == trained)
    torch.testing.assert_close(results(ours, given, chunk=chunk), results(plain, given))


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_no_less_exact(dtype: torch.dtype, in_float32: bool) -> None:
    given = tensors(dtype)
    del given["weight"]
    target = given.pop("target")
    wide = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    exact = results(plain, wide | {"target": target})
    given["target"] = target
    for chunk in (None, 40):
        own = results(ours, given, chunk=chunk, in_float32=in_float32)
        torchs = results(plain, given, in_float32=in_float32)
        for mine, other, right in zip(own, torchs, exact, strict=True):
            assert mine.dtype == other.dtype
            scale = right.abs().max()
            errors = [(each.double() - right).abs().max() / scale for each in (mine, other)]
            assert errors[0] <= 2 * errors[1] + torch.finfo(mine.dtype).eps


def test_the_peak_and_what_is_kept() -> None:
    torch.manual_seed(0)
    rows, classes = 512, 8192
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(classes, 8, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    logits = rows * classes * 4
    with brim.PeakMeter("cpu") as meter:
        loss = ours(hidden, weight, target, chunk=32)
        left = meter.left
        loss.backward()
    assert left <= 3 * rows * 8
    assert meter.peak < logits
    with brim.PeakMeter("cpu") as meter:
        plain(hidden, weight, target).backward()
    assert meter.peak >= 2 * logits


def test_parts_follow_the_memory_that_is_free() -> None:
    torch.manual_seed(0)
    rows, classes = 2048, 16384
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(classes, 8, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    expected = ours(hidden, weight, target, chunk=512)
    expected.backward()
    grad, hidden.grad = hidden.grad, None
    with brim.budget(brim.memory_stats("cpu").allocated + 640 * 2**20, "cpu"):
        with pytest.raises(torch.OutOfMemoryError):
            plain(hidden, weight, target).backward() or hidden.new_empty(160 * 2**20)
        hidden.grad = None
        loss = ours(hidden, weight, target)
        loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, grad)


def test_autocast() -> None:
    given = tensors(torch.float32)
    del given["weight"]

    def torchs(**arguments: Any) -> Tensor:
        return plain(**arguments, in_float32=True)

    with torch.autocast("cpu", torch.bfloat16):
        own, expected = results(ours, given), results(torchs, given)
    assert [each.dtype for each in own] == [torch.float32] * 4
    torch.testing.assert_close(own, expected, rtol=2e-2, atol=2e-3)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3).double(), torch.randn(5, 3).double()
    target = torch.tensor([0, 4, -100, 2])
    torch.autograd.gradgradcheck(
        lambda x, w: ours(x, w, target, chunk=2, softcap=2.0),
        (x.requires_grad_(), weight.requires_grad_()),
    )


def test_other_forms_and_transforms() -> None:
    given = tensors()
    x, weight = given["input"].detach(), given["linear_weight"].detach()
    shares = torch.rand(ROWS, CLASSES).double().softmax(1)
    torch.testing.assert_close(ours(x, weight, shares), plain(x, weight, shares))
    one = torch.tensor(3)
    torch.testing.assert_close(ours(x[0], weight, one), plain(x[0], weight, one))
    target = given["target"]
    torch.testing.assert_close(
        torch.func.grad(lambda x: ours(x, weight, target))(x),
        torch.func.grad(lambda x: plain(x, weight, target))(x),
    )
    compiled = torch.compile(lambda x: ours(x, weight, target), backend="aot_eager")
    torch.testing.assert_close(compiled(x), plain(x, weight, target))


def test_grads_are_added_and_backward_runs_twice() -> None:
    given = tensors()
    loss = ours(given["input"], given["linear_weight"], given["target"], chunk=50)
    loss.backward(retain_graph=True)
    once = given["linear_weight"].grad.clone()
    loss.backward()
    torch.testing.assert_close(given["linear_weight"].grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_wrong_arguments() -> None:
    given = tensors()
    x, weight, target = given["input"], given["linear_weight"], given["target"]
    with pytest.raises(ValueError, match="chunk must be a positive number of rows, got 0"):
        ours(x, weight, target, chunk=0)
    with pytest.raises(ValueError, match=r"softcap must be positive, got -1\.0"):
        ours(x, weight, target, softcap=-1.0)
    with pytest.raises(ValueError, match="median"):
        ours(x, weight, target, reduction="median")
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        ours(x, weight, torch.full((ROWS,), CLASSES))
    with pytest.raises(TypeError, match="options are those of torch's function"):
        ours(x, weight, target, options=object(), chunk=3)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="from torch 2.13 on")
def test_torchs_options_are_torchs() -> None:
    given = tensors(torch.float32)
    x, weight, target = given["input"], given["linear_weight"], given["target"]
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    expected = F.linear_cross_entropy(x, weight, target, options=options)  # type: ignore[attr-defined]
    torch.testing.assert_close(ours(x, weight, target, options=options), expected)
    torch.testing.assert_close(ours(x, weight, target), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk", [None, 40])
def test_on_cuda(name: str, chunk: int | None) -> None:
    given = {n: t.detach().cuda().requires_grad_(t.requires_grad) for n, t in tensors().items()}
    del given["weight"]
    if "ignore_index" in OPTIONS[name]:
        given["target"].masked_fill_(given["target"] == -100, 5)
    own = results(ours, given, chunk=chunk, **OPTIONS[name])
    torch.testing.assert_close(own, results(plain, given, **OPTIONS[name]))
