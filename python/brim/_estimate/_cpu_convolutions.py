"""What convolutions take on the CPU: approximations, since oneDNN's choices are not public.

Found by measuring about 100 shapes with 1 to 8 threads on aarch64 (oneDNN with Arm's Compute
Library, torch 2.13), and 90 with 1 to 16 on x86_64 (AVX-512, torch 2.11). Usual shapes are mostly
exact.

Torch has kernels of its own where oneDNN is off: `torch.backends.mkldnn` says so, and torch itself
switches it off for good when oneDNN once runs out of memory in a matrix product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from brim._estimate._cpu_libraries import on_arm
from brim._estimate._temporaries import bytes_of

_Backend: Any = torch._C._ConvBackend  # type: ignore[attr-defined]
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
_ARM_PANELS = 2_200_000  # of unfolded samples that are multiplied at once
_ARM_CHANNELS = 16  # of the output at a time, in float32
_ARM_LEAST_POSITIONS = 256  # for each thread, if all threads work on one sample
_X86_BLOCKS = 4 << 10  # for each thread, and once for all
_X86_HALVES = 60 << 10  # of bfloat16, for each thread
_X86_CHANNELS = 16  # in a block
_X86_PARTS = 8 << 10  # where threads sum up parts of the weight's gradient; more for many threads
_X86_LARGE = 49  # elements of a kernel that oneDNN has no code for if each channel has its own
_X86_PARTS_OF_LARGE = 32  # of its gradient for each sample, with channels last
# Torch's own kernels unfold all samples in forward, or one at a time.
_UNFOLDING_ALL = (_Backend.Slow2d, _Backend.Slow3d, _Backend.SlowTranspose2d)
_UNFOLDING_ONE = (_Backend.SlowDilated2d, _Backend.SlowDilated3d, _Backend.SlowTranspose3d)
_OWN = (*_UNFOLDING_ALL, *_UNFOLDING_ONE, _Backend.NnpackSpatial)


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

    def reads(self, gradient: torch.Tensor) -> bool:
        """Whether it lies in memory as the kernel wants it; else it is copied."""
        last = is_channels_last(self.x) or is_channels_last(self.weight)
        layout = _CHANNELS_LAST[gradient.dim()] if last else torch.contiguous_format
        return gradient.is_contiguous(memory_format=layout)

    def taps(self) -> int:
        """Elements of the kernel."""
        return math.prod(self.weight.shape[2:])

    def is_depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return 1 < self.groups == self.x.size(1)

    def smaller(self) -> torch.Tensor:
        """The tensor whose elements are the kernel's positions."""
        return self.x if self.transposed else self.out

    def unfolded(self, channels: int | None = None) -> int:
        """Bytes of one sample unfolded; a 1x1 convolution needs none."""
        if self.taps() == 1 and all(step == 1 for step in self.stride):
            return 0
        rows = (channels or self.weight.size(1)) * self.taps()
        return rows * math.prod(self.smaller().shape[2:]) * self.x.element_size()

    def unfolded_slice(self) -> int:
        """The same, of one slice if a sample is a volume."""
        return self.unfolded() // (self.smaller().size(2) if self.x.dim() == 5 else 1)


def convolution(args: Any, outputs: list[torch.Tensor]) -> int:
    """What `aten.convolution` takes."""
    call = _Call(args[0], args[1], outputs[0], *args[3:9])
    backend = call.backend(args[2])
    if _is_onednn(backend, call):
        return _arm_forward(call) if on_arm() else _x86_forward(call)
    return _own_forward(call, backend) if backend in _OWN else 0


def convolution_backward(args: Any, outputs: list[torch.Tensor]) -> int:
    """What `aten.convolution_backward` takes."""
    call = _Call(args[1], args[2], args[0], *args[4:10])
    backend = call.backend(None)
    if not _is_onednn(backend, call):
        return _own_backward(call, backend) if backend in _OWN else 0
    size = _arm_backward(call, args[10][0]) if on_arm() else _x86_backward(call)
    return size + (0 if call.reads(args[0]) else bytes_of(args[0]))


def _is_onednn(backend: Any, call: _Call) -> bool:
    slow = (_Backend.SlowTranspose2d, _Backend.SlowTranspose3d)  # oneDNN's has no name
    return bool(backend == _Backend.Mkldnn or (call.transposed and backend not in slow))


# ---- without oneDNN ---------------------------------------------------------------------------


def _own_forward(call: _Call, backend: Any) -> int:
    """Samples are unfolded; groups are convolved one after the other, then joined."""
    samples = call.x.size(0) if backend in _UNFOLDING_ALL else int(backend in _UNFOLDING_ONE)
    size = samples * call.unfolded()
    if call.groups > 1:
        size = max(bytes_of(call.out), size + bytes_of(call.x) // call.groups)
    return size + _own_copy(call, backend)


def _own_backward(call: _Call, backend: Any) -> int:
    """The same of gradients."""
    x, weight, grad = bytes_of(call.x), bytes_of(call.weight), bytes_of(call.out)
    samples = call.x.size(0) if backend in _UNFOLDING_ALL and not call.transposed else 1
    size = samples * call.unfolded()
    if call.groups > 1:
        size = max(x + weight, size + (x + grad) // call.groups)
    return size + _own_copy(call, backend)


def _own_copy(call: _Call, backend: Any) -> int:
    """With channels last, NNPACK copies its input, others the weight."""
    if not is_channels_last(call.x):
        return 0
    if backend == _Backend.NnpackSpatial:
        return bytes_of(call.x)
    return bytes_of(call.weight) if call.taps() > 1 else 0


# ---- aarch64 ---------------------------------------------------------------------------------


def _arm_forward(call: _Call) -> int:
    """Input and weight in oneDNN's layout, later the output in both layouts."""
    x, weight, out = bytes_of(call.x), bytes_of(call.weight), bytes_of(call.out)
    last, threads = is_channels_last(call.x), torch.get_num_threads()
    half, volume = call.x.dtype == torch.bfloat16, call.x.dim() == 5
    if volume and last and not call.transposed:
        return 2 * weight + x // call.x.size(0) + call.unfolded_slice()
    if not (last or half) and (volume or (call.transposed and call.groups > 1)):
        return max(out, threads * call.unfolded_slice())
    if call.transposed:
        return 2 * weight if last else 2 * out
    if call.groups > 1:
        depthwise = call.is_depthwise()
        if last:
            part = x // call.x.size(0) // call.groups + call.unfolded() // 8
            return x // 4 if depthwise else 2 * weight + threads * part
        if depthwise or half:
            return 2 * out
        return max(out, threads * call.unfolded())
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
    sides = call.weight.shape[2:]
    # Along one dimension oneDNN unfolds nothing, unless there are gaps: then all at once. Nor does
    # it if the output's channels fill its kernels; else a cost model of its own decides.
    line, fills = call.x.dim() == 3, call.weight.size(0) % _ARM_CHANNELS == 0
    small = max(sides) <= (5 if min(sides) == 1 else 3)
    if strided or (not dilated and (line or fills or small)):
        return 0
    if line:
        return samples * call.unfolded() + bytes_of(call.out)
    panels = max(13 * call.unfolded() // 10, _ARM_PANELS)
    return min(samples * call.unfolded(), panels) + (bytes_of(call.out) if dilated else 0)


def _arm_backward(call: _Call, of_input: bool) -> int:
    """What the weight's gradient takes, or the input's if that is more."""
    x, weight, grad = bytes_of(call.x), bytes_of(call.weight), bytes_of(call.out)
    last = is_channels_last(call.x)
    if call.x.dtype == torch.bfloat16:
        if call.transposed:
            return grad if call.x.dim() == 5 or call.groups > 1 else 5 * grad
        if call.groups > 1:
            return x // 3 if last else 2 * x
        if call.x.dim() == 5:
            return 2 * grad
        return 3 * weight if last else max(0, grad - weight)
    for_weight = _unfolding_weight_gradient(call, last)
    if last or not of_input:
        return for_weight
    if call.transposed:
        return max(for_weight, x if call.x.dim() == 5 or call.groups > 1 else max(grad, 2 * x))
    # Threads unfold a sample each, or all of them work on one.
    threads, samples = torch.get_num_threads(), call.x.size(0) * call.groups
    busy = threads if threads <= samples else 1
    return max(for_weight, x - weight, busy * call.unfolded_slice() - weight)


def _unfolding_weight_gradient(call: _Call, last: bool) -> int:
    """Each thread unfolds a sample and sums up its part; on large images all work on one sample."""
    weight, threads, samples = bytes_of(call.weight), torch.get_num_threads(), call.x.size(0)
    reordered = weight if last and call.taps() > 1 else 0
    if last and call.x.dim() == 5:
        return reordered + call.unfolded()
    part = call.unfolded_slice() + 4 * weight
    if last:
        part += bytes_of(call.out if call.transposed else call.x) // (samples * call.groups)
    positions = math.prod(call.smaller().shape[3 if call.x.dim() == 5 else 2 :])
    single = samples == 1 and call.groups <= 2
    shared = single or positions // threads >= _ARM_LEAST_POSITIONS
    return reordered + part * (1 if shared else threads)


# ---- x86_64 ----------------------------------------------------------------------------------


def _x86_forward(call: _Call) -> int:
    """Input, weight and output with channels in blocks, later the output in both layouts."""
    x, weight, out = bytes_of(call.x), bytes_of(call.weight), bytes_of(call.out)
    half = call.x.element_size() == 2 and call.groups == 1
    threads = torch.get_num_threads()
    blocks = threads * _X86_HALVES if half else (threads + 1) * _X86_BLOCKS
    if is_channels_last(call.x):
        return _copies(call, 1) + (0 if call.is_depthwise() else blocks)
    if call.transposed:
        return 2 * out
    if half:
        return max(2 * out, x + blocks)
    blocked = _blocked(call.out)
    return max(_x86_input(call) + blocked + weight, blocked + out) - out


def _x86_backward(call: _Call) -> int:
    """Input and gradient in blocks, and the weight's gradient in parts."""
    x, weight, threads = bytes_of(call.x), bytes_of(call.weight), torch.get_num_threads()
    last = is_channels_last(call.x)
    if call.x.element_size() == 2 and call.groups == 1:
        parts = 11 * weight + 2 * _X86_HALVES * threads
    elif call.is_depthwise() and call.taps() >= _X86_LARGE:
        if last:
            return (1 + _X86_PARTS_OF_LARGE * call.x.size(0)) * weight
        return max(x, _unfolding_weight_gradient(call, last))
    else:
        parts = _x86_parts(call)
    if last:
        return max(_copies(call, 2), parts)
    return max(_blocked(call.out) + _x86_input(call) + parts, weight)


def _x86_input(call: _Call) -> int:
    """Bytes of the input in blocks; kernels of AVX-512 take few channels as they are, but 1x1."""
    dense = call.groups == 1 and not call.transposed and call.taps() > 1
    few = dense and call.x.size(1) < _X86_CHANNELS == _x86_block()
    return bytes_of(call.x) if few else _blocked(call.x)


def _copies(call: _Call, count: int) -> int:
    """Bytes of `count` copies of the weight, and of one more if it is not with channels last."""
    layout = _CHANNELS_LAST[call.weight.dim()]
    return (count + (not call.weight.is_contiguous(memory_format=layout))) * bytes_of(call.weight)


def _x86_parts(call: _Call) -> int:
    """Sums of the weight's gradient: all groups of threads but the first have their own."""
    shares = _x86_shares(call)
    if shares == 1:
        return 0
    few = torch.get_num_threads() < 8
    return (shares - 1) * bytes_of(call.weight) + _X86_PARTS * (1 if few else 4)


def _x86_shares(call: _Call) -> int:
    """Groups of threads between which oneDNN splits the samples, so that it moves the least."""
    threads, samples = torch.get_num_threads(), call.x.size(0)
    if call.groups > 1 or call.transposed:
        return 1
    ins, outs = (-(-side.size(1) // _X86_CHANNELS) for side in (call.x, call.out))
    moved: dict[int, int] = {}
    for shares in range(1, min(threads, samples) + 1):
        for of_out in range(1, min(threads // shares, outs) + 1):
            of_in = min(threads // shares // of_out, ins)
            some, inner, outer = -(-samples // shares), -(-ins // of_in), -(-outs // of_out)
            images = some * (inner * _places(call.x) + outer * _places(call.out))
            cost = images + 4 * inner * outer * call.taps() * _X86_CHANNELS
            moved[shares] = min(moved.get(shares, cost), cost)
    return min(moved, key=lambda shares: (moved[shares], -shares))


def _places(x: torch.Tensor) -> int:
    return math.prod(x.shape[2:])


def _x86_block() -> int:
    return _X86_CHANNELS if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def _blocked(x: torch.Tensor) -> int:
    """Bytes with the channels padded to a block; up to 3 channels are taken as they are."""
    block = _x86_block()
    channels = x.size(1)
    padded = channels if channels <= 3 else -(-channels // block) * block
    return bytes_of(x) // channels * padded


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether the channels are the innermost dimension in memory."""
    last = _CHANNELS_LAST.get(x.dim())
    return last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
