"""Normalisation: the input is kept, once, and only where something needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.nn import functional
from brim.nn._elsewhere import check_arguments
from brim.nn._numbers import layer

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "LayerNorm", "RMSNorm"]


class _BatchNorm:
    _example = "2", "2, 2, 8…", "2, 2, 8…"

    def forward(self: Any, input: Tensor) -> Tensor:  # `Any`: of torch.nn too
        """The input normalised over its batch, or with the running statistics."""
        if type(input) is not Tensor:
            check_arguments("batch_norm", input)
        self._check_input_dim(input)
        training, momentum = self.training, self.momentum
        mean, variance = self.running_mean, self.running_var
        if not training:
            if mean is None and variance is None:
                training = True  # without running statistics, those of the batch
        elif not self.track_running_stats:
            mean = variance = None  # torch does not update what it does not track
        else:
            batches = self.num_batches_tracked
            if batches is not None:
                batches.add_(1)
                if momentum is None:
                    momentum = 1.0 / float(batches)
        momentum = 0.0 if momentum is None else momentum
        return functional.batch_norm(
            input, mean, variance, self.weight, self.bias, training, momentum, self.eps
        )


@layer
class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` that keeps nothing in eval() with a frozen weight."""


@layer
class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` that keeps nothing in eval() with a frozen weight."""


@layer
class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` that keeps nothing in eval() with a frozen weight."""


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` that keeps its input only where more than the bias needs it.

    Example:
        >>> import torch, brim
        >>> brim.nn.LayerNorm(4)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        """The input normalised over its last dimensions."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` that keeps its input only where more than the bias needs it.

    Example:
        >>> import torch, brim
        >>> brim.nn.GroupNorm(2, 4)(torch.ones(1, 4, 8)).shape
        torch.Size([1, 4, 8])
    """

    def forward(self, input: Tensor) -> Tensor:
        """The input normalised over groups of channels."""
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` that keeps its input once, where torch keeps two such tensors.

    Example:
        >>> import torch, brim
        >>> brim.nn.RMSNorm(4)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def forward(self, x: Tensor) -> Tensor:
        """The input divided by the root of its mean square over the last dimensions."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
