"""Parameters that are watched for changes, since nothing puts them back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import brim
from brim._state.watched import Watched


def watch(**named: torch.Tensor) -> Watched:
    return Watched(named, known=[*named.values()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(3000),
        lambda: torch.rand(40, 50).t(),
        lambda: torch.rand(8, 9, 10).permute(2, 0, 1),
        lambda: torch.rand(()),
        lambda: torch.rand(7, dtype=torch.complex128),
        lambda: torch.rand(7, dtype=torch.complex64).conj(),
        lambda: torch.rand(7).bfloat16(),
    ],
)
def test_a_write_to_data_is_seen_in_any_layout(make: Callable[[], torch.Tensor]) -> None:
    weight, other = nn.Parameter(make()), nn.Parameter(make())
    watched = watch(weight=weight, other=other, empty=nn.Parameter(torch.empty(0)))
    weight.data += 1
    assert watched.changed() == ["weight"]


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_quantized_values_are_not_read() -> None:
    weight = torch.quantize_per_tensor(torch.rand(5), 0.1, 0, torch.quint8)
    assert watch(weight=nn.Parameter(weight, requires_grad=False)).changed() == []


def test_a_parameter_that_is_not_contiguous_is_not_copied() -> None:
    brim.install_cpu_allocator()
    weight = nn.Parameter(torch.rand(1024, 1024).t())
    with brim.PeakMeter("cpu") as meter:
        assert watch(weight=weight).changed() == []
    assert meter.peak < weight.nbytes / 64


def test_many_parameters_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {str(i): nn.Parameter(torch.rand(5, i + 1)) for i in range(9)}
    watched = watch(**weights)
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(t), read(t))[1])
    weights["4"].data.zero_()
    assert watched.changed() == ["4"]
    assert len(reads) == 1  # each waits for the device
