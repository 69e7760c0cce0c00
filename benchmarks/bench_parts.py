"""Training steps under a budget: recomputation, another pass, and what Microbatches takes.

A transformer that was converted with recompute="auto" trains under a share of the peak that its
whole batch has. Its step runs as a whole, where values are dropped and computed again, and in the
fewest parts that drop nothing; beside them that of `brim.Microbatches`, after its trials. The ways
take turns, and a figure is the median time of a step.

    ./dev bench parts                       on the CPU
    ./dev bench parts -- --rounds 40        steadier figures
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable

import torch
from harness import medians
from results import Table
from torch import Tensor, nn

import brim


def layers(count: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(count)
        )
    )


# Layers, width, items, tokens of an item, share of the peak. Small operators take about as long for
# half of the items as for all, so that another pass costs more than a few that run again. Large
# ones do not, and where most blocks must run again, another pass costs less.
SETTINGS = {
    "4 layers, 16 tokens": (4, 32, 16, 16, 0.75),
    "4 layers, 128 tokens": (4, 256, 16, 128, 0.55),
}


class Trained:
    """A model with gradients that a step adds to, under a budget."""

    def __init__(self, model: nn.Module, batch: Tensor) -> None:
        self.model, self.batch, self.limit = model, batch, 1 << 62

    def loss(self, part: Tensor) -> Tensor:
        return self.model(part).square().mean()

    def step(self, run: Callable[[Tensor], object]) -> None:
        self.model.zero_grad()
        with brim.budget(self.limit, "cpu"):
            run(self.batch)

    def in_parts(self, count: int) -> Callable[[Tensor], None]:
        def run(batch: Tensor) -> None:
            for part in batch.tensor_split(count):
                (self.loss(part) * (len(part) / len(batch))).backward()

        return run

    def given_up(self, run: Callable[[Tensor], object]) -> int:
        """Values that the last of a few steps gave up."""
        for _ in range(4):
            before = brim.nn.pressure()
            self.step(run)
        now = brim.nn.pressure()
        return now.dropped + now.foreseen - before.dropped - before.foreseen


def run_row(name: str, rounds: int, table: Table) -> None:
    count, features, items, tokens, share = SETTINGS[name]
    trained = Trained(layers(count, features), torch.randn(items, tokens, features))
    brim.convert(trained.model, recompute="auto")
    trained.step(trained.in_parts(1))
    trained.model.zero_grad()
    gc.collect()
    with brim.PeakMeter("cpu") as meter:
        trained.step(trained.in_parts(1))
    trained.model.zero_grad()
    trained.limit = brim.memory_stats("cpu").allocated + int(share * meter.peak)
    brim.nn.reset_pressure()
    whole = trained.given_up(trained.in_parts(1))
    parts = next(n for n in range(2, items + 1) if not trained.given_up(trained.in_parts(n)))
    chosen = brim.Microbatches(trained.loss, trained.model, device="cpu")
    for _ in range(16):
        trained.step(chosen)
    times = medians(
        {
            "whole": lambda: trained.step(trained.in_parts(1)),
            "parts": lambda: trained.step(trained.in_parts(parts)),
            "chosen": lambda: trained.step(chosen),
        },
        rounds,
    )
    cells = [f"{share}", f"{times['whole'] * 1e3:.1f} ({whole})"]
    cells += [f"{times['parts'] * 1e3:.1f} ({parts})"]
    cells += [f"{times['chosen'] * 1e3:.1f} ({-(-items // chosen.size)})"]
    table.row(name, *cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="steps that are timed (default 20)")
    rounds = parser.parse_args().rounds
    table = Table(
        "Milliseconds of a step; in brackets values given up, or parts",
        ("network", "of the peak", "whole", "parts", "Microbatches"),
        width=24,
    )
    for name in SETTINGS:
        run_row(name, rounds, table)


if __name__ == "__main__":
    main()
