"""brim.estimate where code asks for values of tensors, or shapes depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim

HIDDEN = 256


class LayerDrop(nn.Module):
    """Layers that are left out at random in training, as in BART and Whisper."""

    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(12))
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw() < 0.5:
                continue
            x = layer(x)
        return x


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand([]),
    "uniform_": lambda: torch.empty(1).uniform_(0, 1),
    "randint": lambda: torch.randint(0, 10, (1,)) / 10,
    "arithmetic": lambda: 1 - torch.rand(4).mean(),
    "bernoulli": lambda: torch.bernoulli(torch.full((), 0.5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_layers_that_are_left_out_at_random_are_those_of_the_call(name: str) -> None:
    brim.install_cpu_allocator()
    model, x = LayerDrop(DRAWS[name]), torch.rand(64, HIDDEN)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    step()
    for seed in range(3):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found = brim.estimate(step, device="cpu")
        assert torch.equal(torch.get_rng_state(), before)
        with brim.PeakMeter("cpu") as meter:
            step()
        assert found.peak == pytest.approx(meter.peak, rel=0.001)
        assert (
            "random numbers decide what runs: a call that draws others needs more or less"
            in found.assumptions
        )
    assert brim.estimate(step, device="cuda", capacity="1GiB").fits


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lengths_and_masks_of_the_arguments_are_read(device: str) -> None:
    x = torch.rand(4, 1000, 64)
    mask = torch.arange(1000) < torch.tensor([[700], [20], [500], [100]])

    def work(x: torch.Tensor, mask: torch.Tensor) -> None:
        lengths = mask.long().sum(1)
        longest = int(lengths.max())
        y = x[:, :longest] * 2
        rows = x[mask]
        assert y.shape[1] == longest == 700
        assert len(rows) == sum(lengths.tolist()) == 1320

    found = brim.estimate(work, x, mask, device=device, capacity="1GiB")
    assert not any("largest possible" in text for text in found.assumptions)
    assert int(mask.sum()) == 1320


def test_what_the_call_writes_is_no_longer_known_and_stays_outside() -> None:
    counts = torch.arange(4)
    large = torch.arange(8000)

    def work(x: torch.Tensor) -> None:
        counts.add_(1)
        assert counts.tolist() == [1, 2, 3, 4]
        view = counts[1:]
        counts.copy_(x.long())
        assert int(view[0]) == 0  # not reached

    with pytest.raises(brim.EstimateError, match="depends on a value"):
        brim.estimate(work, torch.ones(4), device="cpu")
    assert counts.tolist() == [0, 1, 2, 3]

    def writes() -> None:
        assert int(large[:3].sum()) == 3
        large.zero_()
        int(large.sum())

    with pytest.raises(brim.EstimateError, match="depends on a value"):
        brim.estimate(writes, device="cpu")
    assert int(large[-1]) == 7999


SHAPES: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {  # and bytes at most
    "mask": (lambda x: x[x > 0], 1000 + 2 * 8 * 1000 + 4000),
    "nonzero": (lambda x: (x > 0).nonzero(), 1000 + 2 * 8 * 1000),
    "masked_select": (lambda x: x.masked_select(x > 0), 1000 + 4000),
    "where": (lambda x: torch.where(x > 0), 1000 + 2 * 8 * 1000),
    "unique": (lambda x: torch.ops.aten._unique2(x), 4000),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_values_is_the_largest_possible(name: str, device: str) -> None:
    fn, most = SHAPES[name]
    x = torch.ones(10, 100)
    found = brim.estimate(fn, x, device=device, capacity="1GiB")
    line = f"test_estimate_values.py:{fn.__code__.co_firstlineno}: the size of the result of"
    assert any(text.startswith(line) for text in found.assumptions)
    if device == "cpu":
        assert 0.75 * most < found.peak <= most


def test_a_loss_over_alignments_is_traced() -> None:
    scores = torch.rand(50, 4, 20, requires_grad=True)
    targets, lengths = torch.ones(4, 10, dtype=torch.long), torch.full((4,), 10)

    def step() -> None:
        loss = nn.functional.ctc_loss(scores.log_softmax(2), targets, torch.full((4,), 50), lengths)
        torch.autograd.backward(loss)

    found = brim.estimate(step, device="cpu")
    with brim.PeakMeter("cpu") as meter:
        step()
    assert found.peak == pytest.approx(meter.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # by transformers, when it is imported
@pytest.mark.parametrize("kind", ["Bart", "Deberta"])
def test_models_that_ask_for_values_are_traced_in_training(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 100, "pad_token_id": 1}
    if kind == "Bart":
        sides = ("encoder", "decoder")
        sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 64, "layerdrop": 0.5}
        options = {f"{side}_{name}": size for side in sides for name, size in sizes.items()}
        config = transformers.BartConfig(**common, d_model=32, **options)
        model = transformers.BartForConditionalGeneration(config)
    else:
        config = transformers.DebertaV2Config(
            **common, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, relative_attention=True, pos_att_type=["c2p", "p2c"],
        )  # fmt: skip
        model = transformers.DebertaV2ForTokenClassification(config)
    ids = torch.randint(3, 90, (2, 16))

    def step() -> None:
        model(input_ids=ids, labels=ids % 2).loss.backward()

    for device in ("cpu", "cuda"):
        assert brim.estimate(step, device=device, capacity="1GiB").peak > 0
