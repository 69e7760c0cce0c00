"""Gradients of brim.nn against finite differences, in float64; first and second order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.func import functional_call

import brim

from .nn_cases import CASES, IN_PLACE, ONE_OF_EACH, REQUIRED, Case, pair

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
    [Case(name, (3, 5), REQUIRED.get(name, ()), {"inplace": True}) for name in IN_PLACE],
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


def second_gradients(net: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Of the sum of the input's gradient; empty where that needs none itself."""
    torch.manual_seed(0)  # dropout
    trained = [p for p in net.parameters() if p.requires_grad]
    (first,) = torch.autograd.grad(net(x * 1.0).sum(), x, create_graph=True)
    if not first.requires_grad:
        return []
    return list(torch.autograd.grad(first.sum(), [x, *trained], allow_unused=True))


SECOND = [
    # torch has no second derivative of Hardsigmoid.
    *(SMALL.get(c.layer, c) for c in ONE_OF_EACH if c.layer != "Hardsigmoid"),
    Case("AdaptiveAvgPool2d", (1, 2, 5, 6), (1,)),
    Case("BatchNorm2d", (2, 2, 3, 3), (2,), train=False),
    Case("Conv2d", (1, 2, 5, 6), (2, 3, 3), {"padding": 1, "padding_mode": "reflect"}),
    Case("Conv2d", (1, 2, 5, 6), (2, 3, 3), {"padding": 1, "padding_mode": "replicate"}),
    Case("Conv2d", (1, 2, 5, 6), (2, 3, 3), {"padding": 1, "padding_mode": "circular"}),
]


# From 2.15 on torch gives them for GroupNorm's bias, too.
ZEROS_FOR_BIAS = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)


@pytest.mark.parametrize("case", SECOND, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_second_gradients_are_there_where_torch_gives_zeros(case: Case, frozen: bool) -> None:
    ours, torchs = (m.requires_grad_(not frozen) for m in pair(case, torch.float64))
    x = case.input(torch.float64).requires_grad_()
    found, expected = second_gradients(ours, x), second_gradients(torchs, x)
    for a, b in zip(found, expected, strict=True):
        if a is None and b is not None and ZEROS_FOR_BIAS and case.layer == "GroupNorm":
            assert not b.any()
            continue
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("recompute", [None, "cheap"])
def test_a_gradient_penalty_reaches_every_parameter_that_torch_reaches(
    recompute: str | None,
) -> None:
    torch.manual_seed(0)
    torchs = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 8, 3), torch.nn.LeakyReLU(0.2), torch.nn.Conv2d(8, 8, 3)),
        *(torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 8, 1), torch.nn.Hardtanh()),
        *(torch.nn.BatchNorm2d(8), torch.nn.ReLU6(), torch.nn.Conv2d(8, 8, 1)),
        *(torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 1)),
    ).double()
    ours = copy.deepcopy(torchs)
    brim.convert(ours, recompute=recompute)
    grads = []
    for net in (ours, torchs):
        x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.manual_seed(1))
        (slope,) = torch.autograd.grad(net(x.requires_grad_()).sum(), x, create_graph=True)
        (slope.flatten(1).norm(dim=1) - 1).pow(2).mean().backward()
        grads.append([p.grad for p in net.parameters()])
    assert [g is None for g in grads[0]] == [g is None for g in grads[1]]
    for a, b in zip(*grads, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b)
