"""Functions that run again in backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional
from torch import Tensor

import brim
import brim.nn.functional as F  # noqa: N812

from .nn_cases import FLOATS
from .nn_functions import assert_same, run
from .nn_kept import really_held

GPU = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ["cpu", GPU]


Call = Callable[..., Tensor]


def parts(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(x.exp() * scale) * x + scale.square()


@pytest.mark.parametrize("device", DEVICES)
def test_rerun_is_the_function(device: str) -> None:
    for dtype in FLOATS:
        inputs = [
            torch.randn(4, 8, device=device).to(dtype),
            torch.randn(8, device=device).to(dtype),
        ]
        for needs in ([True, True], [True, False], [False, True]):
            ours = run(lambda *args: F.rerun(parts, *args), inputs, needs)
            assert_same(ours, run(parts, inputs, needs), f"{dtype} {needs}")


def test_rerun_keeps_its_inputs() -> None:
    x = torch.randn(64, 512, requires_grad=True)
    scale = torch.randn(512, requires_grad=True)
    assert really_held(lambda: F.rerun(parts, x.clone(), scale).sum()) == x.nbytes
    assert really_held(lambda: parts(x.clone(), scale).sum()) >= 3 * x.nbytes


def test_rerun_runs_under_the_autocast_of_forward() -> None:
    weight = torch.randn(8, 8)

    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight) * x

    x = torch.randn(4, 8)

    def under_autocast(call: Call) -> Call:
        def run_it(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return call(x)

        return run_it

    ours = run(under_autocast(lambda x: F.rerun(function, x)), [x], [True])
    assert_same(ours, run(under_autocast(function), [x], [True]))
    assert not torch.is_autocast_enabled("cpu")


def test_rerun_finds_gradients_that_would_be_lost() -> None:
    x, hidden = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    output = F.rerun(lambda x: x * hidden.exp(), x)
    with pytest.raises(RuntimeError, match="not one of its inputs"):
        output.sum().backward()
    plain = F.rerun(lambda x: x * hidden.exp(), x.detach())  # nothing of ours: the plain function
    plain.sum().backward()
    assert hidden.grad is not None


def test_rerun_passes_errors_on() -> None:
    calls: Iterator[int] = itertools.count()

    def fails_later(x: Tensor) -> Tensor:
        if next(calls) > 0:
            raise KeyError("later")
        return x * 2

    output = F.rerun(fails_later, torch.randn(4, requires_grad=True))
    with pytest.raises(KeyError, match="later"):
        output.sum().backward()
    with pytest.raises(ValueError, match="at least one input"):
        F.rerun(lambda: torch.zeros(1))


def test_rerun_gives_its_value_again() -> None:
    linear = brim.nn.Linear(32, 8)
    linear.recompute = True
    x = torch.randn(16, 32, requires_grad=True)

    def call() -> Tensor:
        return linear(F.rerun(lambda x: x * x.sigmoid(), x)).sum()

    assert really_held(call) == 0
    call().backward()
    reference = torch.nn.functional.linear(x * x.sigmoid(), linear.weight, linear.bias).sum()
    expected = torch.autograd.grad(reference, [x, linear.weight])
    assert_same([x.grad, linear.weight.grad], list(expected))
