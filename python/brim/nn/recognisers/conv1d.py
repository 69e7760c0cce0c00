"""Hugging Face's Conv1D: a linear layer with a transposed weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brim.nn import functional
from brim.nn._compiled import asking
from brim.nn._derived import Forward, Kind, Options
from brim.nn.recognisers._recogniser import Recogniser, agree, names_in, numbers, small_copy

__all__ = ["conv1d"]


def _candidates(module: torch.nn.Module) -> Iterator[Options]:
    used = names_in(type(module), "forward")
    if (
        {"addmm", "weight", "bias", "nf"}
        <= used
        <= {"addmm", "weight", "bias", "nf", "torch"} | {"view", "size"}
        and {*module._parameters} == {"weight", "bias"}
        and not module._modules
    ):
        yield ()


def _forward(kind: Kind, options: Options) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.t(), self.bias, **asking(self._brim_recompute))

    return forward


def _agrees(module: torch.nn.Module, ours: Forward, options: Options) -> bool:
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = numbers(24, 40, dtype=dtype), numbers(40, dtype=dtype)
        copy = small_copy(module, {"weight": weight, "bias": bias}, nf=40, nx=24)
        if not agree(copy, ours, [numbers(2, 5, 24, dtype=dtype)], exact=False):
            return False
    return True


conv1d = Recogniser("Linear", _candidates, _forward, _agrees)
