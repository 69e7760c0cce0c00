"""Draws the pictures of the site into a folder; the build calls this (see conf.py).

python docs/pictures/pages.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import brim
from brim.data import PackedBatchSampler


def nearest(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> torch.Tensor:
    """How far the nearest of y is, for each row of x."""
    return torch.cat([torch.cdist(part, y, p=1).amin(1) for part in x.split(batch_size)])


def pressed(layers: int) -> brim.nn.PressureRecord:
    """The first step of a transformer under half of its peak."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    brim.convert(model, recompute="auto")
    x = torch.randn(8, 128, 64)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    step()
    with brim.PeakMeter("cpu") as meter:
        step()
    with brim.budget(brim.memory_stats("cpu").allocated + meter.peak // 2, device="cpu"):
        return brim.nn.record_pressure(step, device="cpu")


def draw(folder: Path) -> None:
    """Draw all of them."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)

    x, y = torch.rand(8192, 32), torch.rand(1024, 32)
    with brim.budget("20MiB", device="cpu"):
        _, attempts = brim.maximize(nearest).record(x, y, batch_size=len(x))
    attempts.plot(folder / "attempts.svg", budget=20 * 2**20)

    sizes = [2**n for n in range(6, 14)]
    model = brim.MemoryModel.probe(lambda n: nearest(x[:n], y, n), sizes, device="cpu")
    model.plot(folder / "memory_model.svg", budget="40MiB")

    layers = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    optimizer = torch.optim.AdamW(layers.parameters())

    def step(batch_size: int) -> None:
        optimizer.zero_grad()
        layers(torch.randn(batch_size, 1024)).square().mean().backward()
        optimizer.step()

    estimate = brim.estimate(step, 8192, device="cuda", capacity="1GiB", calls=2)
    estimate.plot(folder / "estimate.svg")

    images = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    )
    images.eval().requires_grad_(False)[0].requires_grad_(True)
    brim.audit(images, torch.randn(8, 3, 32, 32)).plot(folder / "audit.svg")

    pressed(layers=8).plot(folder / "pressure.svg")

    lengths = torch.randn(2000).mul(0.6).exp().mul(60).long().clamp(10, 300)
    sampler = PackedBatchSampler(lengths, 4096, cost="padded", shuffle=True, seed=0)
    sampler.report().plot(folder / "plan.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
