"""What the CPU's kernels allocate inside: a table by operator, with the reason of each entry."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import _ConvBackend

aten = torch.ops.aten


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class CpuTemporaries:
    """Nothing beyond outputs for most operators; those that differ are listed.

    Workspaces of oneDNN were measured on aarch64, where torch allocates them; on x86_64 oneDNN
    takes its own, which no figure of brim counts.
    """

    def __init__(self) -> None:
        """Make the table."""
        self.assumptions: tuple[str, ...] = ()
        self._onednn = platform.machine() == "aarch64"
        self._table: dict[Any, Callable[[Any, list[torch.Tensor]], int]] = {
            aten.convolution.default: self._convolution,
            aten.convolution_backward.default: self._convolution_backward,
            aten.mse_loss.default: self._mean_loss,
            aten.native_batch_norm_backward.default: self._first,
        }

    def of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], backward: bool
    ) -> Iterable[tuple[int, bool]]:
        """Bytes, and whether they stay allocated, for one call of an operator."""
        rule = self._table.get(func)
        size = 0 if rule is None or not outputs else rule(args, outputs)
        return ((size, False),) if size > 0 else ()

    # The losses of single elements, before their mean.
    def _mean_loss(self, args: Any, outputs: list[torch.Tensor]) -> int:
        return _bytes(args[0]) if outputs[0].dim() == 0 else 0

    # The gradient centred, before it is scaled.
    def _first(self, args: Any, outputs: list[torch.Tensor]) -> int:
        return _bytes(args[0]) if self._onednn else 0

    # Transposed input and weight, later twice the output; without oneDNN the unfolded input.
    def _convolution(self, args: Any, outputs: list[torch.Tensor]) -> int:
        x, weight, out = args[0], args[1], outputs[0]
        backend = _backend(x, weight, args[2], *args[3:])
        if backend == _ConvBackend.Slow2d:
            return _unfolded(x, weight, out, args[3]) * x.size(0)
        if backend != _ConvBackend.Mkldnn or not self._onednn or args[8] > 1:
            return 0
        return max(_bytes(x) + _bytes(weight), 2 * _bytes(out))

    # Each thread unfolds one sample at a time, and sums up its own part of the weight's gradient.
    def _convolution_backward(self, args: Any, outputs: list[torch.Tensor]) -> int:
        grad, x, weight = args[0], args[1], args[2]
        backend = _backend(x, weight, None, *args[4:])
        unfolded = _unfolded(x, weight, grad, args[4])
        if backend == _ConvBackend.Slow2d:
            return unfolded * x.size(0)
        if backend != _ConvBackend.Mkldnn or not self._onednn or args[9] > 1:
            return 0
        threads = min(torch.get_num_threads(), x.size(0))
        parts = 4 * _bytes(weight)
        return threads * (unfolded if unfolded > 2 * parts else unfolded + parts)


def _unfolded(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stride: Any) -> int:
    """Bytes of one sample unfolded; a 1x1 convolution needs none."""
    taps = math.prod(weight.shape[2:])
    if taps == 1 and all(step == 1 for step in stride):
        return 0
    return weight.size(1) * taps * math.prod(out.shape[2:]) * x.element_size()


def _backend(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any) -> Any:
    transposed, output_padding, groups = rest[:3]
    return torch._C._select_conv_backend(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, None
    )
