"""What cuDNN's recurrent layers take, in tensors of one direction's outputs ("units").

cuDNN is not asked, as it answers only where a GPU is. What stands here follows from the requests of
3,495 layers on an H200 (cuDNN 9.19); of 15 whole steps it is within 0.4 %.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from brim._estimate._temporaries import Rule, bytes_of, copy_of

aten = torch.ops.aten

MODES = RNN_RELU, RNN_TANH, LSTM, GRU = range(4)  # torch's numbers of cuDNN's modes

_GATES = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 4, GRU: 3}
_KEPT = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 5, GRU: 6}  # units of a layer, for backward
_PERSISTENT_BACKWARD = {RNN_RELU: 9, RNN_TANH: 9, LSTM: 12, GRU: 14}  # more units of workspace
_OF_A_STREAM = 8 << 20  # bytes for the matrix products of each layer and direction


class _Layers(NamedTuple):
    """A call of `_cudnn_rnn` or its backward."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    batch: int
    mode: int
    width: int  # of the state
    projected: int
    layers: int
    dropout: float
    train: bool
    directions: int
    lengths: list[int]  # of a packed sequence: samples of each step

    @property
    def unit(self) -> int:
        rows = math.prod(self.x.shape[:-1])
        if self.lengths:
            rows = len(self.lengths) * self.batch
        return rows * self.width * self.x.element_size()

    @property
    def is_persistent(self) -> bool:
        """Whether torch chooses a kernel that keeps the weights in registers (cudnn/RNN.cpp)."""
        half = self.x.dtype == torch.float16
        if self.projected or self.lengths or not (half or self.x.dtype == torch.float32):
            return False
        if self.width <= (192 if self.mode in (LSTM, GRU) else 384):
            return True
        large = self.batch >= 96 and self.width >= 896 and self.mode != LSTM
        return (
            half
            and (self.layers, self.directions) == (1, 1)
            and self.mode != GRU
            and self.width <= 1024
            and self.width % 128 == self.x.size(-1) % 128 == self.batch % 8 == 0
            and self.batch <= 128
            and not large
        )


def _layers(args: Any) -> _Layers:
    mode, width, projected, layers, _, dropout, train, both, lengths = (
        args[6:15] if isinstance(args[6], int) else args[10:19]  # backward has 4 more before them
    )
    sizes = (mode, width, projected, layers, dropout, train, 2 if both else 1, list(lengths))
    return _Layers(args[0], args[1], args[4].size(1), *sizes)


def reserved_by_cudnn_rnn(args: Any) -> int:
    """What is kept for backward: of each layer, between layers, and masks of dropout as bits."""
    rnn = _layers(args)
    if not rnn.train:
        return 0
    kept = (_KEPT[rnn.mode] * rnn.layers + rnn.layers - 1) * rnn.unit
    if rnn.projected:  # also the outputs before they are projected
        kept = rnn.layers * (6 * rnn.unit + 3 * rnn.unit * rnn.projected // rnn.width)
    if rnn.dropout > 0:
        kept += (rnn.layers - 1) * rnn.unit // (8 * rnn.x.element_size())
    return rnn.directions * kept


def workspace_of_cudnn_rnn(args: Any) -> int:
    """The larger one of what forward and backward need: cuDNN tells one figure for training."""
    rnn = _layers(args)
    both, more, cell = rnn.directions, rnn.layers > 1, rnn.mode == LSTM
    gates, entered = _GATES[rnn.mode], rnn.x.size(-1) / rnn.width
    persistent = rnn.is_persistent
    state = rnn.batch * rnn.width * rnn.x.element_size()
    units = both * (gates + 1) + 4 * (both - 1) + entered + rnn.projected / rnn.width
    units += 4 * gates * persistent + both * (more and rnn.train and rnn.dropout > 0)
    states = rnn.layers * (both * (gates + 2 + 4 * cell) + 4 * (both - 1))
    needed = units * rnn.unit + states * state
    if rnn.train:
        units = 3 * both + both * more + 2 * entered + both**2 * max(1, entered)
        states = rnn.layers * (both * (5 + 6 * cell) + 4 * (both - 1))
        if persistent:
            units += _PERSISTENT_BACKWARD[rnn.mode]
        elif more and both == 1:  # some steps at a time
            units -= 2
            steps = rnn.unit // max(1, state)
            states += (rnn.layers + 1) * min(8, 1 + steps // 8)
        needed = max(needed, units * rnn.unit + states * state)
    weights = sum(map(bytes_of, rnn.weights))
    return _OF_A_STREAM * rnn.layers * both + weights + int(needed)


def _forward(args: Any, outputs: list[torch.Tensor]) -> int:
    return workspace_of_cudnn_rnn(args) + copy_of(args[0])


def _backward(args: Any, outputs: list[torch.Tensor]) -> tuple[int, ...]:
    of_input = workspace_of_cudnn_rnn(args) + copy_of(args[0])
    copied = copy_of(args[7]) if args[7] is not None else 0
    return 0, 0, of_input + copied, of_input  # the last one beside the weights' gradients


RULES: dict[str, Rule] = {"_cudnn_rnn": _forward, "_cudnn_rnn_backward": _backward}


def fake_backward(args: Any) -> tuple[Any, ...]:
    """The results of `_cudnn_rnn_backward`, which has no fake kernel: weights' share a buffer."""
    x, weights, hidden, cell = args[0], args[1], args[4], args[5]
    states = (hidden, hidden.new_empty(0) if cell is None else cell)
    buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
    parts = buffer.split([weight.numel() for weight in weights])
    made = [torch.empty_like(tensor) for tensor in (x, *states)]
    return (*made, [part.view(w.shape) for part, w in zip(parts, weights, strict=True)])
