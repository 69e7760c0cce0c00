"""A second `brim.convert` of a model: the last call counts, and the report says what it did."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn

import brim

from .nn_modules import Gate

LEVELS = [None, "cheap", "products"]


class Residual(nn.Module):
    """Its sums are redirected only where layers ask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.gate = nn.Linear(8, 8), nn.GELU(), Gate()
        self.block, self.last = Residual(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.gate(F.silu(self.act(self.first(x))), scale=1)))


def state_of(model: nn.Module) -> list[Any]:
    """Classes and marks: all that `convert` changes."""
    marks = ("recompute", "runs_again", "_brim_recompute")
    return [
        (type(module), {mark: getattr(module, mark, None) for mark in marks})
        for module in model.modules()
    ]


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("second", LEVELS)
def test_the_last_conversion_counts(first: str | None, second: str | None) -> None:
    twice, once = Model(), Model()
    brim.convert(twice, recompute=first)
    report = brim.convert(twice, recompute=second)
    brim.convert(once, recompute=second)
    ignored = "_brim_recompute"  # of brim's own layers it only says who set the others
    for ours, expected in zip(state_of(twice), state_of(once), strict=True):
        assert ours[0] is expected[0]
        assert ours[1] | {ignored: None} == expected[1] | {ignored: None}
    assert not report.replaced
    assert bool(report.changed) == (first != second)
    for each in report.changed:
        assert each.name not in {layer.name for layer in report.kept}


def test_the_report_says_what_became_of_the_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2), nn.Tanhshrink())
    brim.convert(model)
    report = brim.convert(model, recompute="cheap")
    reason = 'recompute is "cheap" now, it was None'
    assert [(each.name, each.reason) for each in report.changed] == [(n, reason) for n in "012"]
    assert f"0 layers replaced, 1 kept as they are, 3 modules changed: {reason}" in str(report)
    again = brim.convert(model, recompute="cheap")
    assert not again.changed
    assert [each.reason for each in again.kept] == ["brim's already"] * 3 + [
        "brim has no counterpart"
    ]
    assert 'recompute is None now, it was "cheap"' in str(brim.convert(model))


def test_plain_after_cheap_keeps_what_plain_keeps() -> None:
    x = torch.randn(64, 8)
    found = []
    for levels in ([None], ["cheap"], ["cheap", None], ["products", None]):
        torch.manual_seed(0)
        model = Model()
        for level in levels:
            brim.convert(model, recompute=level)
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        found.append(brim.audit(model, x, progress=False).brim)
    plain, cheap, *later = found
    assert cheap < plain
    assert later == [plain, plain]


def test_a_second_conversion_leaves_alone_what_it_is_not_asked_for() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), brim.nn.Linear(8, 8))
    model[2].recompute = True  # by hand
    brim.convert(model, only="0", recompute="cheap")
    assert not brim.convert(model, only="1").changed
    assert [layer.recompute for layer in model] == [True, False, True]
    report = brim.convert(model)
    assert [each.name for each in report.changed] == ["0"]
    assert [layer.recompute for layer in model] == [False, False, True]


def test_the_loss_of_a_language_model_follows() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    assert "" in [each.name for each in brim.convert(model).functions]
    for level, recomputes in (("cheap", True), (None, False), (None, False), ("products", True)):
        before = model._loss_function.keywords["recompute"]
        report = brim.convert(model, recompute=level)
        assert model._loss_function.keywords["recompute"] is recomputes
        assert ("" in [each.name for each in report.changed]) == (before != recomputes)
        assert "" not in [each.name for each in report.functions]


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("layer", ["brim's", "derived", "recognised", "region"])
def test_torch_jit_script_names_restore(layer: str) -> None:
    class Mine(nn.ReLU):
        pass

    models = {
        "brim's": nn.Sequential(nn.Linear(8, 8)),
        "derived": nn.Sequential(Mine()),
        "recognised": nn.Sequential(nn.MultiheadAttention(8, 2)),
        "region": Gate(),
    }
    model = models[layer]
    brim.convert(model)
    with pytest.raises(RuntimeError, match=r"brim\.restore\(model\)"):
        torch.jit.script(model)
    if layer == "brim's":
        x = torch.randn(2, 8)
        expected = model(x)
        assert torch.equal(torch.jit.script(brim.restore(model))(x), expected)
