"""What CUDA's kernels allocate inside: a table by operator, with the reason of each entry.

The rules were found on an H200 with torch 2.11 by measuring each operator of 24 training steps; the
libraries' heuristics are not public, so those of convolutions are approximations.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import torch

from brim import _C
from brim._estimate._cuda_convolutions import Convolution
from brim._estimate._cuda_rnns import RULES as RULES_OF_RNNS
from brim._estimate._known import known_operators
from brim._estimate._temporaries import (
    Rule,
    Temporary,
    by_operator,
    bytes_of,
    copy_of,
    of_attention,
    of_encoder_layer,
    of_reduced_loss,
)

aten = torch.ops.aten

_GEMMS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_HOPPER_WORKSPACE = 4096 * 8 * 1024
_OTHER_WORKSPACE = (4096 * 2 + 16 * 8) * 1024
_DROPOUT_STATE = 48 << 10  # for each multiprocessor


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _workspace_setting(default: int) -> int:
    """Bytes of CUBLAS_WORKSPACE_CONFIG, such as ":4096:2:16:8" (KiB and how many)."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) for size, count in pairs) * 1024 or default


class CudaTemporaries:
    """What CUDA's kernels and libraries take.

    Args:
        device: the GPU; an H200 is assumed if it is not there.
    """

    def __init__(self, device: torch.device) -> None:
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(device)
            hopper, self._multiprocessors = properties.major == 9, properties.multi_processor_count
            self.assumptions = ["convolutions' workspaces follow rules, as cuDNN's are not public"]
        else:
            hopper, self._multiprocessors = True, 132
            self.assumptions = ["the kernels, libraries and workspaces are those of an H200"]
        self._workspace = _workspace_setting(_HOPPER_WORKSPACE if hopper else _OTHER_WORKSPACE)
        self._workspaces: set[bool] = set()
        self._has_dropout_state = False  # cuDNN's random state, which torch keeps
        rules: dict[str, Rule] = {
            "sum.dim_IntList mean.dim amax amin all.dim any.dim": self._reduction,
            "convolution": self._convolution,
            "convolution_backward": self._convolution_backward,
            "embedding_dense_backward": self._embedding_backward,
            "native_layer_norm": lambda args, outputs: copy_of(args[0]),
            "native_layer_norm_backward": self._layer_norm_backward,
            # The gradient times the output.
            "_softmax_backward_data": lambda args, outputs: bytes_of(outputs[0]),
            "_ctc_loss_backward.Tensor": lambda args, outputs: bytes_of(args[6]),
            "mse_loss smooth_l1_loss": of_reduced_loss,
            "upsample_nearest2d_backward": lambda args, outputs: copy_of(args[0]),
            **RULES_OF_RNNS,
            "_fft_c2c _fft_r2c": lambda args, outputs: self._batch_copy(args[0], args[1]),
            # The library writes over its input.
            "_fft_c2r": lambda args, outputs: (
                bytes_of(args[0]) + self._batch_copy(args[0].contiguous(), args[1])
            ),
            "_scaled_dot_product_cudnn_attention_backward": self._cudnn_attention,
            "_scaled_dot_product_flash_attention_backward": self._cudnn_attention,
            "_scaled_dot_product_efficient_attention_backward": self._efficient_attention,
            "_transformer_encoder_layer_fwd": self._encoder_layer,
            "_native_multi_head_attention": self._multihead_attention,
        }
        self._table = by_operator(rules)
        self.is_known = known_operators("cuda", self._table)

    def of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], backward: bool
    ) -> Iterator[Temporary]:
        """What one call of an operator takes, in order."""
        # One workspace for each cuBLAS handle: the autograd engine's thread has its own.
        if func in _GEMMS and backward not in self._workspaces:
            if not self._workspaces:
                size = _C.format_bytes(self._workspace)
                self.assumptions.append(
                    f"cuBLAS keeps a workspace of {size} for all matrix products, and another one "
                    "for those of backward"
                )
            self._workspaces.add(backward)
            yield Temporary(self._workspace, stays=True)
        if func is aten._cudnn_rnn.default and args[11] > 0 and not self._has_dropout_state:
            self._has_dropout_state = True
            yield Temporary(_DROPOUT_STATE * self._multiprocessors, stays=True)
        rule = self._table.get(func) if outputs else None
        if rule is not None:
            taken = rule(args, outputs)
            sizes = taken if isinstance(taken, tuple) else (taken,)
            for i, size in enumerate(sizes):
                yield Temporary(int(size), outputs=i + 1 if isinstance(taken, tuple) else None)

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

    def _convolution(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        stride, _, dilation, transposed, _, groups = args[3:9]
        x, out = (outputs[0], args[0]) if transposed else (args[0], outputs[0])
        one = Convolution(x, args[1], out, stride, dilation, groups, self._multiprocessors)
        return one.of_input() if transposed else one.of_output()

    # A workspace for each gradient, one after the other; the bias's is a sum.
    def _convolution_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        grad, first, weight = args[:3]
        stride, _, dilation, transposed, _, groups, mask = args[4:11]
        x, out = (grad, first) if transposed else (first, grad)
        one = Convolution(x, weight, out, stride, dilation, groups, self._multiprocessors)
        of_input = one.of_output() if transposed else one.of_input()
        of_bias = 0
        if mask[2]:
            of_bias = self._reduction_of(grad, [d for d in range(grad.dim()) if d != 1])
        sizes = (of_input, one.of_weight() if mask[1] else 0, of_bias)
        return tuple(size for size, made in zip(sizes, mask, strict=True) if made)

    # cuFFT wants the other dimensions as one, in the order in which they lie in memory.
    def _batch_copy(self, x: torch.Tensor, dims: list[int]) -> int:
        transformed = {d % x.dim() for d in dims}
        rest = sorted((x.stride(d), x.size(d)) for d in range(x.dim()) if d not in transformed)
        joined = all(b[0] == a[0] * a[1] for a, b in itertools.pairwise(rest))
        return 0 if joined else bytes_of(x)

    # Sorted indices, and float32 sums over at most 10 rows that have the same index.
    def _embedding_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        grad, indices, rows = args[0], args[1], args[2]
        sums = min(indices.numel(), rows) + indices.numel() // 10
        return 4 * sums * grad.size(-1) + 56 * indices.numel() + copy_of(grad)

    # Sums over rows for the weight's and the bias's gradient, in parts.
    def _layer_norm_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return sum(map(copy_of, args[:2])) + 8 * 128 * math.prod(args[2])

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

    # A fused kernel, if there is no mask.
    def _encoder_layer(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return of_encoder_layer(args, False)

    def _multihead_attention(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return of_attention(args[0], args[4], False, args[9] if len(args) > 9 else None)
