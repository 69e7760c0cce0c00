"""Pages for the browser: complete, without network, and safe whatever names a model has."""

from __future__ import annotations

import re
import xml.dom.minidom
from html import escape
from html.parser import HTMLParser

import pytest
import torch

import brim

WRONG = '<b>&"x'


def parts_of(page: str) -> tuple[list[str], list[str]]:
    """The tags of a page, and what is shown when hovering over it."""
    tags: list[str] = []
    tips: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            tips.extend(value or "" for name, value in attributes if name == "data-tip")

    Parser().feed(page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        xml.dom.minidom.parseString(svg)
    assert "http" not in page
    assert "src=" not in page
    return tags, tips


def test_an_audit_by_layer() -> None:
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(8, 8))
    model.add_module(WRONG, torch.nn.GELU())
    found = brim.audit(model, torch.ones(4, 8))
    page = found.to_html(places={WRONG: "gelu.py:1"})
    tags, tips = parts_of(page)
    assert "b" not in tags, "names are escaped"
    tip = next(tip for tip in tips if tip.startswith(WRONG))
    assert "GELU in gelu.py:1" in tip
    assert "torch.nn: 128 B" in tip
    assert len([tip for tip in tips if tip.startswith(WRONG)]) == 2, "a line and a bar"
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert {"layers, in the order of the forward", "kept so far"} <= set(shown)
    assert {"0", "50 B", "100 B", escape(WRONG)} <= set(shown)


def test_each_hint_has_a_line_of_its_own() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    )
    model[1].requires_grad_(False)
    found = brim.audit(model, torch.ones(64, 8))
    assert len(found.hint.splitlines()) == 2
    assert found.to_html().count("<br>hint: ") == 2


def test_an_audit_of_a_model_that_keeps_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU())
    page = brim.audit(model, torch.ones(4)).to_html()
    assert "keeps nothing" in page
    parts_of(page)


def test_an_estimate_over_time_and_by_place() -> None:
    layer = torch.nn.Linear(64, 64)

    def step(x: torch.Tensor) -> None:
        layer(x).relu().sum().backward()

    found = brim.estimate(step, torch.ones(32, 64), device="cpu", capacity="64KiB")
    tags, tips = parts_of(found.to_html())
    assert (tags.count("svg"), tags.count("table")) == (1, 1)
    held = brim.format_bytes(found.held_before + found.peak)
    assert any(tip.startswith(f"held {held}, ") for tip in tips)
    assert any("last allocated at test_plot_pages.py:" in tip for tip in tips)
    tip = next(tip for tip in tips if tip.startswith("weight\n"))
    assert "1 × parameter" in tip
    assert "capacity 64.00 KiB" in found.to_html()
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", found.to_html())
    assert {"allocations and releases, in order", "held", "25 %"} <= set(shown)
    assert {"0", "20 KiB", "40 KiB", "60 KiB"} <= set(shown)
    assert 'class="border"' not in found.to_html(), "one call"


def test_calls_are_told_apart_and_others_are_drawn_beside_them() -> None:
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(layer.parameters())

    def step(x: torch.Tensor) -> None:
        layer(x).relu().sum().backward()
        optimizer.step()

    found = brim.estimate(step, torch.ones(32, 64), device="cpu", calls=2)
    page = found.to_html(beside={WRONG: found})
    parts_of(page)
    assert "<h1>Memory of 2 calls</h1>" in page
    assert page.count('<line class="border"') == 1
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert {"call 1", "call 2"} <= set(shown)
    assert "25 %" not in shown
    (line,) = re.findall(r'class="line" stroke="[^"]*" d="M([^"]*)"', page)
    areas = re.findall(r'<path fill="[^"]*" d="M([^L]*) L', page)
    assert line == areas[-1], "the same call, drawn beside itself, is the upper edge"


def test_an_explanation_shows_what_is_held_and_asked_for_as_one_bar() -> None:
    brim.install_cpu_allocator()
    held = brim.memory_stats("cpu").allocated
    explained = brim.explain(device="cpu")

    def work(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * 2

    with pytest.raises(torch.OutOfMemoryError), brim.budget(held + 9 * 2**20, device="cpu"):
        explained(work)(torch.ones(2**20))  # 4 MiB, and twice as much more
    found = explained.explanation
    page = found.to_html()
    parts_of(page)
    bar = re.search(r'<div class="whole">(.*?)</div>', page)
    assert bar is not None
    most = found.in_use + found.requested
    *shares, asked = map(float, re.findall(r"width:([\d.]+)%", bar[1]))
    assert sum(shares) == pytest.approx(100 * found.in_use / most, abs=0.1 * len(shares))
    assert asked == pytest.approx(100 * found.requested / most, abs=0.1)
    (limit,) = map(float, re.findall(r"left:([\d.]+)%", bar[1]))
    assert limit == pytest.approx(100 * found.limit / most, abs=0.1)
    assert f"asked for: {brim.format_bytes(found.requested)}" in page
    assert page.count(f"limit {brim.format_bytes(found.limit)}") == 2, "below both charts"
    assert page.count('<line class="border"') == 1, "two calls were replayed"
