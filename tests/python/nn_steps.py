"""A small network and one training step, for the tests that layers work with the rest of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim

from .nn_cases import ONE_OF_EACH, cotangent_of

ALL = [pytest.param(case, id=case.layer) for case in ONE_OF_EACH]
WITH_WEIGHTS = [pytest.param(case, id=case.layer) for case in ONE_OF_EACH if len(case.needs()) > 1]

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def small_net(of: Any = brim.nn) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        of.Conv2d(3, 4, 3, padding=1),
        of.BatchNorm2d(4),
        of.ReLU(inplace=True),
        of.MaxPool2d(2),
        of.Conv2d(4, 4, 3),
        of.GELU(),
        of.Dropout(0.2),
        of.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        of.Linear(4, 2),
    )


def step(
    net: nn.Module, x: torch.Tensor, call: Callable[..., torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The loss, and the gradients of the input and of all parameters."""
    x = x.detach().clone().requires_grad_()
    net.zero_grad()
    torch.manual_seed(5)
    y = net(x) if call is None else call(x)
    y.backward(cotangent_of(y, "contiguous"))
    grads = [p.grad for p in (x, *net.parameters()) if p.grad is not None]
    assert grads
    return [y.detach(), *(g.clone() for g in grads)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
