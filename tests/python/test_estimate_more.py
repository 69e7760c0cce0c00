"""brim.estimate: values in texts, unknown capacities, models without values, checkpoints."""

from __future__ import annotations

import copy
import queue

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import brim
from brim._estimate import _estimate

from .test_estimate import Attention, adam


@pytest.mark.parametrize("how", ["{:.3f}", "{:8}", "{}"])
def test_a_number_in_a_text_is_assumed_and_said(how: str) -> None:
    def log(x: torch.Tensor) -> None:
        texts.put(how.format(x.sum()))
        texts.put(f"{(x > 0).sum():d}")

    texts: queue.SimpleQueue[str] = queue.SimpleQueue()
    line = log.__code__.co_firstlineno + 2
    predicted = brim.estimate(log, torch.ones(4), device="cpu")
    assert texts.get() == how.format(torch.nan) or how == "{}"
    assert texts.get() == "0"
    assert any(f"test_estimate_more.py:{line}" in text for text in predicted.assumptions)
    log(torch.ones(4))
    assert texts.get() == how.format(torch.tensor(4.0))


def test_whether_it_fits_is_not_known_without_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    def large() -> None:
        torch.empty(10**6, 10**6).sum()

    monkeypatch.setattr(_estimate, "stats_of", lambda _: None)  # there may be a GPU
    predicted = brim.estimate(large, device="cuda")
    assert predicted.fits is None
    assert predicted.to_dict()["fits"] is None
    assert "whether it fits is not known: cuda:0 is not there" in repr(predicted)
    assert brim.estimate(large, device="cuda", capacity="80GiB").fits is False


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_on_the_meta_device_is_as_if_it_were_there(device: str) -> None:
    model = nn.Sequential(Attention(64, 4), nn.Dropout(), nn.GroupNorm(4, 16))
    meta = copy.deepcopy(model).to("meta")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(8, 16, 64)).sum().backward()
        optimizer.step()

    found = [
        brim.estimate(step, each, adam(each.parameters()), device=device, capacity="1GiB", calls=2)
        for each in (model, meta)
    ]
    assert (found[0].peak, found[0].held_before) == (found[1].peak, found[1].held_before)
    assert found[0].by_kind == found[1].by_kind
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert {type(p) for p in meta.parameters()} == {nn.Parameter}


def test_random_states_that_checkpoints_keep_count() -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))

    def step() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        layers.zero_grad(set_to_none=False)

    step()
    predicted = brim.estimate(step, device="cpu")
    with brim.PeakMeter("cpu") as meter:
        step()
    assert predicted.peak == pytest.approx(meter.peak, rel=0.01)
