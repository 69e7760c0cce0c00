"""Microbatches beside a hand-written loop, and what it costs that ranks agree.

./dev bench dist
"""

from __future__ import annotations

import time
from collections.abc import Callable

import rank_agreement
import torch
from harness import medians, milliseconds
from results import Table
from torch import nn
from torch.nn.functional import cross_entropy

import brim


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


def microbatches(
    table: Table, name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int
) -> None:
    """A batch of 256 in parts of 64, by hand and by brim."""
    model = make()
    x, y = torch.rand(256, *shape), torch.randint(0, 10, (256,))

    def loss_fn(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(part[0]), part[1])

    def by_hand() -> torch.Tensor:
        model.zero_grad()
        total = torch.zeros(())
        for part in zip(x.split(64), y.split(64), strict=True):
            loss = loss_fn(part) * (len(part[0]) / len(x))
            loss.backward()
            total += loss.detach()
        return total

    step = brim.Microbatches(loss_fn, model=model, size=64)

    def by_brim() -> torch.Tensor:
        model.zero_grad()
        return step((x, y))

    # CPU time of one thread: what other programs do meanwhile does not count.
    works = {"by hand": by_hand, "brim": by_brim}
    times = medians(works, rounds, warmup=3, clock=time.process_time)
    ratio = times["brim"] / times["by hand"]
    table.row(f"{name}, by hand", milliseconds(times["by hand"]))
    table.row(
        f"{name}, brim.Microbatches",
        milliseconds(times["brim"]),
        f"{ratio:.3f} ×",
        "target ≤ 1.02 ×",
    )


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table = Table("A training step of 256 items in 4 parts of 64")
    microbatches(table, "MLP", mlp, (64,), 301)
    microbatches(table, "CNN", cnn, (3, 32, 32), 31)
    rank_agreement.start()


if __name__ == "__main__":
    main()
