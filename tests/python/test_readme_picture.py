"""README's picture: its numbers are README's, and each of them can be read."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any

import pytest

figure_module = pytest.importorskip("matplotlib.figure")
agg = pytest.importorskip("matplotlib.backends.backend_agg")

ROOT = Path(__file__).parents[2]
PICTURE = (ROOT / "docs" / "readme.svg").read_text()
MIB = 2**20
NARROW = 700  # pixels: the column of the site


@pytest.fixture(scope="module")
def readme() -> Any:
    spec = spec_from_file_location("readme_picture", ROOT / "docs" / "pictures" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "number", ["2504", "15052", "14700", "258.09 MiB", "parts of 2048", "81 batches", "154"]
)
def test_its_numbers_are_those_of_the_examples(number: str) -> None:
    assert number in (ROOT / "README.md").read_text()
    assert number in PICTURE


def test_its_texts_are_large_enough_on_the_site() -> None:
    width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', PICTURE)[0])
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", PICTURE)]
    assert len(sizes) > 20
    assert min(sizes) * NARROW / width >= 10


def test_no_line_passes_through_a_number(readme: Any) -> None:
    figure = figure_module.Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    needs = [("whole", 258 * MIB, False), ("near", 90 * MIB, True), ("small", 50 * MIB, True)]
    readme.paint_needs(axes, needs, 96 * MIB)
    agg.FigureCanvasAgg(figure).draw()
    renderer = figure.canvas.get_renderer()
    shown = [text for text in axes.texts if text.get_text()]
    assert [text.get_text() for text in shown[:3]] == ["258.00 MiB", "90.00 MiB", "50.00 MiB"]
    boxes = [text.get_window_extent(renderer) for text in shown]
    bars = [patch.get_window_extent(renderer) for patch in axes.patches]
    for box, other in product(boxes, [*(line.get_window_extent() for line in axes.lines), *bars]):
        assert not box.overlaps(other)


def test_what_is_largest_stands_first(readme: Any) -> None:
    rows = readme.measure_layers()
    kept = [torch_nn for _, torch_nn, _ in rows]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) > 1
