"""What brim.audit prints: the table, the dict, the hints."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import brim

from .audit_cases import GRADIENT, C, frozen, image, make


def test_the_table_and_the_dict() -> None:
    audit = brim.audit(nn.Sequential(make(), nn.ReLU(), make()), image(**GRADIENT))
    lines = str(audit).splitlines()
    assert lines[0].split() == ["layer", "type", "torch.nn", "brim", "cheap", "least"]
    kept = ["32.00", "KiB", *("1.00", "KiB") * 3]
    assert lines[2].split() == ["1", "ReLU", *kept]
    assert lines[3] == "… 2 layers keep nothing"
    assert lines[5].split() == ["total", *kept]
    assert lines[6] == (
        'brim keeps 3.1% of what torch.nn keeps, 3.1% with recompute="cheap"; the least is 3.1%'
    )
    assert lines[7] == (
        "hint: brim.convert(model) keeps 1.00 KiB instead of 32.00 KiB; most is saved at 1 (ReLU): "
        "1.00 KiB instead of 32.00 KiB"
    )
    figures = json.loads(json.dumps(audit.to_dict()))
    total = {"torch_nn": 32768, "brim": 1024, "cheap": 1024, "least": 1024}
    assert figures["layers"][1] == {"name": "1", "type": "ReLU"} | total
    assert figures["total"] == total
    assert figures["hint"] == lines[7]


def test_a_row_whose_least_is_counted_elsewhere_is_explained() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 64))
    audit = brim.audit(model, torch.ones(32, 64))
    dropout = audit.layers[2]
    assert dropout.least > dropout.brim  # the dropout's output, which the last layer keeps
    assert audit.least <= audit.brim
    note = "note: where a row's least is above the others, a value counts at another layer"
    assert note in str(audit)
    assert note not in str(brim.audit(nn.Sequential(make(), nn.ReLU()), image(**GRADIENT)))


def test_equal_rows_of_repeated_blocks_are_one_line() -> None:
    def block() -> nn.Module:
        return nn.Sequential(make(), nn.GELU())

    model = nn.Sequential(*(block() for _ in range(4)), nn.GELU())
    audit = brim.audit(model, image(**GRADIENT))
    assert len(audit.layers) == 9
    lines = str(audit).splitlines()
    assert lines[2].split()[:6] == ["0-3.1", "×", "4", "GELU", "128.00", "KiB"]
    assert lines[3].split()[:2] == ["4", "GELU"]
    assert lines[4] == "… 4 layers keep nothing"
    # Each column begins at the same character.
    assert len({line.index("KiB") for line in (lines[2], lines[6])}) == 1


@pytest.mark.parametrize("recompute", [None, "cheap"])
def test_the_hint_names_what_is_not_yet_done(recompute: str | None) -> None:
    model = nn.Sequential(
        make(), nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
    )
    x = image(**GRADIENT)
    expected = 'hint: brim.convert(model, recompute="cheap") keeps'
    assert brim.audit(model, x).hint.startswith(expected)
    brim.convert(model, recompute=recompute)
    assert brim.audit(model, x).hint.startswith(expected) == (recompute is None)


def test_the_hint_on_frozen_batch_norms_was_measured() -> None:
    model = frozen(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), nn.ReLU())
    model[0].requires_grad_(True)
    hint = brim.audit(model, image()).hint
    expected = "after .eval() on them brim.convert(model) keeps 1.6% of torch.nn's instead of 5"
    assert expected in hint.splitlines()[0]  # it saves more than the conversion alone
    assert hint.splitlines()[1].startswith('hint: brim.convert(model, recompute="cheap") keeps')
    assert model[1].training
    assert ".eval()" not in brim.audit(model.eval(), image()).hint


def test_the_hint_names_a_class_that_is_not_recognised() -> None:
    class Soft(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.erfinv(torch.tanh(x) * 0.5)

    model = nn.Sequential(make(), Soft(), make(), Soft())
    audit = brim.audit(model, image(**GRADIENT))
    line = next(line for line in audit.hint.splitlines() if "Soft" in line)
    rows = [layer for layer in audit.layers if layer.type == "Soft"]
    kept = brim.format_bytes(sum(min(row.brim, row.cheap) for row in rows))
    least = brim.format_bytes(sum(row.least for row in rows))
    assert line == (
        f"hint: 2 × Soft ({__name__}) keep {kept}, at the least {least}: "
        "brim does not recognise this class"
    )


def test_the_hint_of_a_model_that_keeps_nothing() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    assert brim.audit(model, x).hint.startswith("hint: backward needs only parameters")
    assert brim.audit(frozen(model), x).hint.startswith("hint: no parameter needs a gradient")
