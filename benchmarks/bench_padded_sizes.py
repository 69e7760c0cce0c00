"""Samples that are padded in several sizes: how full batches are, and how much of them is padding.

First by the cost itself: batches alike in all sizes beside batches of samples that are sorted by
their own cost, of translations (n × (source + target)), images (n × height × width) and alignments
(n × length × depth). Then by measured peaks: `fit` of both sizes on random small networks on the
CPU, as the share of the budget that the batches of an epoch need.

    ./dev bench padded_sizes
    ./dev bench padded_sizes -- 12        # networks for the second part
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from results import Table

import brim
from brim.data import PackedBatchSampler, SizeAwareBatchSampler

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
import padded_networks as networks

SAMPLES = 100_000
PER_BATCH = 24  # samples of the mean cost


def by_cost() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = {
        "translation": ("padded", networks.lengths_of_pairs(generator, SAMPLES, 0.25)),
        "images": ("padded_product", networks.shapes_of_images(generator, SAMPLES, 800)),
        "alignments": ("padded_product", networks.shapes_of_alignments(generator, SAMPLES, 2.5)),
    }
    table = Table(f"{SAMPLES:,} samples, a budget of {PER_BATCH} samples of the mean cost")
    for kind, (cost, sizes) in kinds.items():
        own = (sizes.sum(1) if cost == "padded" else sizes.prod(1)).double()
        budget = int(PER_BATCH * own.mean())
        before = SizeAwareBatchSampler(own.argsort(descending=True), sizes, budget, cost=cost)
        begin = time.process_time()
        packed = PackedBatchSampler(sizes, budget, cost=cost, shuffle=True)
        packed.plan()
        seconds = time.process_time() - begin
        for name, sampler in {"sorted by cost": before, "PackedBatchSampler": packed}.items():
            report = sampler.report()
            table.row(
                f"{kind}, {name}",
                f"{report.batches} batches",
                f"fill {report.fill:.3f}, useful {1 - report.padding:.3f}",
                "" if sampler is before else f"{SAMPLES / seconds / 1e6:.2f} M/s",
            )


def fitted_fill(program: Any, sizes: torch.Tensor) -> tuple[float, float]:
    """The mean and the largest share of the budget that batches of an epoch need."""
    gc.collect()
    held = brim.memory_stats("cpu").allocated
    made = PackedBatchSampler.fit(
        range(len(sizes)), program.step, sizes, held + program.room, "cpu",
        shuffle=True, progress=False,
    )  # fmt: skip
    used = []
    for batch in made:
        with brim.PeakMeter("cpu") as meter:
            program.step(batch)
        used.append((meter.start + meter.peak - held) / program.room)
    full = sorted(used)[1:] or used  # without the emptiest one, for which samples were left
    return sum(full) / len(full), max(used)


def by_peak(programs: int) -> None:
    title = (
        f"{programs} random networks under 2 to 8 MiB: mean share of the budget, and the largest"
    )
    table = Table(title)
    fills: dict[str, list[tuple[float, float]]] = {}
    for seed in range(programs):
        program = networks.Program(seed, samples=500)
        program.step([0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of networks that sizes do not determine, and left out
            fills.setdefault(program.kind, []).append(fitted_fill(program, program.sizes))
    for kind, each in fills.items():
        mean, most = torch.tensor(each).T
        table.row(kind, f"{mean.mean():.3f}", f"largest {most.max():.3f}")


def main() -> None:
    torch.set_num_threads(1)
    brim.install_cpu_allocator()
    by_cost()
    by_peak(int(sys.argv[1]) if len(sys.argv) > 1 else 30)


if __name__ == "__main__":
    main()
