"""Would this training step fit a 24 GiB card, and with which batch size? No GPU is needed."""

import torch
from torch import nn

import brim


def main() -> None:
    """Print what the step would hold at its peak, and the largest batch."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch_size: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(batch_size, 1024)
        model(x).square().mean().backward()
        optimizer.step()

    # Two calls: the first one makes the optimizer's state.
    print(brim.estimate(step, 8192, device="cuda", capacity="24GiB", calls=2))
    largest = brim.largest_size(step, "batch_size", "24GiB", device="cuda", calls=2)
    print(f"\nlargest batch: {largest}")


if __name__ == "__main__":
    main()
