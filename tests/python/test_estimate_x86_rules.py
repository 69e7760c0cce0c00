"""What oneDNN takes on x86_64 against the number of threads: the rules, on any processor.

Bytes beyond the outputs, measured with brim.PeakMeter on a Xeon with AVX-512 and 16 cores (torch
2.11). Shapes are samples, channels, output channels, kernel, side, and rows, inner, columns.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from brim._estimate import _cpu_convolutions, _cpu_libraries

THREADS = (1, 2, 4, 8, 16)
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last
BACKWARD = [
    ((32, 16, 16, 3, 32), CONTIGUOUS, (4194304, 4224256, 4242944, 4280320, 4355072)),
    ((8, 64, 64, 3, 32), CONTIGUOUS, (4194304, 4350336, 4645760, 4670592, 4671104)),
    ((8, 16, 32, 3, 32), CONTIGUOUS, (1572864, 1599744, 1653376, 1727872, 1728384)),
    ((8, 128, 128, 3, 16), CONTIGUOUS, (2097152, 2097152, 2097152, 2097152, 2138624)),
    ((4, 512, 512, 3, 7), CONTIGUOUS, (9439232,) * 5),
    ((8, 64, 64, 3, 32), LAST, (295168, 295168, 451456, 476288, 476800)),
    ((8, 256, 256, 3, 8), LAST, (4719616,) * 5),
]
DEPTHWISE_BACKWARD = [
    ((8, 16, 7, 32), CONTIGUOUS, (524224, 524224, 524224, 1706240, 3412224)),
    ((8, 96, 7, 28), CONTIGUOUS, (2408064, 2408064, 2408064, 2408064, 3663104)),
    ((8, 64, 3, 32), CONTIGUOUS, (4194304, 4194304, 4194304, 4197120, 4202240)),
    ((8, 96, 7, 28), LAST, (4836096,) * 5),
]
FORWARD = [
    ((8, 16, 16, 3, 32), CONTIGUOUS, (533504,) * 5),
    ((8, 64, 64, 3, 32), LAST, (155672, 159792, 168032, 184512, 217472)),
    ((4, 512, 512, 3, 7), LAST, (9445400, 9449520, 9457760, 9474240, 9507200)),
]
PRODUCTS = [
    ((512, 256, 256), "by rows", (37888, 75392, 150400, 300416, 600448)),
    ((512, 1024, 256), "by rows", (136192, 272000, 543616, 1086848, 2173312)),
    ((4096, 64, 64), "by rows", (13312, 26240, 52096, 103808, 207232)),
    ((512, 256, 256), "by columns", (169088, 337664, 674816, 1349120, 1649152)),
    ((2048, 256, 256), "by columns", (169088, 337664, 674816, 1349120, 2697728)),
]


@pytest.fixture(params=range(len(THREADS)), ids=[f"{count} threads" for count in THREADS])
def at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The place of a number of threads in THREADS."""
    place: int = request.param
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS[place])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    return place


def call_of(
    samples: int, channels: int, outs: int, kernel: int, side: int, groups: int, layout: object
) -> _cpu_convolutions._Call:
    x = torch.empty(samples, channels, side, side)
    weight = torch.empty(outs, channels // groups, kernel, kernel)
    out = torch.empty(samples, outs, side, side)
    tensors = [tensor.to(memory_format=layout) for tensor in (x, weight, out)]  # type: ignore[call-overload]
    padding = [kernel // 2] * 2
    return _cpu_convolutions._Call(*tensors, [1, 1], padding, [1, 1], False, [0, 0], groups)


@pytest.mark.parametrize(("shape", "layout", "measured"), FORWARD)
def test_forward(
    shape: tuple[int, int, int, int, int], layout: object, measured: tuple[int, ...], at: int
) -> None:
    found = _cpu_convolutions._x86_forward(call_of(*shape, 1, layout))
    assert found == pytest.approx(measured[at], rel=0.02)


@pytest.mark.parametrize(("shape", "layout", "measured"), BACKWARD)
def test_backward(
    shape: tuple[int, int, int, int, int], layout: object, measured: tuple[int, ...], at: int
) -> None:
    found = _cpu_convolutions._x86_backward(call_of(*shape, 1, layout))
    assert found == pytest.approx(measured[at], rel=0.03)


@pytest.mark.parametrize(("shape", "layout", "measured"), DEPTHWISE_BACKWARD)
def test_backward_where_each_channel_is_convolved_by_itself(
    shape: tuple[int, int, int, int], layout: object, measured: tuple[int, ...], at: int
) -> None:
    samples, channels, kernel, side = shape
    call = call_of(samples, channels, channels, kernel, side, channels, layout)
    assert _cpu_convolutions._x86_backward(call) == pytest.approx(measured[at], rel=0.01)


@pytest.mark.parametrize(("shape", "order", "measured"), PRODUCTS)
def test_products_of_halves(
    shape: tuple[int, int, int], order: str, measured: tuple[int, ...], at: int
) -> None:
    rows, inner, columns = shape
    a = torch.empty(rows, inner, dtype=torch.bfloat16)
    b = torch.empty(inner, columns, dtype=torch.bfloat16)
    a = a if order == "by rows" else a.t().contiguous().t()
    with mock.patch("platform.machine", return_value="x86_64"):
        found = _cpu_libraries.product(a, b, a @ b)
    assert found == pytest.approx(measured[at], rel=0.01)
