"""What cuDNN's convolutions take for their workspace.

Tensor cores want channels last, and channels in 16 bytes: for the other layout cuDNN copies input,
output and weights. Which of its ways it takes is not public. The rules were chosen on 6,212
convolutions on an H200 (cuDNN 9.19): of outputs and inputs' gradients 73 of 100 are right within
1 % of what the call touches, of weights' gradients 47.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from brim._estimate._temporaries import bytes_of

_TILE = 128  # rows and columns of a matrix product's part that one multiprocessor works on
_LEAST_DEPTH = 128  # of a sum in float32 for which tensors are copied
_LEAST_COPIED = 1 << 20  # bytes of an input in float32, in backward
_FAR = 8  # dilations above have a kernel of their own, which splits its sum in 8


def _up(a: int, b: int) -> int:
    return -(-a // b)


class Convolution(NamedTuple):
    """A convolution; one that is transposed is described by the other way round.

    Args:
        x: the input, or what is of its shape.
        weight: of shape (outputs, inputs / groups, ...).
        out: the output, or its gradient.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    stride: Any
    dilation: Any
    groups: int
    multiprocessors: int

    @property
    def _half(self) -> bool:
        return self.x.element_size() == 2

    @property
    def _is_product(self) -> bool:
        """Whether it is a matrix product of each sample, which needs no other layout."""
        return math.prod(self.weight.shape[2:]) == 1 and all(step == 1 for step in self.stride)

    @property
    def _by_torch(self) -> bool:
        """Whether it is a kernel of torch: one filter for each channel."""
        return self.groups > 1 and self.groups == self.x.size(1)

    @property
    def _last(self) -> bool:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return self.x.dim() in formats and self.x.is_contiguous(memory_format=formats[self.x.dim()])

    def _copies(self) -> tuple[int, int]:
        """Bytes of input and output, and elements of the weights, with channels in 16 bytes."""
        unit = 16 // self.x.element_size()
        size, moved = 1, 0
        for tensor in (self.x, self.out):
            channels = tensor.size(1) // self.groups
            padded = _up(channels, unit) * unit
            # A group as wide as its outputs is a square tile.
            if self.groups > 1 and channels > unit and self.x.size(1) == self.out.size(1):
                padded = min(1 << (channels - 1).bit_length(), _up(channels, 32) * 32)
            few = channels < unit and (self.groups > 1 or not self._half)
            if few or (self.groups > 1 and self._last and self._half):
                padded = channels
            moved += bytes_of(tensor) // channels * padded
            size *= padded
        return moved, size * self.groups * math.prod(self.weight.shape[2:])

    def of_output(self) -> int:
        """For the output from input and weights."""
        if self._last and self.groups == 1:
            inputs = self.x.size(1)
            padded = _up(inputs, 8) * 8 * bytes_of(self.x) // inputs if inputs <= 4 else 0
            return padded + bytes_of(self.weight)
        if self._by_torch or self._is_product:
            return 0
        depth = self.groups * math.prod(self.weight.shape[1:])
        if self.x.size(1) < 16 if self._half else depth < _LEAST_DEPTH:
            return 0
        return self._copied()

    def of_input(self) -> int:
        """For the input's gradient."""
        if self._last and (self.groups == 1 or self._half):
            return 0
        if self._by_torch or self._is_product or not self._is_copied():
            return 0
        return self._copied()

    def _copied(self) -> int:
        moved, weights = self._copies()
        return moved + (0 if self._last and self._half else weights * self.x.element_size())

    def of_weight(self) -> int:
        """For the weights' gradient: a sum over samples and places."""
        single = 4 * self.weight.numel()
        if self._by_torch:
            spread = self.x.dtype == torch.float32 and math.prod(self.x.shape[2:]) >= 784
            return 8 * bytes_of(self.x) if spread and not self.x.is_contiguous() else 0
        if self._last and self.groups == 1 and self.x.size(1) > 4:
            return single
        moved, weights = self._copies()
        if self._is_product:  # gradients of single samples, unless these are larger
            separate = self.x.size(0) * single
            widens = self.out.size(1) >= 4 * self.x.size(1) and math.prod(self.x.shape[2:]) < 64
            most = 3 if not self._half else 12 if widens else 1
            return separate if separate <= most * moved else moved
        if not self._is_copied() or (self._half and self.groups > 1):
            return 0
        # Where the product has few tiles, the sum is cut into parts, one for each multiprocessor.
        outputs = self.out.size(1) // self.groups
        columns = weights // max(1, self.groups * outputs)
        tiles = self.groups * _up(outputs, _TILE) * _up(columns, _TILE)
        depth = self.out.numel() // self.out.size(1)
        parts = min(self.multiprocessors // tiles, depth // (4096 if self._half else 1024))
        if not self._half and max(self.dilation) > _FAR:
            parts = 8
        return moved + weights * (self.x.element_size() + (4 * parts if parts > 1 else 0))

    def _is_copied(self) -> bool:
        return self._half or (self.x.size(1) >= 16 and bytes_of(self.x) >= _LEAST_COPIED)
