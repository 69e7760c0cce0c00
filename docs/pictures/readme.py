"""Draws docs/readme.svg, the picture of README.md: its four examples, measured on the CPU.

python docs/pictures/readme.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import nn

import brim
from brim.data import PackedBatchSampler

MIB = 2**20
DARK, LIGHT, LINE = "#1f5a8a", "#c3cdd6", "#b3341f"  # told apart in grey too


def limit(axes: Axes, value: float, text: str) -> None:
    """A dashed line for a budget, with its name."""
    axes.axhline(value, color=LINE, linestyle="--", linewidth=1)
    axes.set_title(f"- -  {text}", loc="right", fontsize=7, color=LINE)


def function(axes: Axes) -> None:
    """Peak against batch size, and the sizes that `maximize` tried."""

    def knn(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> torch.Tensor:
        return torch.cat([torch.cdist(part, y).argmin(1) for part in x.split(batch_size)])

    x, y = torch.rand(32768, 128), torch.rand(2048, 128)
    sizes = [1024 * n for n in (1, 2, 4, 8, 16, 24, 32)]
    peaks = []
    for size in sizes:
        with brim.PeakMeter("cpu") as meter:
            knn(x, y, size)
        peaks.append(meter.peak / MIB)
    with brim.budget("128MiB", device="cpu"):
        _, attempts = brim.maximize(knn).record(x, y, batch_size=len(x))
    axes.plot(sizes, peaks, color=LIGHT, linewidth=2, zorder=1)
    limit(axes, 128, "budget 128 MiB")
    for attempt in attempts:
        need = torch.tensor(peaks)[torch.tensor(sizes) >= attempt.size][0].item()
        if attempt.fitted:
            axes.plot(attempt.size, attempt.peak / MIB, "o", color=DARK)
            axes.annotate(
                f"runs with {attempt.size}",
                (attempt.size, attempt.peak / MIB),
                xytext=(4, -14),
                textcoords="offset points",
            )
        else:
            axes.plot(attempt.size, need, "x", color=LINE)
    axes.annotate(
        "out of memory", (sizes[-1], peaks[-1]), xytext=(-70, -3), textcoords="offset points"
    )
    axes.set(xlabel="batch size", ylabel="peak, MiB", xlim=(0, 36000), ylim=(0, None))


def training_step(axes: Axes) -> None:
    """The peak of a step: foreseen, measured, and in parts."""
    model = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 10))
    batch = torch.randn(8192, 256), torch.randint(10, (8192,))

    def loss_fn(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(part[0]), part[1])

    def whole() -> None:
        loss_fn(batch).backward()

    bars = {"foreseen,\nnot run": brim.estimate(whole, device="cpu").peak}
    with brim.PeakMeter("cpu") as meter:
        whole()
    bars["whole\nbatch"] = meter.peak
    model.zero_grad()
    step = brim.Microbatches(loss_fn, model=model)
    with brim.budget("96MiB", device="cpu"):
        for _ in range(3):
            model.zero_grad()
            with brim.PeakMeter("cpu") as meter:
                step(batch)
    bars[f"parts of\n{step.size}"] = meter.peak
    drawn = axes.bar(
        list(bars),
        [value / MIB for value in bars.values()],
        color=["white", LIGHT, DARK],
        edgecolor=DARK,
    )
    axes.bar_label(drawn, fmt="%.0f", label_type="center", color="grey")
    limit(axes, 96, "budget 96 MiB")
    axes.set(ylabel="peak, MiB", ylim=(0, 260))


def layers(axes: Axes) -> None:
    """Bytes that each layer keeps for backward."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.Flatten()),
    )
    model.eval().requires_grad_(False)[0].requires_grad_(True)
    rows = [row for row in brim.audit(model, torch.randn(8, 3, 32, 32)).layers if row.torch_nn]
    places = torch.arange(len(rows))
    axes.barh(
        places - 0.2, [row.torch_nn / MIB for row in rows], 0.4, color=LIGHT, label="torch.nn"
    )
    axes.barh(places + 0.2, [row.brim / MIB for row in rows], 0.4, color=DARK, label="brim")
    axes.set_yticks(places, [row.type for row in rows])
    axes.invert_yaxis()
    axes.legend(frameon=False)
    axes.set(xlabel="kept for backward, MiB")


def batches(axes: Axes) -> None:
    """Tokens of the batches of an epoch: a fixed number of samples, and under a budget."""
    lengths = torch.randn(2000).mul(0.6).exp().mul(60).long().clamp(10, 300)
    fixed = [len(part) * int(part.max()) for part in lengths.split(13)]
    sampler = PackedBatchSampler(lengths, 4096, cost="padded", shuffle=True)
    packed = [len(batch) * int(lengths[batch].max()) for batch in sampler]
    axes.plot(fixed, color="#8796a3", linewidth=1, label=f"13 samples each: {len(fixed)} batches")
    axes.plot(packed, color=DARK, linewidth=1.5, label=f"brim: {len(packed)} batches")
    limit(axes, 4096, "budget 4096 tokens")
    axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel="batch of the epoch", ylabel="tokens, with padding", ylim=(0, 4600))


def main() -> None:
    """Draw all four beside each other."""
    torch.manual_seed(0)
    mpl.rcParams |= {
        "font.size": 7.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "brim",
    }
    figure, grid = plt.subplots(1, 4, figsize=(13, 2.7), layout="constrained")
    titles = ("a function adapts", "a step is foreseen", "layers keep less", "batches are filled")
    drawings = (function, training_step, layers, batches)
    for axes, title, draw in zip(grid, titles, drawings, strict=True):
        axes.set_title(title, loc="left", fontweight="bold")
        draw(axes)
    figure.savefig(Path(__file__).parents[1] / "readme.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
