"""What `brim.explain` costs while nothing fails: time of training steps with it and without.

The ways take turns, with brim's counting allocator on the CPU in all of them, as under budgets. The
time is that of the processor.

    ./dev bench explain
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from harness import Work, medians, milliseconds
from results import Table
from torch import nn

import brim

Layers = Callable[[], nn.Module]


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*[layer for _ in range(4) for layer in layers])


WORKS: Mapping[str, tuple[Layers, tuple[int, ...], int]] = {
    "transformer, 8 × 64 tokens": (transformer, (8, 64, 256), 60),
    "convolutions, 8 × 64 × 64 pixels": (convolutions, (8, 16, 64, 64), 60),
    "20 layers of 8 numbers": (
        lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]),
        (4, 8),
        1000,
    ),
}


def step_of(make: Layers, shape: tuple[int, ...]) -> Work:
    model, batch = make(), torch.randn(shape)

    def step() -> None:
        model(batch).square().mean().backward()

    return step


def in_block(step: Work) -> Work:
    def run() -> None:
        with brim.explain(device="cpu"):
            step()

    return run


def main() -> None:
    torch.set_num_threads(1)
    brim.install_cpu_allocator()
    table = Table(
        "time of a training step under brim.explain, against the bare step",
        ("step", "bare", "with block", "decorated"),
        width=40,
    )
    for name, (make, shape, rounds) in WORKS.items():
        step = step_of(make, shape)
        ways = {
            "bare": step,
            "block": in_block(step),
            "decorated": brim.explain(device="cpu")(step),
        }
        seconds = medians(ways, rounds, warmup=3, clock=time.process_time)
        bare = seconds.pop("bare")
        table.row(name, milliseconds(bare), *[f"{each / bare:.3f}" for each in seconds.values()])


if __name__ == "__main__":
    main()
