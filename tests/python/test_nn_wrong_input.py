"""The layers without gradients, on the meta device, empty, and with what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim

from .nn_cases import Case, pair, same_bits
from .nn_steps import ALL, WITH_WEIGHTS

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


# -- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=["c64", "c128"])
@pytest.mark.parametrize("case", ALL)
def test_complex_input_is_refused(case: Case, dtype: torch.dtype) -> None:
    layer, _ = pair(case, torch.float32)
    x = torch.zeros(case.shape, dtype=dtype, requires_grad=True)
    with pytest.raises(TypeError, match=r"float|floating"):
        layer(x)


@pytest.mark.parametrize("case", WITH_WEIGHTS)
def test_whole_numbers_are_refused(case: Case) -> None:
    layer, _ = pair(case, torch.float32)
    with pytest.raises(TypeError, match=r"float|floating"):
        layer(torch.zeros(case.shape, dtype=torch.int64))


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


@pytest.mark.parametrize("layer", ["ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "SiLU", "Dropout"])
def test_in_place_on_a_leaf_is_refused(layer: str) -> None:
    x = torch.randn(5, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        getattr(brim.nn, layer)(inplace=True)(x)
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("layer", ["ReLU", "LeakyReLU", "Hardtanh", "SiLU", "Dropout"])
def test_in_place_gives_its_input_back(layer: str) -> None:
    made = getattr(brim.nn, layer)(inplace=True)
    x = torch.randn(5)
    assert made(x) is x
    hidden = torch.randn(5, requires_grad=True) * 1
    version = hidden._version
    assert made(hidden) is hidden
    assert hidden._version > version
