"""Draws docs/readme.svg, the picture of README.md: its four examples, measured on the CPU.

python docs/pictures/readme.py
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import nn

import brim
from brim.data import PackedBatchSampler
from brim.plot._canvas import (
    BLUE,
    ORANGE,
    PALE,
    RED,
    Series,
    bars_across,
    legend_below,
    rows_down,
    tidy,
)
from brim.plot._plan import paint_shares

MIB = 2**20
FORESEEN = {"color": "white", "edgecolor": ORANGE, "hatch": "////", "label": "foreseen, not run"}
MEASURED = {"color": BLUE, "label": "measured"}


def measure_function() -> list[tuple[str, int, bool]]:
    """Each number of rows, the bytes that it needs, and whether it ran."""
    x, y, result = torch.rand(32768, 128), torch.rand(2048, 128), torch.empty(32768)

    @brim.chunked(32768)
    def nearest(rows: torch.Tensor, start: int, end: int, y: torch.Tensor) -> None:
        result[start:end] = torch.cdist(rows, y).amin(1)

    with brim.budget("128MiB", device="cpu"):
        _, attempts = nearest.record(x, y)
    whole = brim.estimate(lambda: torch.cdist(x, y).amin(1), device="cpu")
    names = ["first", *["then"] * (len(attempts) - 1)]
    ran = [
        (f"{name} {each.size}", each.held + (each.peak or 0), True)
        for name, each in zip(names, attempts, strict=True)
    ]
    return [(f"all {len(x)} rows", whole.peak, False), *ran]


def measure_step() -> list[tuple[str, int, bool]]:
    """The whole batch and parts of it, the bytes that they need, and whether they ran."""
    model = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 10))
    batch = torch.randn(8192, 256), torch.randint(10, (8192,))

    def loss_fn(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(part[0]), part[1])

    whole = {
        device: brim.estimate(lambda: loss_fn(batch).backward(), device=device).peak
        for device in ("cuda", "cpu")
    }
    step = brim.Microbatches(loss_fn, model=model)
    with brim.budget("96MiB", device="cpu"):
        _, attempts = step.record(batch)
    last = attempts[-1]
    return [
        ("whole batch\non a GPU", whole["cuda"], False),
        ("whole batch\non the CPU", whole["cpu"], False),
        (f"parts of {step.size}\non the CPU", last.held + (last.peak or 0), True),
    ]


def measure_layers() -> list[tuple[str, int, int]]:
    """Each layer, and what torch.nn and brim keep for its backward, the largest first."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Conv2d(64, 128, 3),
    ).eval()
    model[1:].requires_grad_(False)
    layers = brim.audit(model, torch.randn(8, 3, 32, 32)).layers
    rows = [(row.type, row.torch_nn, row.brim) for row in layers if row.torch_nn]
    return sorted(rows, key=lambda row: -row[1])


def measure_batches() -> dict[str, tuple[float, float]]:
    """How full batches are, and the padding in them: a fixed number of samples, and a budget."""
    budget = 4096
    lengths = torch.randint(10, 300, (2000,), generator=torch.manual_seed(0))
    most = budget // int(lengths.max())
    sizes = [len(part) * int(part.max()) for part in lengths.split(most)]
    fill = sum(sizes) / (budget * len(sizes))
    report = PackedBatchSampler(lengths, budget, cost="padded", shuffle=True).report()
    return {
        f"{most} samples each\n{len(sizes)} batches\n{100 * fill:.2f} % full": (
            fill,
            1 - int(lengths.sum()) / sum(sizes),
        ),
        f"brim\n{report.batches} batches\n{100 * report.fill:.2f} % full": (
            report.fill,
            report.padding,
        ),
    }


def paint_needs(axes: Any, needs: list[tuple[str, int, bool]], budget: int) -> None:
    """A bar for each, the first at the top, with its bytes on the right, where no line passes."""
    for look, ran in ((FORESEEN, False), (MEASURED, True)):
        rows = [(place, need) for place, (_, need, found) in enumerate(needs) if found is ran]
        axes.barh(*zip(*rows, strict=True), 0.7, **look)
    for place, (_, need, _) in enumerate(needs):
        text = brim.format_bytes(need)
        axes.text(1, place, text, ha="right", va="center", transform=axes.get_yaxis_transform())
    axes.axvline(budget, color=RED, linestyle="--", linewidth=1.5)
    name = f"budget {brim.format_bytes(budget)}"
    look = {"color": RED, "fontsize": "small", "va": "center"}
    axes.annotate(name, (budget, -0.75), (4, 0), textcoords="offset points", **look)
    axes.set_xlim(0, 1.5 * max(need for _, need, _ in needs))
    rows_down(axes, [name for name, _, _ in needs], 1)
    legend_below(axes)


def paint_layers(axes: Any, rows: list[tuple[str, int, int]]) -> None:
    """Two bars for each layer."""
    names, *columns = zip(*rows, strict=True)
    looks = (("torch.nn", PALE), ("brim", BLUE))
    shown = [Series(*look, values) for look, values in zip(looks, columns, strict=True)]
    bars_across(axes, names, shown)
    legend_below(axes)


def main() -> None:
    """Measure each in a process of its own, as README's examples are, and draw them."""
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "brim"}
    measures = (measure_function, measure_step, measure_layers, measure_batches)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        found: list[Any] = [processes.submit(measure).result() for measure in measures]
    figure = Figure(figsize=(8, 6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
    (function, step), (layers, batches) = figure.subplots(2, 2)
    for axes, title in (
        (function, "A function adapts"),
        (step, "A training step is foreseen"),
        (layers, "Layers keep less for backward"),
        (batches, "Batches are filled"),
    ):
        tidy(axes, title)
    paint_needs(function, found[0], 128 * MIB)
    paint_needs(step, found[1], 96 * MIB)
    paint_layers(layers, found[2])
    paint_shares(batches, found[3])
    figure.savefig(Path(__file__).parents[1] / "readme.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
