"""What matrix products and recurrent layers take on the CPU.

They call BLAS or oneDNN, whose needs differ between processors. The rules were found by measuring
on aarch64 (oneDNN with Arm's Compute Library, torch 2.13) and x86_64 (AVX-512, torch 2.11).
"""

from __future__ import annotations

import math
import platform
from typing import Any

import torch

from brim._estimate._temporaries import bytes_of, copy_of

_LEAST_PRODUCT = 16**3  # rows x inner x columns: below, halves are multiplied without oneDNN
_LEAST_SIDE = 8  # of float32 matrices on aarch64
_ARM_BLOCKS = 20 << 10  # of bfloat16 matrices
# The same on x86_64, for each thread: bytes, and bytes for each inner element.
_X86_BLOCKS = 4736
_X86_BLOCKS_INNER = 128
_X86_ONCE = 384  # for all threads
_X86_COLUMNS = 64  # of the product that a thread works on at once
_X86_MOST_ROWS = 256  # of a transposed matrix that it has copied for it
_LINE = 64  # bytes of a cache line
_PAGE = 4096


def _by_rows(m: torch.Tensor) -> bool:
    return m.stride(-1) == 1 and m.stride(-2) >= m.size(-1)


def _by_columns(m: torch.Tensor) -> bool:
    return m.stride(-2) == 1 and m.stride(-1) >= m.size(-2)


def on_arm() -> bool:
    """Whether the rules of aarch64 hold; else those of x86_64 do."""
    return platform.machine() == "aarch64"


def packed_for_attention(half: torch.Tensor) -> int:
    """Keys or values of half precision, in the layout of AVX-512's instructions."""
    return 0 if on_arm() else bytes_of(half)


# ---- matrices ---------------------------------------------------------------------------------


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> int:
    """Operands that a library cannot read are copied; oneDNN has layouts of its own."""
    batch = math.prod(a.shape[:-2])
    unreadable = sum(bytes_of(m) for m in (a, b) if not (_by_rows(m) or _by_columns(m)))
    rows, inner, columns = a.size(-2), a.size(-1), b.size(-1)
    half = a.element_size() == 2
    if not torch.backends.mkldnn.enabled:
        return unreadable // batch
    if not on_arm():
        blocks = _x86_halves(a, columns) if half and a.dim() == 2 else 0
        return unreadable // batch + blocks
    single = a.dtype == torch.float32 and min(rows, inner, columns) > _LEAST_SIDE
    if half or (single and a.dim() == 3):
        if rows * inner * columns > _LEAST_PRODUCT:
            return _arm_onednn(a, b, out)
    elif single and not _by_columns(a) and _by_columns(b) and not _by_rows(b):
        gaps = _by_rows(a) and not a.is_contiguous()
        return unreadable + bytes_of(b) + (bytes_of(a) if gaps else 0)
    return unreadable // batch


def _arm_onednn(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> int:
    bfloat16 = a.dtype == torch.bfloat16
    batched = a.dim() == 3
    if not batched and _by_rows(a) and not a.is_contiguous() and not _by_columns(b):
        copied = 0 if b.is_contiguous() else bytes_of(b)
        return copied + (2 * bytes_of(out) if bfloat16 else 0)
    size = bytes_of(b)
    if not a.is_contiguous():
        size += bytes_of(a)
    if batched:
        readable = b.is_contiguous() or b.mT.is_contiguous()
    else:
        readable = _by_rows(b) or _by_columns(b)
    if not readable:
        size += bytes_of(b)
    if bfloat16:
        size += bytes_of(a) // (a.size(0) if batched else 1) + _ARM_BLOCKS
    return size


def _x86_halves(a: torch.Tensor, columns: int) -> int:
    rows, inner, threads = a.size(-2), a.size(-1), torch.get_num_threads()
    if rows * inner <= _LEAST_PRODUCT // 16:
        return 0
    size = _X86_BLOCKS + _X86_BLOCKS_INNER * inner
    if not _by_rows(a):
        # A thread copies its rows: fewer of them if there would be no work for all threads.
        part = min(rows, _X86_MOST_ROWS)
        while part > 32 and -(-rows // part) * -(-columns // _X86_COLUMNS) < threads:
            part //= 2
        gap = 32 if inner % 512 == 0 else 0  # rows in the same cache lines would evict others
        size += part * (inner + gap) * a.element_size()
    return threads * size + _X86_ONCE


def vector_product(matrix: torch.Tensor) -> int:
    """What a product with a vector takes: a copy of a matrix that the library cannot read."""
    copies = on_arm() and torch.backends.mkldnn.enabled
    readable = _by_rows(matrix) or (_by_columns(matrix) and not copies)
    return 0 if readable else bytes_of(matrix)


# ---- recurrent layers -------------------------------------------------------------------------


class _Lstm:
    """The buffers of one layer and direction in oneDNN: rows are padded, and each has whole pages.

    oneDNN calls this its workspace and scratchpad (src/cpu/rnn/rnn_utils.hpp). Measured on aarch64:
    the workspace is exact, the rest within 8 KiB.
    """

    def __init__(self, args: Any) -> None:
        x, hidden = args[0], args[5]
        self.steps, self.batch, self.inputs = (int(size) for size in x.shape)
        self.width = int(hidden.size(-1))
        self.item = int(x.element_size())

    def row(self, width: int) -> int:
        """Elements of a padded row, whose length is no multiple of what evicts cache lines."""
        line = _LINE // self.item
        padded = -(-width // line) * line
        return padded + line if padded % 256 == 0 else padded

    def pages(self, rows: int, row: int) -> int:
        return -(-rows * self.batch * row * self.item // _PAGE) * _PAGE

    def gates(self) -> int:
        return self.pages(self.steps, self.row(4 * self.width))

    def states(self) -> tuple[int, int]:
        """Inputs or outputs of all steps, and cells of all steps."""
        rows = 2 * (self.steps + 1)
        widest = self.row(max(self.inputs, self.width))
        return self.pages(rows, widest), self.pages(rows, self.width)

    def reserved(self) -> int:
        outer, inner = self.states()
        return self.gates() + 3 * outer + 2 * inner + self.pages(self.steps, self.row(self.width))

    def scratch(self) -> int:
        """Gates, the states of a step, and weights with padded rows."""
        weights = (self.inputs + self.width) * self.row(4 * self.width) + 4 * self.width
        return self.gates() + 2 * self.pages(1, self.width) + _PAGE + weights * self.item


def rnn(args: Any, outputs: object) -> int:
    """What an LSTM layer takes: without gradients, also the states, which it then does not keep."""
    lstm = _Lstm(args)
    if torch.is_grad_enabled():
        return lstm.scratch()
    return lstm.scratch() + sum(lstm.states()) - lstm.pages(1, lstm.row(lstm.width))


def rnn_backward(args: Any, outputs: object) -> int:
    """The same, gradients of the last states, a copy of others, and weights with padded rows."""
    lstm = _Lstm(args)
    rows = [lstm.row(each) for each in (lstm.inputs, lstm.width) if lstm.row(each) != each]
    padded = 4 * lstm.width * (1 + sum(rows)) * lstm.item
    padded += 2 * lstm.batch * lstm.width * lstm.item
    return lstm.scratch() + padded + (0 if args[10] is None else copy_of(args[10]))


def reserved_by_onednn_rnn(args: Any) -> int:
    """What oneDNN's LSTM keeps for backward."""
    return _Lstm(args).reserved() if torch.is_grad_enabled() else 0
