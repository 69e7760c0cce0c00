"""Linear: the input is kept only where the weight needs a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from brim.nn import functional

__all__ = ["Linear"]


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` that keeps its input only where the weight needs a gradient.

    Under autocast, a frozen weight is cast again in backward and no low-precision copy is kept.

    Attributes:
        recompute: keep no input where the layer before can recompute it in backward.
        runs_again: run again in backward for the next layer, which then does not keep the output,
            if that is larger than the input.

    Example:
        >>> import torch, brim
        >>> layer = brim.nn.Linear(3, 4)
        >>> layer(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """

    recompute: bool = False
    runs_again: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """The input times the weight, plus the bias."""
        return functional.linear(
            input,
            self.weight,
            self.bias,
            recompute=self.recompute,
            runs_again=self.runs_again,
        )
