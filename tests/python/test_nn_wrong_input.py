"""The layers without gradients, on the meta device, empty, and with what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim

from .nn_cases import IN_PLACE, REQUIRED, Case, pair, same_bits
from .nn_steps import ALL

# -- Modes and devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(case: Case, mode: Callable[[], Any]) -> None:
    ours, torchs = pair(case, torch.float32)
    with mode():
        torch.manual_seed(0)
        mine = ours(case.input(torch.float32))
        torch.manual_seed(0)
        theirs = torchs(case.input(torch.float32))
    assert same_bits(mine, theirs, case.keeps_sign_of_zero)
    assert not mine.requires_grad
    assert mine.is_inference() == theirs.is_inference()


@pytest.mark.parametrize("case", ALL)
def test_meta_device(case: Case) -> None:
    ours, torchs = (layer.to("meta") for layer in pair(case, torch.float32))
    found = []
    for layer in (ours, torchs):
        x = torch.empty(case.shape, device="meta", requires_grad=True)
        y = layer(x)
        y.backward(torch.empty_like(y))
        found.append([y.detach(), *(p.grad for p in (x, *layer.parameters()))])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()


@pytest.mark.parametrize("case", ALL)
def test_empty_batch(case: Case) -> None:
    """The same result as torch.nn, or the same kind of error."""
    found: list[Any] = []
    for layer in pair(case, torch.float32):
        shape = (0, *case.shape[1:]) if len(case.shape) > 1 else (0, *case.shape)
        x = torch.empty(shape, requires_grad=True)
        try:
            y = layer(x)
            grads = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
            found.append([y.detach(), *grads])
        except (RuntimeError, ValueError) as error:
            found.append(type(error))
    if isinstance(found[1], type):
        assert found[0] is found[1]
    else:
        for a, b in zip(*found, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_an_empty_batch_of_batch_norm(affine: bool, track: bool, training: bool) -> None:
    found = []
    for of in (nn, brim.nn):
        layer = of.BatchNorm2d(3, affine=affine, track_running_stats=track).train(training)
        x = torch.randn(0, 3, 4, 4, requires_grad=True)
        wanted = [x, *layer.parameters()]
        found.append([*torch.autograd.grad(layer(x).sum(), wanted), *layer.buffers()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


# -- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (Case("Conv1d", (), (4, 6, 3)), (2, 3, 9)),
        (Case("Conv2d", (), (4, 6, 3)), (2, 3, 9, 9)),
        (Case("Conv2d", (), (4, 6, 3)), (9, 9)),
        (Case("Conv2d", (), (4, 6, 3)), (2, 4, 2, 2)),
        (Case("Conv3d", (), (4, 6, 3)), (1, 2, 4, 5, 5, 5)),
        (Case("ConvTranspose2d", (), (4, 6, 3)), (2, 3, 9, 9)),
        (Case("Linear", (), (4, 6)), (3, 5)),
        (Case("Linear", (), (4, 6)), ()),
        (Case("BatchNorm1d", (), (4,)), (3, 4, 5, 6)),
        (Case("BatchNorm2d", (), (4,)), (3, 4, 5)),
        (Case("BatchNorm2d", (), (4,)), (3, 5, 2, 2)),
        (Case("BatchNorm2d", (), (4,)), (1, 4, 1, 1)),
        (Case("BatchNorm3d", (), (4,)), (3, 4, 5)),
        (Case("LayerNorm", (), (8,)), (3, 7)),
        (Case("LayerNorm", (), ((5, 8),)), (8,)),
        (Case("GroupNorm", (), (2, 6)), (3, 4, 5)),
        (Case("GroupNorm", (), (2, 6)), (6,)),
        (Case("RMSNorm", (), (8,)), (3, 7)),
        (Case("MaxPool1d", (), (2,)), (3,)),
        (Case("MaxPool2d", (), (2,)), (3, 4)),
        (Case("MaxPool2d", (), (5,)), (2, 3, 4, 4)),
        (Case("MaxPool2d", (), (2,), {"padding": 2}), (2, 3, 4, 4)),
        (Case("MaxPool3d", (), (2,)), (3, 4, 4)),
        (Case("AvgPool2d", (), (2,)), (3, 4)),
        (Case("AvgPool2d", (), (5,)), (2, 3, 4, 4)),
        (Case("AvgPool2d", (), (2,), {"padding": 2}), (2, 3, 4, 4)),
        (Case("AvgPool3d", (), (2,), {"divisor_override": 0}), (2, 3, 4, 4, 4)),
        (Case("AdaptiveAvgPool1d", (), (2,)), (4,)),
        (Case("AdaptiveAvgPool2d", (), (2,)), (4, 4)),
        (Case("AdaptiveAvgPool3d", (), (2,)), (3, 4, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
def test_wrong_shapes_raise_where_torch_raises(
    case: Case, shape: tuple[int, ...], needs_grad: bool
) -> None:
    ours, torchs = case.make(brim.nn, torch.float32), case.make(nn, torch.float32)
    for layer in (torchs, ours):
        layer.requires_grad_(needs_grad)
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            layer(torch.zeros(shape, requires_grad=needs_grad))


@pytest.mark.parametrize("layer", IN_PLACE)
def test_in_place_on_a_leaf_is_refused(layer: str) -> None:
    x = torch.randn(5, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        getattr(brim.nn, layer)(*REQUIRED.get(layer, ()), inplace=True)(x)
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("layer", IN_PLACE)
def test_in_place_gives_its_input_back(layer: str) -> None:
    made = getattr(brim.nn, layer)(*REQUIRED.get(layer, ()), inplace=True)
    x = torch.randn(5)
    assert made(x) is x
    hidden = torch.randn(5, requires_grad=True) * 1
    version = hidden._version
    assert made(hidden) is hidden
    assert hidden._version > version


OPTIONS = {"max": ("kernel_size", "stride", "padding", "dilation")}
OPTIONS["avg"] = OPTIONS["max"][:3]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (f"{kind}_pool{n}d", option)
        for kind, options in OPTIONS.items()
        for n in (1, 2, 3)
        for option in options
    ],
)
def test_pooling_with_a_wrong_number_of_numbers_is_refused(name: str, option: str) -> None:
    dimensions = int(name[-2])
    x = torch.zeros(2, 2, *[6] * dimensions)
    for count in {1, 2, 3, 4} - {1, dimensions}:
        numbers = (1,) * count
        options: dict[str, Any] = {"kernel_size": 2} | {option: numbers}
        with pytest.raises(RuntimeError):
            getattr(nn.functional, name)(x, **options)
        allowed = "1 number" if dimensions == 1 else f"1 or {dimensions} numbers"
        with pytest.raises(ValueError, match=f"{option} must have {allowed}, got .*1, 1") as caught:
            getattr(brim.nn.functional, name)(x, **options)
        assert str(numbers) in str(caught.value)
    kind = "AvgPool" if name.startswith("avg") else "MaxPool"
    layer = getattr(brim.nn, f"{kind}{dimensions}d")(**({"kernel_size": 2} | {option: (1,) * 4}))
    with pytest.raises(ValueError, match=f"{option} must have"):
        layer(x)


@pytest.mark.parametrize("name", [f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2)])
def test_a_convolution_with_a_wrong_number_of_numbers_is_refused(name: str) -> None:
    dimensions = int(name[-2])
    x, weight = torch.zeros(1, 2, *[6] * dimensions), torch.zeros(2, 2, *[3] * dimensions)
    options = ["stride", "padding", "dilation"] + ["output_padding"] * ("transpose" in name)
    for option in options:
        with pytest.raises(ValueError, match=rf"{option} must have .*, got \(1, 1, 1\)"):
            getattr(brim.nn.functional, name)(x, weight, **{option: [1, 1, 1]})


def test_adaptive_pooling_says_how_many_numbers_it_takes() -> None:
    x = torch.zeros(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"output_size must have 1 number and input at least 2"):
        brim.nn.functional.adaptive_avg_pool1d(x[0], (1, 1))
    with pytest.raises(ValueError, match=r"must have 1 or 2 numbers .*, got \(1, 1, 1\)"):
        brim.nn.functional.adaptive_avg_pool2d(x, (1, 1, 1))


NO_TENSORS = [None, [1.0, 2.0], 3.0, "text"]


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ALL)
def test_what_is_no_tensor_is_refused(case: Case, train: bool, value: Any) -> None:
    layer = case.make(brim.nn, torch.float32).train(train)
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"^input must be a Tensor, got .* of type {kind}$"):
        layer(value)


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh", "leaky_relu", "silu", "dropout"])
def test_what_is_no_tensor_is_refused_in_place_too(name: str, inplace: bool, value: Any) -> None:
    with pytest.raises(TypeError, match="input must be a Tensor"):
        getattr(brim.nn.functional, name)(value, inplace=inplace)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("weight", lambda f, x: f.linear(x, [1.0])),
        ("weight", lambda f, x: f.linear(x, None)),
        ("bias", lambda f, x: f.linear(x, torch.zeros(2, 4), 3)),
        ("weight", lambda f, x: f.conv1d(x, None)),
        ("weight", lambda f, x: f.conv1d(x, None, padding="same")),
        ("bias", lambda f, x: f.conv1d(x, torch.zeros(3, 2, 1), "bias")),
        ("weight", lambda f, x: f.conv_transpose1d(x, [1.0])),
        ("running_mean", lambda f, x: f.batch_norm(x, [0.0], torch.ones(2))),
        ("weight", lambda f, x: f.layer_norm(x, (4,), 1.0)),
        ("bias", lambda f, x: f.group_norm(x, 1, None, [1.0])),
        ("weight", lambda f, x: f.rms_norm(x, (4,), 1.0)),
    ],
)
def test_the_argument_that_is_no_tensor_is_named(
    argument: str, call: Callable[[Any, torch.Tensor], object]
) -> None:
    x = torch.randn(3, 2, 4)
    with pytest.raises(TypeError, match=f"^{argument} must be a Tensor"):
        call(brim.nn.functional, x)
    with pytest.raises((TypeError, AttributeError)):
        call(nn.functional, x)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("recompute", lambda f, x: f.linear(x, torch.zeros(3, 4), recompute="cheap")),
        ("runs_again", lambda f, x: f.linear(x, torch.zeros(3, 4), runs_again="products")),
        ("runs_again", lambda f, x: f.conv1d(x, torch.zeros(3, 2, 1), runs_again="yes")),
        ("recompute", lambda f, x: f.relu(x, recompute="cheap")),
    ],
)
def test_the_argument_that_is_no_bool_is_named(
    argument: str, call: Callable[[Any, torch.Tensor], object]
) -> None:
    with pytest.raises(TypeError, match=rf"^{argument} must be a bool, got .* of type \w+$"):
        call(brim.nn.functional, torch.randn(3, 2, 4))


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        brim.nn.functional.linear(torch.zeros(2, 3), torch.zeros(2, 4))
