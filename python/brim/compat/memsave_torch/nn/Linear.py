"""The linear layer."""

from __future__ import annotations

import sys
from typing import Any

import torch

from brim.compat.memsave_torch.nn._adopt import adopt
from brim.nn import Linear

__all__ = ["MemSaveLinear"]


class MemSaveLinear(Linear):
    """`torch.nn.Linear` that keeps its input only where the weight needs a gradient."""

    @classmethod
    def from_nn_Linear(cls, linear: Any) -> MemSaveLinear:
        """Make one that shares the parameters of `linear`.

        Args:
            linear: a `torch.nn.Linear`, or a `transformers.Conv1D`, whose weight is the other way
                round: the new weight is a parameter of its own over the same memory.
        """
        if not _is_transformers_conv1d(linear):
            return adopt(cls, "linear", linear, torch.nn.Linear)
        weight = linear.weight
        inputs, outputs = weight.shape
        made = cls(inputs, outputs, bias=linear.bias is not None, device="meta")
        made.weight = torch.nn.Parameter(weight.detach().T, requires_grad=weight.requires_grad)
        made.bias = linear.bias
        return made.train(linear.training)


def _is_transformers_conv1d(layer: object) -> bool:
    """Whether it is one, without importing transformers."""
    module = sys.modules.get("transformers.pytorch_utils")
    return module is not None and isinstance(layer, module.Conv1D)
