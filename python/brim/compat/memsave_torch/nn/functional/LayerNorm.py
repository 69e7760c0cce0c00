"""Layer normalisation as functions, with the mean and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from brim.nn import functional

__all__ = ["layer_normMemSave", "rms_normMemSave"]


def layer_normMemSave(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """As `torch.nn.functional.layer_norm`."""
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_normMemSave(input: Tensor, weight: Tensor, eps: float = 1e-05) -> Tensor:
    """Division by the root of the mean square over the last dimension, times the weight.

    Example:
        >>> rms_normMemSave(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0)
        tensor([0.8485, 1.1314])
    """
    return rms_norm_with(functional.rms_norm, input, weight, eps)


def rms_norm_with(norm: Callable[..., Tensor], x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with a given function for the case of one type and a weight of one dimension.

    Otherwise as transformers does it: in float32, then to the weight's type if that is a half type.
    """
    shape = (x.size(-1),)
    if weight.dim() == 1 and weight.dtype == x.dtype:
        return norm(x, shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    normalised = norm(x.to(wide), shape, None, eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalised = normalised.to(weight.dtype)
    return weight * normalised
