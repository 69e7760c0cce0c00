"""Estimates of `recompute="auto"`: a trace gives up what a call would, and computes it again."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brim
from brim._estimate._work import flops_of

from .test_nn_blocks import Layer, convolutions, transformer


@pytest.fixture(autouse=True)
def _nothing_learned() -> Iterator[None]:
    brim.nn.reset_pressure()
    yield
    gc.collect()
    brim.nn.reset_pressure()


def training(
    model: nn.Module, x: Tensor, recompute: str | None = "auto"
) -> tuple[Callable[[], None], int]:
    """A step of a converted model, and the bytes that it holds before."""
    if recompute is not None:
        brim.convert(model, recompute=recompute)
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), x))

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step, held


def run(step: Callable[[], Any], room: int) -> tuple[int | None, brim.nn.Pressure]:
    """The peak of a real step with so many bytes beyond what is held; None if it does not fit."""
    gc.collect()
    brim.nn.reset_pressure()
    with brim.PeakMeter("cpu") as meter:
        try:
            with brim.budget(brim.memory_stats("cpu").allocated + room, "cpu"):
                step()
        except torch.OutOfMemoryError:
            return None, brim.nn.pressure()
    return meter.peak, brim.nn.pressure()


def a_transformer() -> tuple[nn.Module, Tensor]:
    return transformer(3, dropout=0.2)[0], torch.randn(8, 64, 16)


# Of convolutions, what libraries take inside is not known exactly.
@pytest.mark.parametrize(("work", "off"), [(a_transformer, 0.01), (convolutions, 0.05)])
def test_a_trace_gives_up_what_a_call_gives_up(
    work: Callable[[], tuple[nn.Module, Tensor]], off: float
) -> None:
    step, held = training(*work())
    step()
    whole, _ = run(step, 1 << 34)
    assert whole is not None
    assert brim.estimate(step, device="cpu").peak == pytest.approx(whole, rel=off)
    outcomes = set()
    for share in (0.9, 0.6, 0.3):
        room = int(share * whole)
        peak, pressure = run(step, room)
        found = brim.estimate(step, device="cpu", capacity=held + room)
        assert found.fits == (peak is not None)
        assert found.given_up is not None
        if peak is not None:
            assert found.peak == pytest.approx(peak, rel=off)
            assert found.given_up.bytes == pytest.approx(pressure.dropped_bytes, rel=10 * off)
            # What convolutions need beside their tensors decides the last block: the processor's.
            assert abs(found.given_up.blocks - pressure.blocks) <= (off > 0.01)
        assert found.given_up.peak_without == pytest.approx(whole, rel=off)
        outcomes.add((found.fits, found.given_up.blocks > 0))
    assert outcomes >= {(True, False), (True, True)}  # values alone, and blocks


def test_blocks_that_run_again_are_extra_work() -> None:
    layers = 4
    model = nn.Sequential(*(Layer(32) for _ in range(layers)))
    step, held = training(model, torch.randn(8, 64, 32, requires_grad=True))
    whole = brim.estimate(step, device="cpu")
    assert whole.given_up is None
    assert "gives up" not in str(whole)
    found = brim.estimate(step, device="cpu", capacity=held + whole.peak // 3)
    assert found.fits
    assert found.given_up is not None
    assert found.given_up.blocks == layers - 1
    # Backward takes twice the products of forward. So a block that runs again is a third more.
    assert found.given_up.extra_work == pytest.approx((layers - 1) / layers / 3)
    assert str(found.given_up) in str(found)
    assert found.to_dict()["given_up"]["blocks"] == layers - 1


def test_traces_and_steps_know_nothing_of_each_other() -> None:
    step, held = training(*a_transformer())
    room = brim.estimate(step, device="cpu").peak // 2
    first = brim.estimate(step, device="cpu", capacity=held + room)
    assert first.given_up is not None
    assert brim.nn.pressure() == brim.nn.Pressure(*[0] * len(brim.nn.Pressure._fields))
    assert run(step, room)[1].foreseen == 0  # no plan
    with brim.budget(brim.memory_stats("cpu").allocated + room, "cpu"):
        step()
    before = brim.nn.pressure()
    assert before.foreseen > 0
    second = brim.estimate(step, device="cpu", capacity=held + room, calls=2)
    assert second.fits
    assert second.given_up is not None
    assert second.given_up.blocks == 2 * first.given_up.blocks
    assert brim.nn.pressure() == before


def test_after_a_trace_that_failed_the_next_one_is_the_same() -> None:
    model, x = a_transformer()
    step, held = training(model, x)
    room = brim.estimate(step, device="cpu").peak // 2
    graphs = []

    def fails() -> None:
        graphs.append(model(x))
        raise KeyError("some")

    first = brim.estimate(step, device="cpu", capacity=held + room)
    with pytest.raises(KeyError, match="some"):
        brim.estimate(fails, device="cpu", capacity=held + room)
    assert not graphs
    assert brim.estimate(step, device="cpu", capacity=held + room).given_up == first.given_up


@pytest.mark.parametrize("amp", [False, True])
def test_on_a_device_that_is_not_there(amp: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(256, 0.1) for _ in range(4)))
        x = torch.empty(64, 1024, 256)
    brim.convert(model, recompute="auto")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = model(x).square().mean()
        loss.backward()

    whole = brim.estimate(step, device="cuda")
    assert whole.given_up is None
    capacity = whole.reserved // 2
    found = brim.estimate(step, device="cuda", capacity=capacity)
    assert found.fits
    assert found.given_up is not None
    assert found.given_up.blocks > 0
    assert 0.8 * capacity < found.reserved <= capacity


def test_what_if_it_were_in_a_region() -> None:
    model, x = a_transformer()
    step, held = training(model, x, recompute=None)
    peaks = {
        recompute: brim.estimate(step, device="cpu", recompute=recompute).peak
        for recompute in (None, "cheap", "products", "auto")
    }
    assert peaks["products"] < peaks["cheap"] < peaks[None]
    assert peaks["auto"] > peaks["cheap"]
    assert not any(hasattr(m, "recompute") for m in model.modules())
    found = brim.estimate(step, device="cpu", recompute="auto", capacity=held + peaks["products"])
    assert found.fits
    assert found.given_up is not None
    assert found.given_up.blocks == 0  # that takes a converted model
    for call in (brim.estimate, lambda f, **kw: brim.largest_size(f, "n", 1, **kw)):
        with pytest.raises(ValueError, match=r'recompute must be None.* "auto", got \'all\''):
            call(lambda n=1: None, device="cpu", recompute="all")


def test_the_largest_size_is_that_of_a_call_that_gives_up() -> None:
    plain = nn.Sequential(*(Layer(16) for _ in range(2)))
    model = copy.deepcopy(plain)
    brim.convert(model, recompute="auto")

    def step(n: int, model: nn.Module = model) -> None:
        model(torch.zeros(n, 64, 16)).square().mean().backward()
        model.zero_grad(set_to_none=True)

    step(1)
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    others = brim.memory_stats("cpu").allocated
    budget = others + held + (2 << 20)
    size = brim.largest_size(step, "n", budget, device="cpu")
    assert run(lambda: step(size), 2 << 20)[0] is not None
    assert run(lambda: step(size + 1), 2 << 20)[0] is None
    assert size > 1.5 * brim.largest_size(step, "n", budget, device="cpu", model=plain)


def test_heads_that_share_keys_count_like_heads_with_their_own() -> None:
    queries, shared, own = (torch.empty(2, heads, 16, 32, device="meta") for heads in (8, 2, 8))
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    work = [flops_of(attention.default, (queries, keys, keys), {}, None) for keys in (shared, own)]
    assert work == [4 * 2 * 8 * 16 * 16 * 32] * 2
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    work = [
        flops_of(backward, (queries, queries, keys, keys, queries), {}, None)
        for keys in (shared, own)
    ]
    assert work[0] == work[1] > 0
