"""What CUDA's kernels allocate inside: a table by operator, with the reason of each entry.

The rules were found on an H200 with torch 2.11 by measuring each operator of 24 training steps; the
libraries' heuristics are not public, so those of convolutions and LSTMs are approximations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from brim.foresee._known import KnownOperators
from brim.foresee._temporaries import Temporary, bytes_of

aten = torch.ops.aten

_MOST_PARTIAL_GRADIENTS = 9 << 20  # bytes of one convolution's weight


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _rnn_parts(args: Any) -> tuple[int, int]:
    """Bytes of gates and outputs of all layers and steps, and of one layer's outputs."""
    x, weights, hidden = args[0], args[1], args[4]
    layers, _, width = hidden.shape
    outputs = x.numel() // x.size(-1) * width * x.element_size()
    gates = weights[0].size(0) // width  # 4 of an LSTM, 3 of a GRU
    return (gates + 1) * layers * outputs, outputs


def reserved_by_cudnn_rnn(args: Any) -> int:
    """What cuDNN's LSTM keeps for backward: the above, and what is between the layers."""
    if not args[12]:  # not training
        return 0
    gates, outputs = _rnn_parts(args)
    return gates + (int(args[9]) - 1) * outputs


class Kernels:
    """Temporaries of single operators.

    Args:
        multiprocessors: how many the GPU has; the grids of reductions depend on it.
    """

    def __init__(self, multiprocessors: int) -> None:
        """Make the table."""
        self._multiprocessors = multiprocessors
        efficient_attention = aten._scaled_dot_product_efficient_attention_backward.default
        self._table: dict[Any, Callable[..., Any]] = {
            aten.sum.dim_IntList: self._reduction,
            aten.mean.dim: self._reduction,
            aten.convolution.default: self._convolution,
            aten.convolution_backward.default: self._convolution_backward,
            aten.embedding_dense_backward.default: self._embedding_backward,
            aten.native_layer_norm.default: self._layer_norm,
            aten.native_layer_norm_backward.default: self._layer_norm_backward,
            aten._softmax_backward_data.default: self._softmax_backward,
            aten.amax.default: self._reduction,
            aten.amin.default: self._reduction,
            aten.all.dim: self._reduction,
            aten.any.dim: self._reduction,
            aten.mse_loss.default: self._reduced_loss,
            aten.smooth_l1_loss.default: self._reduced_loss,
            aten.upsample_nearest2d_backward.default: self._copy_of_first,
            aten._cudnn_rnn.default: self._rnn,
            aten._cudnn_rnn_backward.default: self._rnn,
            aten._scaled_dot_product_cudnn_attention_backward.default: self._cudnn_attention,
            aten._scaled_dot_product_flash_attention_backward.default: self._cudnn_attention,
            efficient_attention: self._efficient_attention,
        }
        self.known = KnownOperators("cuda", self._table)

    def of(self, func: Any, args: Any, outputs: list[torch.Tensor]) -> Iterator[Temporary]:
        """What one call of an operator takes beyond its outputs, until it is done."""
        rule = self._table.get(func)
        taken = 0 if rule is None else rule(args, outputs)
        if isinstance(taken, tuple):
            yield from (Temporary(size, outputs=i + 1) for i, size in enumerate(taken) if size > 0)
        elif taken > 0:
            yield Temporary(int(taken))

    # A reduction with few outputs is spread over blocks, which leave their parts in memory: as
    # torch's Reduce.cuh lays them out.
    def _reduction(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return self._reduction_of(args[0], args[1] if len(args) > 1 else None)

    def _reduction_of(self, x: torch.Tensor, dims: Any) -> int:
        if x.numel() == 0 or x.dim() == 0:
            return 0
        dims = [dims] if isinstance(dims, int) else list(dims or ())
        reduced = {d % x.dim() for d in dims} or set(range(x.dim()))
        steps = {True: [], False: []}  # type: dict[bool, list[int]]
        for d in range(x.dim()):
            if x.size(d) > 1 and x.stride(d) > 0:
                steps[d in reduced].append(x.stride(d))
        if not steps[True]:
            return 0
        fastest_is_reduced = not steps[False] or min(steps[True]) < min(steps[False])
        outs = math.prod(x.size(d) for d in range(x.dim()) if d not in reduced)
        inputs = x.numel() // outs
        element = max(4, x.element_size()) if x.is_floating_point() else x.element_size()
        width, height = (inputs, outs) if fastest_is_reduced else (outs, inputs)
        vector = 1
        if not fastest_is_reduced and min(steps[False]) == 1:
            vector = next(v for v in (4, 2, 1) if outs % v == 0)
            width //= vector
        elif fastest_is_reduced and width > 128 and not steps[False] and min(steps[True]) == 1:
            width //= 4
        threads = 512 // vector
        across = _power_of_2(width) if width < threads else threads
        down = _power_of_2(height) if height < threads else threads
        block_x = min(across, 32)
        block_y = min(down, threads // block_x)
        block_x = min(across, threads // block_y)
        input_step, output_step = (block_x, 1) if fastest_is_reduced else (1, block_x)
        per_thread = _up(inputs, input_step)
        in_block = per_thread >= block_y * 16 or per_thread >= 256
        if in_block:
            input_step *= block_y
        else:
            output_step *= block_y
        grid = _up(outs // vector, output_step)
        target = self._multiprocessors * (2048 // (block_x * block_y))
        per_thread = _up(inputs, input_step)
        if not in_block or per_thread < 256 or grid > target:
            return 0
        blocks = max(min(_up(target, grid), _up(per_thread, 16)), _up(per_thread, 256))
        if blocks == 1:
            return 0
        parts = element * outs * blocks
        return parts if fastest_is_reduced else parts * block_x * vector

    # cuDNN's tensor cores want channels last: the other layout is transposed in a workspace.
    def _convolution(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        x, weight, out = args[0], args[1], outputs[0]
        if x.is_contiguous(memory_format=torch.channels_last) and x.dim() == 4:
            padded = _up(x.size(1), 8) * 8 * bytes_of(x) // x.size(1) if x.size(1) <= 4 else 0
            return padded + bytes_of(weight)
        if args[8] > 1 or weight.size(0) < 32:
            return 0  # a kernel of torch, or one that needs none
        if math.prod(weight.shape[2:]) == 1 and all(step == 1 for step in args[3]):
            return 0
        return bytes_of(x) + bytes_of(out) + bytes_of(weight)

    # A workspace for each gradient, one after the other; the bias's is a sum.
    def _convolution_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        grad, x, weight, mask = args[0], args[1], args[2], args[10]
        of_input, of_weight = self._convolution_gradients(grad, x, weight, args[4], args[9])
        of_bias = 0
        if mask[2]:
            of_bias = self._reduction_of(grad, [d for d in range(grad.dim()) if d != 1])
        return tuple(
            size for size, made in zip((of_input, of_weight, of_bias), mask, strict=True) if made
        )

    def _convolution_gradients(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: Any, groups: int
    ) -> tuple[int, int]:
        single = 4 * weight.numel()
        if groups > 1:
            spread = x.dtype == torch.float32 and math.prod(x.shape[2:]) >= 784
            return 0, 8 * bytes_of(x) if spread and not x.is_contiguous() else 0
        if x.is_contiguous(memory_format=torch.channels_last) and x.size(1) > 4:
            return 0, single
        if weight.size(0) < 32:
            return 0, 0
        # The sum over samples and places is cut into parts, each with a float32 gradient.
        parts = min(15 if x.dtype == torch.float32 else 4, _MOST_PARTIAL_GRADIENTS // single)
        of_input = bytes_of(grad) + bytes_of(x) + bytes_of(weight)
        of_weight = bytes_of(grad) + bytes_of(x) + parts * single
        if math.prod(weight.shape[2:]) == 1 and all(step == 1 for step in stride):
            of_input = 0
            if math.prod(x.shape[2:]) >= 784:
                of_weight = x.size(0) * single  # gradients of single samples
        return of_input, of_weight

    # Sorted indices, and float32 sums over at most 10 rows that have the same index.
    def _embedding_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        grad, indices, rows = args[0], args[1], args[2]
        copied = 0 if grad.is_contiguous() else bytes_of(grad)
        sums = min(indices.numel(), rows) + indices.numel() // 10
        return 4 * sums * grad.size(-1) + 56 * indices.numel() + copied

    def _layer_norm(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return 0 if args[0].is_contiguous() else bytes_of(args[0])

    # Sums over rows for the weight's and the bias's gradient, in parts.
    def _layer_norm_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        copied = sum(bytes_of(t) for t in args[:2] if not t.is_contiguous())
        return copied + 8 * 128 * math.prod(args[2])

    # The gradient times the output.
    def _softmax_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return bytes_of(outputs[0])

    # The losses of single elements.
    def _reduced_loss(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return bytes_of(args[0]) if outputs[0].dim() == 0 else 0

    def _copy_of_first(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return 0 if args[0].is_contiguous() else bytes_of(args[0])

    def _rnn(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return _rnn_parts(args)[0]

    # The query's gradient in float32, and one sum for each row.
    def _cudnn_attention(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        query, key = args[1], args[2]
        rows = query.numel() // query.size(-1)
        extra = 4 * query.numel() + 4 * rows
        if key.size(1) != query.size(1):  # gradients of keys and values for every query head
            extra += 2 * bytes_of(key) * (query.size(1) // key.size(1))
        return extra

    # Keys' gradients in float32, padded; the output's gradient is copied if it is not contiguous.
    def _efficient_attention(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        grad, query = args[0], args[1]
        batch, heads, length, width = query.shape
        copied = 0 if grad.transpose(1, 2).is_contiguous() else bytes_of(grad)
        return copied + 4 * batch * heads * (_up(length, 64) * 64 * width + 2 * length)
