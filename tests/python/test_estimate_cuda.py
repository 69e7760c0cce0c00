"""brim.estimate for CUDA: without a GPU, and beside peaks that were measured on one."""

from __future__ import annotations

import queue

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import brim

from .test_estimate import Attention, Recurrent, adam, mlp, training


def test_cuda_need_not_be_there() -> None:
    model, x = mlp(), torch.randn(512, 256)
    step = training(model, x, optimizer=adam)
    predicted = brim.estimate(step, device="cuda", capacity="24GiB", calls=2)
    assert predicted.fits
    assert predicted.reserved >= predicted.held_before + predicted.peak
    assert predicted.reserved % (2 << 20) == 0
    assert any("CPU are taken to be on cuda" in text for text in predicted.assumptions)
    assert not brim.estimate(step, device="cuda", capacity="20MiB", calls=2).fits


def test_autocast_of_cuda_halves_what_is_kept() -> None:
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    x = torch.randn(1 << 16, 512)

    def step(enabled: bool) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            y = layers(x)
        y.sum().backward()

    full = brim.estimate(step, False, device="cuda", capacity="80GiB")
    half = brim.estimate(step, True, device="cuda", capacity="80GiB")
    assert half.by_kind["activation"] == pytest.approx(full.by_kind["activation"] / 2, rel=0.15)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])  # as the user names it; both become CUDA
def test_checkpoints_under_autocast_run_again_in_its_type(device: str, reentrant: bool) -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]

    def step(x: torch.Tensor, again: bool) -> None:
        with torch.autocast(device, torch.bfloat16):
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        x.float().sum().backward()

    def kept(again: bool) -> int:
        x = torch.rand(4096, 64, requires_grad=True)
        predicted = brim.estimate(step, x, again, device="cuda", capacity="1GiB")
        return predicted.by_kind["activation"]

    assert kept(again=True) < 0.9 * kept(again=False)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch 2.11 on RMSNorm under autocast
@pytest.mark.parametrize("recompute", [None, "products"])
def test_brims_layers_have_the_types_of_torchs_under_autocast_of_cuda(
    recompute: str | None,
) -> None:
    layers: list[nn.Module] = [
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Conv1d(4, 4, 1),
        nn.PReLU(),
        nn.GroupNorm(2, 4),
        nn.ConvTranspose1d(4, 4, 1),
        nn.RMSNorm(8),
        nn.Linear(8, 8),
        nn.Softplus(),
    ]
    model = nn.Sequential(*layers)

    seen: queue.SimpleQueue[list[torch.dtype]] = queue.SimpleQueue()  # not put back

    def step() -> None:
        x, types = torch.randn(2, 4, 8), []
        with torch.autocast("cuda", torch.bfloat16):
            for layer in model:
                x = layer(x)
                types.append(x.dtype)
        seen.put(types)
        x.sum().backward()

    brim.estimate(step, device="cuda", capacity="1GiB")
    expected = seen.get()
    assert {*expected} == {torch.float32, torch.bfloat16}
    brim.convert(model, recompute=recompute)
    brim.estimate(step, device="cuda", capacity="1GiB")
    assert seen.get() == expected


def test_logits_of_a_fused_loss_are_in_the_low_type_under_autocast_of_cuda() -> None:
    weight = torch.randn(1024, 16, requires_grad=True)

    def temporary(dtype: torch.dtype) -> int:
        def step() -> None:
            x, target = torch.randn(256, 16, dtype=dtype), torch.zeros(256, dtype=torch.long)
            with torch.autocast("cuda", torch.bfloat16):
                loss = brim.nn.functional.linear_cross_entropy(x, weight, target, chunk=256)
            loss.backward()

        return brim.estimate(step, device="cuda", capacity="1GiB").by_kind["temporary"]

    assert temporary(torch.float32) == temporary(torch.bfloat16)


def test_attention_on_cuda_keeps_no_matrix_of_scores() -> None:
    def step(q: torch.Tensor) -> None:
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()

    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 4, 2048, 64, dtype=dtype, requires_grad=True)
        predicted = brim.estimate(step, q, device="cuda", capacity="80GiB")
        assert predicted.peak < 12 * q.numel() * 4 < 2 * 4 * 2048 * 2048 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_attention_with_a_learned_bias_can_be_traced_for_cuda(dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 128, 64, dtype=dtype, requires_grad=True)
    bias = torch.zeros(1, 4, 128, 128, dtype=dtype, requires_grad=True)

    def step(mask: torch.Tensor) -> None:
        functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()

    for mask in (bias, bias > 0):
        found = brim.estimate(step, mask, device="cuda", capacity="1GiB")
        assert found.peak > 3 * q.numel() * q.element_size()


def test_attention_with_gaps_in_its_mask_keeps_the_scores_on_cuda() -> None:
    q = torch.randn(2, 4, 512, 64, requires_grad=True)

    def step(mask: torch.Tensor) -> None:
        functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()

    dense, gaps = torch.zeros(1, 4, 512, 512), torch.zeros(512, 512, 4).permute(2, 0, 1)[None]
    found = [brim.estimate(step, mask, device="cuda", capacity="1GiB") for mask in (dense, gaps)]
    scores = 2 * 4 * 512 * 512 * 4
    assert found[0].by_kind.get("activation", 0) < scores < found[1].by_kind["activation"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_on_cuda_are_one_operator(kind: type[nn.RNNBase]) -> None:
    step = training(Recurrent(kind), torch.randn(256, 32, 64))
    predicted = brim.estimate(step, device="cuda", capacity="1GiB")
    outputs = 256 * 32 * 64 * 4
    gates = 5 if kind is nn.LSTM else 6
    kept = [one.bytes for one in predicted.largest if one.kind.name == "activation"]
    assert kept[0] == pytest.approx((2 * gates + 1) * outputs, rel=0.01)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("autocast", [False, True])
def test_peak_on_cuda_is_within_3_percent_of_the_measured_one(autocast: bool) -> None:
    model = nn.Sequential(*(Attention(512, 8, causal=True) for _ in range(4))).cuda()
    x = torch.randn(16, 512, 512, device="cuda")
    optimizer = adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    step()  # libraries' workspaces exist from here on
    predicted = brim.estimate(step, device="cuda")
    with brim.PeakMeter("cuda") as meter:
        step()
    assert predicted.peak == pytest.approx(meter.peak, rel=0.03)
    assert predicted.fits
