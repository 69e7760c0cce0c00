"""Runs a function of brim.nn and its reference, and compares values and gradients bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .nn_cases import same_bits


def run(call: Callable[..., Tensor], inputs: list[Tensor], needs: list[bool]) -> list[Tensor]:
    """The value and the gradients."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    output = call(*leaves)
    torch.manual_seed(1)
    output.backward(torch.randn(output.shape).to(output))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_same(ours: list[Tensor], torchs: list[Tensor], what: str = "") -> None:
    assert len(ours) == len(torchs), what
    for index, (a, b) in enumerate(zip(ours, torchs, strict=True)):
        assert same_bits(a, b), (what, index, (a.double() - b.double()).abs().max())
        assert a.stride() == b.stride(), (what, index)
