"""Layer normalisation, with the mean and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.compat.memsave_torch.nn.functional.LayerNorm import rms_norm_with, rms_normMemSave
from brim.nn import LayerNorm
from brim.nn.convert import STAND_INS

__all__ = ["MemSaveLayerNorm", "MemSaveRMSLayerNorm", "RMSLayerNorm"]


class MemSaveLayerNorm(LayerNorm):
    """`torch.nn.LayerNorm` that keeps its input only where more than the bias needs it."""

    @classmethod
    def from_nn_LayerNorm(cls, ln: torch.nn.LayerNorm) -> MemSaveLayerNorm:
        """Make one that shares the parameters of `ln`."""
        return adopt(cls, "ln", ln, torch.nn.LayerNorm)


class RMSLayerNorm(torch.nn.Module):
    """Division by the root of the mean square over the last dimension, then a learned scale.

    Sums are in float32 at least; the result has the weight's type where that is a half type.

    Example:
        >>> RMSLayerNorm(2, eps=0.0)(torch.tensor([3.0, 4.0])).pow(2).mean()
        tensor(1., grad_fn=<MeanBackward0>)
    """

    weight: Tensor

    def __init__(self, hidden_size: int | Sequence[int], eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The input, normalised."""
        return rms_norm_with(torch.nn.functional.rms_norm, hidden_states, self.weight, self.eps)


class MemSaveRMSLayerNorm(RMSLayerNorm):
    """`RMSLayerNorm` that keeps its input once."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, normalised."""
        return rms_normMemSave(x, self.weight, self.eps)

    @classmethod
    def from_existing(cls, ln: Any) -> MemSaveRMSLayerNorm:
        """Make one that shares the weight of `ln`.

        Args:
            ln: any module with `weight` and `eps`, or `variance_epsilon` as transformers has it.
        """
        made = cls(0, epsilon_of(ln))
        made.weight = ln.weight
        return made.train(ln.training)


STAND_INS[MemSaveRMSLayerNorm] = RMSLayerNorm


def epsilon_of(layer: Any) -> float:
    """What a layer of this kind adds to the mean square.

    Raises:
        TypeError: if it has neither `eps` nor `variance_epsilon`.

    Example:
        >>> epsilon_of(RMSLayerNorm(4, eps=0.5))
        0.5
    """
    for name in ("eps", "variance_epsilon"):
        value = getattr(layer, name, None)
        if value is not None:
            return float(value)
    raise TypeError(f"ln must have a number `eps` or `variance_epsilon`, got {layer!r}")
