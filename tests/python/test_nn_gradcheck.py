"""Gradients of brim.nn against finite differences, in float64; first and second order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.func import functional_call

import brim

from .nn_cases import CASES, ONE_OF_EACH, Case

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

# Each option once: one and three dimensions differ from two in shape only.
MAIN = [
    case
    for case in CASES
    if not case.inplace
    and not case.layer.endswith(("1d", "3d"))
    and case.shape
    and len(case.shape) < 5
]
SMALL = {
    "Conv3d": Case("Conv3d", (1, 2, 4, 3, 4), (2, 2, 2)),
    "ConvTranspose3d": Case("ConvTranspose3d", (1, 2, 2, 3, 2), (2, 2, 2)),
    "Conv1d": Case("Conv1d", (2, 2, 5), (2, 3, 3)),
    "ConvTranspose1d": Case("ConvTranspose1d", (2, 2, 3), (2, 3, 3)),
    "Conv2d": Case("Conv2d", (2, 2, 4, 5), (2, 3, 3)),
    "ConvTranspose2d": Case("ConvTranspose2d", (2, 2, 3, 4), (2, 3, 2)),
    "GroupNorm": Case("GroupNorm", (2, 4, 3), (2, 4)),
    "LayerNorm": Case("LayerNorm", (3, 5), (5,)),
    "Linear": Case("Linear", (3, 4), (4, 2)),
    "Dropout": Case("Dropout", (5, 7), (0.3,)),
    "BatchNorm1d": Case("BatchNorm1d", (3, 2, 4), (2,)),
    "BatchNorm3d": Case("BatchNorm3d", (2, 2, 2, 3, 2), (2,)),
    "BatchNorm2d": Case("BatchNorm2d", (2, 2, 3, 3), (2,)),
    "MaxPool3d": Case("MaxPool3d", (1, 2, 4, 4, 4), (2,)),
    "AvgPool3d": Case("AvgPool3d", (1, 2, 4, 4, 4), (2,)),
    "AdaptiveAvgPool3d": Case("AdaptiveAvgPool3d", (1, 2, 4, 4, 4), (3,)),
    "MaxPool2d": Case("MaxPool2d", (1, 2, 5, 6), (3, 2, 1)),
    "AvgPool2d": Case("AvgPool2d", (1, 2, 5, 6), (3, 2, 1)),
    "AdaptiveAvgPool2d": Case("AdaptiveAvgPool2d", (1, 2, 5, 6), (3,)),
}


def function_of(case: Case) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """The layer as a function of its input and parameters."""
    layer = case.make(brim.nn, torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    buffers = dict(layer.named_buffers())

    def function(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        torch.manual_seed(0)  # dropout
        state = dict(zip(names, parameters, strict=True)) | {
            name: buffer.clone() for name, buffer in buffers.items()
        }
        # In place is for a tensor that is nobody's leaf.
        output = functional_call(layer, state, (x.clone() if case.inplace else x,), case.forward)
        return output[0] if isinstance(output, tuple) else output

    x = case.input(torch.float64).requires_grad_()
    return function, (x, *(p.detach().clone().requires_grad_() for p in layer.parameters()))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [SMALL.get(c.layer, c) for c in ONE_OF_EACH], ids=str)
def test_the_whole_jacobian(case: Case) -> None:
    function, inputs = function_of(case)
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_gradients_by_option(case: Case) -> None:
    function, inputs = function_of(case)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "case",
    [
        Case("ReLU", (3, 5), (), {"inplace": True}),
        Case("ReLU6", (3, 5), (), {"inplace": True}),
        Case("LeakyReLU", (3, 5), (), {"inplace": True}),
        Case("Hardtanh", (3, 5), (), {"inplace": True}),
        Case("SiLU", (3, 5), (), {"inplace": True}),
        Case("Dropout", (3, 5), (0.3,), {"inplace": True}),
    ],
    ids=str,
)
def test_layers_that_work_in_place(case: Case) -> None:
    function, inputs = function_of(case)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("case", [SMALL.get(c.layer, c) for c in ONE_OF_EACH] + MAIN, ids=str)
def test_double_backward(case: Case) -> None:
    function, inputs = function_of(case)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "case",
    [
        Case("Conv2d", (2, 2, 4, 5), (2, 3, 3)),
        Case("ConvTranspose2d", (2, 2, 3, 4), (2, 3, 2)),
        Case("Linear", (3, 4), (4, 2)),
        Case("BatchNorm2d", (2, 2, 3, 3), (2,)),
        Case("BatchNorm2d", (2, 2, 3, 3), (2,), train=False),
        Case("LayerNorm", (3, 5), (5,)),
        Case("GroupNorm", (2, 4, 3), (2, 4)),
        Case("RMSNorm", (3, 5), (5,)),
    ],
    ids=str,
)
def test_double_backward_with_frozen_weights(case: Case) -> None:
    """The input's gradient takes another way where the weight needs none."""
    function, (x, *parameters) = function_of(case)
    frozen = [p.detach() for p in parameters]
    assert torch.autograd.gradcheck(lambda x: function(x, *frozen), (x,))
    assert torch.autograd.gradgradcheck(lambda x: function(x, *frozen), (x,))


def test_double_backward_through_a_chain() -> None:
    """A consumer keeps the ReLU's output, so the ReLU has dropped its bits."""
    net = torch.nn.Sequential(
        brim.nn.Conv2d(2, 2, 2), brim.nn.ReLU(), brim.nn.Conv2d(2, 2, 2), brim.nn.MaxPool2d(2)
    ).double()
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(net, (x,))
