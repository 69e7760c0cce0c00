"""What convolutions take on the CPU: approximations, since oneDNN's choices are not public.

Found by measuring about 60 shapes on aarch64 (oneDNN with Arm's Compute Library, torch 2.13) and on
x86_64 (AVX-512, torch 2.11). Usual shapes (kernels up to 3x3, one group) are mostly exact.
"""

from __future__ import annotations

import math
import platform
from typing import Any, NamedTuple

import torch

from brim.foresee._temporaries import bytes_of

_Backend: Any = torch._C._ConvBackend  # type: ignore[attr-defined]
_ARM_PANELS = 2_200_000  # of unfolded samples that are multiplied at once
_X86_BLOCKS = 6 << 10  # for each thread
_X86_HALVES = 60 << 10  # the same of bfloat16


class _Call(NamedTuple):
    """Arguments of a convolution. `out` has the shape of its output."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    stride: Any
    padding: Any
    dilation: Any
    transposed: bool
    output_padding: Any
    groups: int

    def backend(self, bias: Any) -> Any:
        """The kernel that torch chooses."""
        return torch._C._select_conv_backend(self.x, self.weight, bias, *self[3:], None)

    def taps(self) -> int:
        """Elements of the kernel."""
        return math.prod(self.weight.shape[2:])

    def unfolded(self, channels: int | None = None) -> int:
        """Bytes of one sample unfolded; a 1x1 convolution needs none."""
        if self.taps() == 1 and all(step == 1 for step in self.stride):
            return 0
        rows = (channels or self.weight.size(1)) * self.taps()
        return rows * math.prod(self.out.shape[2:]) * self.x.element_size()


class Convolutions:
    """Rules of forward and backward.

    Attributes:
        assumptions: what was assumed so far, in sentences.
    """

    def __init__(self) -> None:
        """Find out which processor this is."""
        self._arm = platform.machine() == "aarch64"
        self.assumptions: dict[str, None] = {}

    def forward(self, args: Any, outputs: list[torch.Tensor]) -> int:
        """What `aten.convolution` takes."""
        call = _Call(args[0], args[1], outputs[0], *args[3:9])
        backend = call.backend(args[2])
        if backend == _Backend.Slow2d:
            return call.unfolded() * call.x.size(0)
        if not self._is_onednn(backend, call):
            return 0
        return _arm_forward(call) if self._arm else _x86_forward(call)

    def backward(self, args: Any, outputs: list[torch.Tensor]) -> int:
        """What `aten.convolution_backward` takes."""
        call = _Call(args[1], args[2], args[0], *args[4:10])
        backend = call.backend(None)
        if backend == _Backend.Slow2d:
            return call.unfolded() * call.x.size(0)
        if not self._is_onednn(backend, call):
            return 0
        copied = bytes_of(args[0]) if 0 in args[0].stride() else 0  # an expanded gradient
        size = _arm_backward(call, args[10][0]) if self._arm else _x86_backward(call)
        return copied + size

    def _is_onednn(self, backend: Any, call: _Call) -> bool:
        slow = (_Backend.SlowTranspose2d, _Backend.SlowTranspose3d)  # oneDNN's has no name
        found = bool(backend == _Backend.Mkldnn or (call.transposed and backend not in slow))
        if found:
            text = "oneDNN's workspaces of convolutions follow rules, as its choices are not public"
            self.assumptions[text] = None
        return found


# ---- aarch64 ---------------------------------------------------------------------------------


def _arm_forward(call: _Call) -> int:
    """Input and weight in oneDNN's layout, later the output in both layouts."""
    x, weight, out = bytes_of(call.x), bytes_of(call.weight), bytes_of(call.out)
    last = is_channels_last(call.x)
    if call.transposed:
        return 2 * weight if last else 2 * out
    if call.groups > 1:
        if last:
            return x // 4
        depthwise = call.groups == call.x.size(1)
        return 2 * out if depthwise or call.x.dtype == torch.bfloat16 else out
    unfolded = _arm_unfolded(call)
    if last:
        pointwise = call.taps() == 1 and call.x.dtype == torch.float32
        return weight + out if pointwise else 2 * weight + unfolded
    return max(x + weight + unfolded, 2 * out)


def _arm_unfolded(call: _Call) -> int:
    """Samples that are unfolded at once: large kernels in float32, all of bfloat16."""
    if call.taps() == 1 or call.x.dim() == 5:
        return 0
    samples = call.x.size(0)
    if call.x.dtype == torch.bfloat16:
        return samples * call.unfolded(-(-call.weight.size(1) // 4) * 4)
    dilated = any(step != 1 for step in call.dilation)
    strided = any(step != 1 for step in call.stride)
    if strided or (max(call.weight.shape[2:]) <= 3 and not dilated):
        return 0
    panels = max(13 * call.unfolded() // 10, _ARM_PANELS)
    return min(samples * call.unfolded(), panels) + (bytes_of(call.out) if dilated else 0)


def _arm_backward(call: _Call, of_input: bool) -> int:
    """Each thread unfolds one sample at a time, and sums up its part of the weight's gradient."""
    x, weight, grad = bytes_of(call.x), bytes_of(call.weight), bytes_of(call.out)
    last, half = is_channels_last(call.x), call.x.dtype == torch.bfloat16
    if call.transposed:
        if half:
            return 5 * grad
        return grad + (4 if call.x.dim() == 4 else 8) * weight + (x if last else 0)
    if call.groups > 1:
        return x // 3 if last else (2 if half else 1) * x
    if half:
        return 3 * weight if last else max(0, grad - weight)
    if call.x.dim() == 5:
        return 2 * x
    unfolded, parts = call.unfolded(), 4 * weight
    strided = any(step != 1 for step in call.stride)
    if last:
        return unfolded + (3 if call.taps() == 1 else 2) * parts + (x if strided else 0)
    if call.taps() == 1 and not strided:
        return max(x - weight, 2 * parts)
    if not of_input:
        return unfolded + parts
    threads = min(torch.get_num_threads(), call.x.size(0))
    others = unfolded + parts if unfolded <= 2 * parts else unfolded - 5 * weight
    return unfolded + parts + (threads - 1) * others


# ---- x86_64 ----------------------------------------------------------------------------------


def _x86_forward(call: _Call) -> int:
    """Channels go in blocks: input, weight and output so, later the output in both layouts."""
    x, weight, out = bytes_of(call.x), bytes_of(call.weight), bytes_of(call.out)
    half = call.x.element_size() == 2 and call.groups == 1
    threads = torch.get_num_threads() * (_X86_HALVES if half else _X86_BLOCKS)
    if is_channels_last(call.x):
        return 2 * weight + threads
    if call.transposed:
        return 2 * out
    if half:
        return max(2 * out, x + threads)
    blocked = _blocked(call.out)
    return max(_blocked(call.x) + blocked + weight, blocked + out) - out


def _x86_backward(call: _Call) -> int:
    """Input and gradient in blocks, and the weight's gradient in parts."""
    parts = 3 * bytes_of(call.weight) // 2
    if call.x.element_size() == 2 and call.groups == 1:
        parts = 11 * bytes_of(call.weight) + 2 * _X86_HALVES * torch.get_num_threads()
    elif is_channels_last(call.x):
        parts *= 2
    if is_channels_last(call.x):
        return parts
    return _blocked(call.out) + _blocked(call.x) + parts


def _blocked(x: torch.Tensor) -> int:
    """Bytes with the channels padded to a block; up to 3 channels are taken as they are."""
    block = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    channels = x.size(1)
    padded = channels if channels <= 3 else -(-channels // block) * block
    return bytes_of(x) // channels * padded


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether the channels are the innermost dimension in memory."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
