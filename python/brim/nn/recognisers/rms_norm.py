"""RMS normalisation that calculates in float32, as the models of Hugging Face write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brim.nn import functional
from brim.nn._derived import Forward, Kind, Options
from brim.nn.recognisers._recogniser import Recogniser, agree, names_in, numbers, small_copy, words

__all__ = ["rms_norm"]

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_WORDS = words(
    """
    torch Tensor float float32 float16 bfloat16 to dtype type type_as size shape pow square mul
    mean rsqrt weight scale with_scale norm _norm
    """
).union(_EPS)
"""What the code may name: then it depends on the input, the weight and eps alone."""

_LOW = (torch.bfloat16, torch.float16)


def _candidates(module: torch.nn.Module) -> Iterator[Options]:
    """eps, the offset of the weight, whether to cast before it, and the types of input and weight.

    How the types go together differs too much to tell from the code; see `_agrees`.
    """
    names = names_in(type(module), "forward", "_norm", "norm")
    eps = [name for name in _EPS if isinstance(module.__dict__.get(name), float)]
    weights = [*module._parameters.items()]
    if (
        len(eps) != 1
        or [name for name, _ in weights] not in ([], ["weight"])
        or any(weight is not None and weight.ndim != 1 for _, weight in weights)
        or not {"rsqrt", "mean"} <= names <= _WORDS
        or module._modules
        or module._buffers
    ):
        return
    for types in (_ALL, _EQUAL, _FLOAT):
        for offset in (0.0, 1.0):
            for cast_first in (True, False):
                yield eps[0], offset, cast_first, types


_FLOAT = ((torch.float32, torch.float32),)
_EQUAL = (*_FLOAT, *((low, low) for low in _LOW))
_ALL = (*_EQUAL, *((low, torch.float32) for low in _LOW))


def _forward(kind: Kind, options: Options) -> Forward:
    eps, offset, cast_first, types = options
    known = frozenset(types)
    work = kind.forward

    def forward(self: Any, input: Tensor) -> Any:
        weight = getattr(self, "weight", None)
        of_weight = input.dtype if weight is None else weight.dtype
        is_whole = weight is None or weight.shape == input.shape[-1:]
        if not is_whole or (input.dtype, of_weight) not in known:
            return work(self, input)
        run = functional.float32_rms_norm
        return run(input, weight, getattr(self, eps), offset, cast_first)

    return forward


def _agrees(module: torch.nn.Module, ours: Forward, options: Options) -> bool:
    for of_input, of_weight in options[3]:
        weight = numbers(64, scale=2.0, dtype=of_weight)
        copy = small_copy(module, dict.fromkeys(module._parameters, weight))
        scales = torch.tensor([1e-4, 1e-2, 1.0, 30.0], device="cpu").repeat(6)[:, None]
        x = (numbers(24, 64) * scales).to(of_input)
        if not agree(copy, ours, [x, x.reshape(2, 3, 4, 64)], exact=False):
            return False
    return True


rms_norm = Recogniser("RMSNorm", _candidates, _forward, _agrees)
