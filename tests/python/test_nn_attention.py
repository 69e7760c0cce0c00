"""Attention with dropout on a CPU: torch's bits, and no matrix of weights kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import brim

LENGTH = 32


def heads(kind: torch.dtype = torch.float32, how_many: int = 4) -> torch.Tensor:
    return torch.randn(2, how_many, LENGTH, 8, dtype=kind, requires_grad=True)


def mask_of(kind: str) -> torch.Tensor | None:
    seen = torch.rand(2, 1, LENGTH, LENGTH) > 0.3
    return {"none": None, "bool": seen, "float": torch.zeros(seen.shape).masked_fill(~seen, -9.0)}[
        kind
    ]


def run(given: list[torch.Tensor], is_saving: bool, *args: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    if is_saving:
        with brim.saving(recompute="cheap"), brim.PeakMeter("cpu") as meter:
            output = scaled_dot_product_attention(*given, *args, **options)
    else:
        with brim.PeakMeter("cpu") as meter:
            output = scaled_dot_product_attention(*given, *args, **options)
    kept, drawn = meter.left, torch.rand(1)
    up = torch.randn(output.shape, dtype=output.dtype)
    grads = torch.autograd.grad(output, given, up)
    return kept, [output, *grads, drawn, torch.rand(1)]


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
def test_torchs_bits_and_random_numbers(mask: str, autocast: bool, options: dict[str, Any]) -> None:
    few = 2 if options.get("enable_gqa") else 4
    given = [heads(), heads(how_many=few), heads(how_many=few)]
    masked = mask_of(mask)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept, ours = run(given, True, masked, 0.25, **options)
        torchs_kept, torchs = run(given, False, masked, 0.25, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
    weights = 2 * 4 * LENGTH * LENGTH
    assert kept < torchs_kept - 4 * weights


def test_a_fused_kernel_is_left_alone() -> None:
    given = [heads(), heads(), heads()]
    with brim.saving(recompute="cheap"):
        assert not scaled_dot_product_attention(*given).grad_fn.name().startswith("brim")
        dropped = scaled_dot_product_attention(*given, dropout_p=0.1)
    assert dropped.grad_fn.name() == "brim::rerun_backward"


def test_a_mask_that_needs_a_gradient_gets_one() -> None:
    given, mask = [heads(), heads(), heads()], torch.zeros(LENGTH, LENGTH, requires_grad=True)
    torch.manual_seed(0)
    with brim.saving(recompute="cheap"):
        output = scaled_dot_product_attention(*given, mask, 0.1)
    assert torch.autograd.grad(output.sum(), mask)[0].abs().sum() > 0


def test_a_mask_that_changed_is_an_error() -> None:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    with brim.saving(recompute="cheap"):
        output = scaled_dot_product_attention(heads(), heads(), heads(), mask, 0.1)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="attn_mask was written to between forward and backward"):
        output.sum().backward()


def test_modules_that_use_transformers_table_of_attentions() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config).train()
    brim.convert(model, recompute="cheap")
    names: set[str] = set()
    todo = [model(torch.arange(LENGTH)[None])[0].grad_fn]
    while todo:
        node = todo.pop()
        names.add(node.name())
        todo += [each for each, _ in node.next_functions if each is not None]
    assert "brim::rerun_backward" in names
