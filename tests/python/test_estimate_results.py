"""Results of operators in a trace: the quick way gives what torch's own gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import brim
from brim._estimate._quick import on_meta

aten = torch.ops.aten

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "in gaps": lambda x: torch.cat([x, x], 3)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "one sample": lambda x: x[:1],
}


COMMON = ("contiguous", "channels last")
HALF, SLOW = torch.bfloat16, pytest.mark.slow


def calls(x: torch.Tensor) -> list[tuple[Any, ...]]:
    """Operators and their arguments, for an input of four dimensions."""
    channels, width = x.size(1), x.size(3)
    float_of = x.new_empty(channels, dtype=torch.float32)
    weight, row = x.new_empty(channels), x.new_empty(width)
    wide = torch.float32 if x.device.type == "cuda" else x.dtype
    means = x.new_empty([*x.shape[:3], 1], dtype=wide)
    stats = x.new_empty(channels, dtype=wide)
    flat = x.reshape(x.size(0), -1)
    square = flat.new_empty(flat.size(1), 7)
    norm = (weight, weight, weight, weight)
    found: list[tuple[Any, ...]] = [
        (aten.native_batch_norm.default, x, *norm, True, 0.1, 1e-5),
        (aten.native_batch_norm.default, x, *norm, False, 0.1, 1e-5),
        (aten.native_batch_norm.default, x, *[float_of] * 4, True, 0.1, 1e-5),
        (aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5),
        (aten.native_layer_norm.default, x, [width], row, row, 1e-5),
        (aten.native_layer_norm.default, x, [x.size(2), width], None, None, 1e-5),
        (aten.add.Tensor, x, weight[:, None, None]),
        (aten.add_.Tensor, x, x),
        (aten.mul.Tensor, x, row),
        (aten.gelu_backward.default, x, x),
        (aten.silu_backward.default, x, x.contiguous()),
        (aten.threshold_backward.default, x.contiguous(), x, 0),
        (aten.where.self, x > 0, x, row),
        (aten._softmax.default, x, -1, False),
        (aten._softmax_backward_data.default, x, x, 1, x.dtype),
        (aten.cat.default, [x, x], 1),
        (aten.clone.default, x),
        (aten.roll.default, x, [1, 2], [2, 3]),
        (aten.slice.Tensor, x, 2, 1, 3),
        (aten.slice_backward.default, x, [*x.shape[:3], 2 * width], 3, 0, width, 1),
        (aten.select.int, x, 1, 2),
        (aten.permute.default, x, [0, 2, 3, 1]),
        (aten.split.Tensor, x, 2, 1),
        (aten.addmm.default, square[0], flat, square),
        (aten.mm.default, flat, square),
        (aten.bmm.default, x[0].contiguous(), x[0].transpose(1, 2)),
    ]
    for mask in ((True, True, True), (False, True, True), (True, False, False)):
        batch, layer = aten.native_batch_norm_backward, aten.native_layer_norm_backward
        wanted = list(mask)
        found += [
            (batch.default, x, x, *norm[:3], stats, stats, True, 1e-5, wanted),
            (layer.default, x, x, [width], means, means, row, row, wanted),
        ]
    return found


def shown(result: Any) -> list[Any]:
    results = [result] if isinstance(result, torch.Tensor) or result is None else result
    return [
        None if each is None else (each.shape, each.stride(), each.dtype, each.storage_offset())
        for each in results
    ]


@pytest.mark.parametrize(
    ("layout", "device", "dtype"),
    [
        pytest.param(*each, marks=() if each[0] in COMMON and each[2] is not HALF else SLOW)
        for each in itertools.product(LAYOUTS, ["cpu", "cuda"], [torch.float32, HALF])
    ],
)
def test_results_are_those_of_torchs_own_fake_tensors(
    layout: str, device: str, dtype: torch.dtype
) -> None:
    shape = (2, 6, 8, 8)
    with FakeTensorMode(), torch.no_grad():
        theirs = calls(LAYOUTS[layout](torch.empty(shape, device=device, dtype=dtype)))
        expected = [shown(func(*args)) for func, *args in theirs]
    for (func, *args), result in zip(theirs, expected, strict=True):
        quick = on_meta(func, device == "cpu")
        assert quick is not None, func

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            made = torch.empty(size, dtype=tensor.dtype, device="meta")
            return made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        twins = torch.utils._pytree.tree_map_only(torch.Tensor, twin, args)
        try:
            found = quick(*twins)
        except NotImplementedError:  # torch's own way is taken
            assert layout != "contiguous"
        else:
            if func is aten.native_batch_norm_backward.default and not args[-1][0]:
                # On the CPU the kernel gives none, of torch's fake ones a tensor.
                result = [None, *result[1:]] if device == "cpu" else result
            assert shown(found) == result, func


@pytest.mark.parametrize("train", [True, False])
def test_a_batch_norm_whose_input_needs_no_gradient_makes_none(train: bool, held: int) -> None:
    norm, x = torch.nn.BatchNorm2d(8).train(train), torch.randn(16, 8, 16, 16)

    def step() -> None:
        norm(x).mean().backward()
        norm.zero_grad()

    found = brim.estimate(step, device="cpu")
    with brim.PeakMeter("cpu") as meter:
        step()
    assert abs(found.peak - meter.peak) <= 1024


def test_a_result_that_is_known_is_made_anew_for_each_call() -> None:
    kept: list[torch.Tensor] = []

    def work(x: torch.Tensor) -> None:
        for _ in range(4):
            kept.append(x * 2)
        views = kept[-1].unbind()
        assert views[0].untyped_storage()._cdata == kept[-1].untyped_storage()._cdata
        assert len({each.untyped_storage()._cdata for each in kept}) == 4
        assert kept[0].add_(1) is kept[0]
        kept.clear()

    for rows in (8, 16, 8):
        found = brim.estimate(work, torch.zeros(rows, 4), device="cpu")
        assert found.peak == 4 * 4 * rows * 4


def test_a_setting_that_changes_results_counts() -> None:
    def work(x: torch.Tensor) -> None:
        torch.set_default_dtype(torch.float32)
        (x / 2).exp()
        torch.set_default_dtype(torch.float64)
        (x / 2).exp()

    found = brim.estimate(work, torch.zeros(1000, dtype=torch.int64), device="cpu")
    assert found.peak == 2 * 8000
