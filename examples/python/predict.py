"""How many images fit? Measure a few small batches, then ask for any size and any budget."""

import torch
from torch import nn

import brim


def main() -> None:
    """Fit a model to seven batches, and check what it says about batches never run before."""
    brim.install_cpu_allocator()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )

    def step(n: int, side: int) -> None:
        net(torch.rand(n, 3, side, side)).sum().backward()
        net.zero_grad(set_to_none=True)

    shapes = [(n, side) for n in (2, 4, 8, 16, 32) for side in (16, 32, 64, 128)]
    model = brim.MemoryModel.probe(step, shapes, device="cpu")
    print(model)

    print("\n  side      budget      largest n    measured there")
    for side, budget in ((24, "32MiB"), (40, "64MiB"), (96, "128MiB")):
        n = model.largest_batch(side, budget)
        with brim.budget(budget, device="cpu"), brim.PeakMeter("cpu") as meter:
            step(n, side)
        share = (meter.start + meter.peak) / brim.parse_bytes(budget)
        print(f"{side:>6} {budget:>11} {n:>14} {share:>15.1%}")


if __name__ == "__main__":
    main()
