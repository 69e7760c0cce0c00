"""What the CPU's kernels allocate inside: a table by operator, with the reason of each entry."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable
from typing import Any

import torch

from brim.foresee._temporaries import Temporary

aten = torch.ops.aten
_Backend: Any = torch._C._ConvBackend  # type: ignore[attr-defined]


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
        attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        self._table: dict[Any, Callable[..., Any]] = {
            aten.convolution.default: self._convolution,
            aten.convolution_backward.default: self._convolution_backward,
            aten.mse_loss.default: self._mean_loss,
            aten.native_batch_norm_backward.default: self._first,
            aten.addmm.default: self._weight,
            aten.mkldnn_rnn_layer.default: self._rnn,
            aten.mkldnn_rnn_layer_backward.default: self._rnn_backward,
            aten._scaled_dot_product_flash_attention_for_cpu.default: self._attention,
            attention_backward: self._attention_backward,
        }

    def of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], backward: bool
    ) -> Iterable[Temporary]:
        """What one call of an operator takes."""
        rule = self._table.get(func)
        size = 0 if rule is None or not outputs else rule(args, outputs)
        return (Temporary(size),) if size > 0 else ()

    # The losses of single elements, before their mean.
    def _mean_loss(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return _bytes(args[0]) if outputs[0].dim() == 0 else 0

    # The gradient centred, before it is scaled.
    def _first(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return _bytes(args[0]) if self._onednn else 0

    # oneDNN's layout of the weight.
    def _weight(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return _bytes(args[2]) if self._onednn else 0

    # Scores, maxima, sums and outputs of one block, for each thread.
    def _attention(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        rows, columns = _block(args[0], args[1])
        return 4 * torch.get_num_threads() * rows * (columns + 2 + args[0].size(-1))

    def _attention_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        rows, columns = _block(args[1], args[2])
        return 4 * torch.get_num_threads() * 2 * rows * columns

    # oneDNN's layout of the weights, and the gates of all steps.
    def _rnn(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return sum(_bytes(weight) for weight in args[1:5]) + int(4.25 * _rnn_outputs(args))

    def _rnn_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return sum(_bytes(weight) for weight in args[1:5]) + int(5.25 * _rnn_outputs(args))

    # Transposed input and weight, later twice the output; without oneDNN the unfolded input.
    def _convolution(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        x, weight, out = args[0], args[1], outputs[0]
        backend = _backend(x, weight, args[2], *args[3:])
        if backend == _Backend.Slow2d:
            return _unfolded(x, weight, out, args[3]) * x.size(0)
        if backend != _Backend.Mkldnn or not self._onednn or args[8] > 1:
            return 0
        return max(_bytes(x) + _bytes(weight), 2 * _bytes(out))

    # Each thread unfolds one sample at a time, and sums up its own part of the weight's gradient.
    def _convolution_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        grad, x, weight = args[0], args[1], args[2]
        backend = _backend(x, weight, None, *args[4:])
        unfolded = _unfolded(x, weight, grad, args[4])
        if backend == _Backend.Slow2d:
            return unfolded * x.size(0)
        if backend != _Backend.Mkldnn or not self._onednn or args[9] > 1:
            return 0
        threads = min(torch.get_num_threads(), x.size(0))
        parts = 4 * _bytes(weight)
        others = unfolded + parts if unfolded <= 2 * parts else unfolded - 5 * _bytes(weight)
        return unfolded + parts + (threads - 1) * others


def _block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the scores that a thread works on at once, as torch chooses them."""
    length = query.size(-2)
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.size(-2))


def _rnn_outputs(args: Any) -> int:
    """Bytes of an LSTM layer's outputs in all steps."""
    x, hidden = args[0], args[5]
    return int(x.size(0) * x.size(1) * hidden.size(-1) * x.element_size())


def reserved_by_onednn_rnn(args: Any) -> int:
    """What oneDNN's LSTM keeps for backward, found by measuring eight shapes (within 2 %)."""
    x, hidden = args[0], args[5]
    if not args[15]:  # not training
        return 0
    per_step = x.size(1) * x.element_size()
    widest = max(x.size(2), hidden.size(-1))
    steps = x.size(0) * (9 * hidden.size(-1) + 6.25 * widest)
    return int(per_step * (steps + 10 * hidden.size(-1)))


def _unfolded(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stride: Any) -> int:
    """Bytes of one sample unfolded; a 1x1 convolution needs none."""
    taps = math.prod(weight.shape[2:])
    if taps == 1 and all(step == 1 for step in stride):
        return 0
    return weight.size(1) * taps * math.prod(out.shape[2:]) * x.element_size()


def _backend(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> Any:
    transposed, output_padding, groups = rest[:3]
    return torch._C._select_conv_backend(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, None
    )
