"""The rules for CUDA's libraries beside what was asked for on an H200 (torch 2.11, cuDNN 9.19)."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim._estimate import _autocast
from brim._estimate._cuda_convolutions import Convolution
from brim._estimate._cuda_kernels import CudaTemporaries
from brim._estimate._cuda_rnns import reserved_by_cudnn_rnn, workspace_of_cudnn_rnn

aten = torch.ops.aten

# mode, type, layers, directions, width of the input and of the state, batch, steps, training,
# workspace, what is kept for backward
_RECURRENT = [
    (1, "float32", 1, 2, 256, 512, 64, 200, True, 310117120, 52429056),
    (1, "float32", 2, 1, 256, 200, 64, 200, True, 190518784, 30720256),  # persistent
    (1, "float16", 1, 1, 64, 512, 64, 256, True, 80610048, 16777472),
    (1, "bfloat16", 2, 2, 256, 200, 64, 200, True, 115398400, 30720256),
    (2, "float32", 1, 2, 300, 512, 64, 256, False, 522650368, 0),
    (2, "float32", 3, 1, 64, 64, 96, 200, True, 134284288, 83558656),  # persistent
    (2, "float16", 1, 1, 300, 128, 96, 200, True, 123763712, 24576256),  # persistent
    (2, "float16", 1, 1, 256, 1024, 64, 256, False, 732955392, 0),  # persistent, large
    (2, "bfloat16", 2, 1, 300, 200, 96, 256, True, 83882240, 108134656),
    (3, "float32", 3, 2, 256, 200, 96, 256, True, 369788416, 786432256),
    (3, "float32", 3, 1, 64, 64, 96, 256, True, 158024704, 125829376),  # persistent
    (3, "float16", 2, 2, 64, 512, 64, 200, True, 208929536, 340787456),
    (3, "bfloat16", 3, 1, 300, 200, 64, 200, True, 61209792, 102400256),
]


@pytest.mark.parametrize("row", _RECURRENT)
def test_recurrent_layers_take_what_was_measured(row: Any) -> None:
    mode, name, layers, directions, entered, width, batch, steps, train, workspace, kept = row
    options = {"device": "meta", "dtype": getattr(torch, str(name))}
    gates = {1: 1, 2: 4, 3: 3}[mode]
    weights = []
    for layer in range(layers):
        inputs = entered if layer == 0 else directions * width
        for shape in ((inputs,), (width,), (), ()) * directions:
            weights.append(torch.empty(gates * width, *shape, **options))
    x = torch.empty(steps, batch, entered, **options)
    state = torch.empty(layers * directions, batch, width, **options)
    sizes: Any = (mode, width, 0, layers, False, 0.0, train, directions == 2, [], None)
    args = (x, weights, 4, None, state, None, *sizes)
    all_of_it = workspace + kept
    assert workspace_of_cudnn_rnn(args) == pytest.approx(workspace, abs=0.01 * all_of_it)
    assert reserved_by_cudnn_rnn(args) == pytest.approx(kept, abs=0.01 * all_of_it)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_in_float16_under_every_autocast_of_cuda(
    kind: Any,
) -> None:
    net, x = kind(256, 512, 2, batch_first=True), torch.randn(32, 256, 256)
    seen: queue.SimpleQueue[torch.dtype] = queue.SimpleQueue()

    def step(enabled: bool) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            y = net(x)[0]
        seen.put(y.dtype)
        y.float().sum().backward()

    full, half = (brim.estimate(step, on, device="cuda", capacity="8GiB") for on in (False, True))
    assert [seen.get(), seen.get()] == [torch.float32, torch.float16]
    assert half.by_kind["activation"] < 0.65 * full.by_kind["activation"]


def test_packed_sequences_are_one_operator_too() -> None:
    net, x, state = nn.GRU(64, 128), torch.randn(1200, 64), torch.zeros(1, 16, 128)
    samples = torch.tensor([16] * 50 + [8] * 50)
    weights: Any = net._flat_weights

    def step() -> None:
        out = torch.gru(x, samples, state, weights, True, 1, 0.0, True, False)[0]
        out.sum().backward()  # type: ignore[no-untyped-call]

    found = brim.estimate(step, device="cuda", capacity="1GiB")
    kept = [one.bytes for one in found.largest if one.kind.name == "activation"]
    assert kept[0] == 6 * 100 * 16 * 128 * 4  # as if all had all steps


def test_gradients_of_recurrent_weights_share_a_buffer() -> None:
    net, x = nn.GRU(32, 64), torch.randn(4, 2, 32)

    def step() -> None:
        net(x)[0].sum().backward()

    found = brim.estimate(step, device="cuda", capacity="1GiB")
    own = [one for one in found.largest if one.kind.name == "gradient"]
    assert [one.bytes for one in own] == [4 * sum(p.numel() for p in net.parameters())]


# input, outputs, kernel, stride, dilation, groups, type; workspaces of output and both gradients
_CONVOLUTIONS = [
    ((64, 3, 224, 224), 64, 7, 2, 1, 1, "float32", (244094464, None, None)),
    ((32, 3, 224, 224), 64, 3, 2, 1, 1, "float32", (0, None, 0)),
    ((4, 2048, 32, 32), 256, 3, 1, 36, 1, "float32", (None, 56623616, 207618560)),
    ((4, 2048, 32, 32), 512, 3, 1, 1, 1, "float32", (None, 79692288, 79692288)),
    ((32, 512, 13, 13), 1000, 1, 1, 1, 1, "float32", (0, 0, 65536000)),
    ((16, 1024, 14, 14), 1024, 1, 1, 1, 1, "bfloat16", (0, 0, 12845568)),
    ((32, 320, 7, 7), 1280, 1, 1, 1, 1, "bfloat16", (0, 0, 52428800)),
    ((16, 256, 56, 56), 256, 3, 2, 1, 32, "float32", (64299520, 64299520, 65479680)),
    ((16, 24, 28, 28, 28), 58, 3, 1, 3, 1, "bfloat16", (None, 61899792, 63374871)),
    ((16, 256, 12544), 256, 3, 1, 4, 1, "bfloat16", (205914259, 205914259, 220856999)),
    ((16, 256, 4096), 256, 3, 1, 1, 256, "float32", (0, 0, 0)),
]


@pytest.mark.parametrize("row", _CONVOLUTIONS)
def test_convolutions_take_what_was_measured(row: Any) -> None:
    shape, outputs, kernel, stride, dilation, groups, name, measured = row
    sides = len(shape) - 2
    of = {1: aten.conv1d, 2: aten.conv2d, 3: aten.conv3d}[sides]
    x = torch.empty(shape, dtype=getattr(torch, str(name)), device="meta")
    weight = x.new_empty(outputs, x.size(1) // groups, *[kernel] * sides)
    padding = dilation * (kernel // 2)
    out = of(x, weight, None, [stride] * sides, [padding] * sides, [dilation] * sides, groups)
    one = Convolution(x, weight, out, [stride] * sides, [dilation] * sides, groups, 132)
    touched = (x.numel() + out.numel()) * x.element_size()
    found = (one.of_output(), one.of_input(), one.of_weight())
    for mine, real in zip(found, measured, strict=True):
        if real is not None:
            assert mine == pytest.approx(real, abs=0.02 * (touched + real))


def test_a_transposed_convolution_is_the_other_one_backwards() -> None:
    x = torch.empty(32, 64, 64, 64, dtype=torch.bfloat16, device="meta")
    weight = x.new_empty(64, 3, 4, 4)
    rest = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    out = aten.convolution(x, weight, None, *rest)
    rules = CudaTemporaries(torch.device("cuda"))
    taken = list(rules.of(aten.convolution.default, (x, weight, None, *rest), {}, [out], False))
    assert [one.bytes for one in taken] == [pytest.approx(25182720, rel=0.01)]


@pytest.mark.parametrize(("dim", "copies"), [(1, 1), (2, 0)])
def test_transforms_of_inner_dimensions_copy_their_input(dim: int, copies: int) -> None:
    x = torch.empty(64, 1024, 512, dtype=torch.complex64, device="meta")
    rules = CudaTemporaries(torch.device("cuda"))
    for op, args, more in (
        (aten._fft_c2c.default, (x, [dim], 0, True), 0),
        (aten._fft_c2r.default, (x, [dim], 2, 2 * x.size(dim) - 2), 1),  # writes over its input
    ):
        taken = [one.bytes for one in rules.of(op, args, {}, [x], False)]
        assert taken == [(copies + more) * x.numel() * 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_every_type_are_traced(dtype: torch.dtype) -> None:
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped product")
    x = torch.randn(64, 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 32, 16, dtype=dtype, requires_grad=True)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    shapes: queue.SimpleQueue[list[torch.Size]] = queue.SimpleQueue()

    def step() -> None:
        y = torch._grouped_mm(x, weight, offs=ends)
        y.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert weight.grad is not None
        shapes.put([y.shape, x.grad.shape, weight.grad.shape])

    brim.estimate(step, device="cuda", capacity="1GiB")
    assert shapes.get() == [torch.Size([64, 16]), x.shape, weight.shape]


def test_autocast_knows_every_operator_that_torch_casts() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    casts = {n.removeprefix("aten::") for n in names if n.startswith("aten::")}
    casts = {name for name in casts if has(f"aten::{name}", "AutocastCUDA")}
    lists = (_autocast._LOWER, _autocast._FLOAT32, _autocast._FLOAT32_RESULT, _autocast._WIDEST)
    known = {name for text in lists for name in text.split()} | {"_cudnn_rnn"}
    # An error; sums that take no copy; names of dimensions, which nobody uses.
    left = {name for name in casts - known if not name.startswith(("norm.", "binary_cross"))}
    assert {name for name in left if "name" not in name.lower()} == set()


def test_the_capability_of_the_assumed_gpu_can_be_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU's own is told")
    x = torch.randn(8)

    def step() -> torch.Tensor:
        return x + torch.cuda.get_device_capability()[0]

    assert brim.estimate(step, device="cuda", capacity="1GiB").peak > 0
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.get_device_capability()
