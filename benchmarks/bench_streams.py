"""Streams on one core: samples one by one beside samples in blocks, and mixtures.

Sizes are log-normal, like those of proteins (median 300, from 30 to 2000); the budget is 16384.
Times cover an epoch: reading the samples from memory, packing them with the default look-ahead, and
handing out the batches. They are processor time of one process.

    ./dev bench streams
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from bench_batching import BUDGET, MILLION, ROUNDS, protein_sizes, rate
from harness import Work, medians, milliseconds, progress
from results import Table

from brim.data import bucket_stream, even, least_padding_boundaries, mix, pack_stream

BLOCK = 65_536  # rows, as Parquet's row groups often have


def consume(batches: Iterable[object]) -> None:
    deque(batches, maxlen=0)


def ways(sizes: torch.Tensor) -> dict[str, dict[str, Work]]:
    """What is timed, by heading and name."""
    numbers = sizes.tolist()
    rows = list(range(len(numbers)))
    texts = [b"x" * size for size in numbers]
    blocks = list(sizes.split(BLOCK))
    boundaries = least_padding_boundaries(sizes, 30).tolist()

    def packed(data: Any, **options: Any) -> Work:
        return lambda: consume(pack_stream(data, BUDGET, **options))

    def bucketed(data: Any, **options: Any) -> Work:
        return lambda: consume(bucket_stream(data, boundaries, BUDGET, **options))

    halves = [blocks[::2], blocks[1::2]]
    objects = [texts[::2], texts[1::2]]
    return {
        "samples one by one": {
            "pack_stream, sum, sizeof=len of bytes": packed(texts, cost="sum"),
            "pack_stream, sum, sizeof=list.__getitem__": packed(
                rows, sizeof=numbers.__getitem__, cost="sum"
            ),
            "pack_stream, padded": packed(texts),
            "bucket_stream, padded, 30 buckets": bucketed(texts),
            "mix of two, pack_stream, sum": packed(mix(objects, [1, 1], at_end="drop"), cost="sum"),
        },
        f"samples in blocks of {BLOCK:,}": {
            "pack_stream, sum": packed(blocks, cost="sum", blocks=True),
            "pack_stream, sum, shuffle": packed(blocks, cost="sum", blocks=True, shuffle=True),
            "pack_stream, padded": packed(blocks, blocks=True),
            "bucket_stream, padded, 30 buckets": bucketed(blocks, blocks=True),
            "mix of two, pack_stream, sum": packed(
                mix(halves, [1, 1], at_end="drop", sizeof=len), cost="sum", blocks=True
            ),
            "even, pack_stream, sum": lambda: consume(
                even(pack_stream(blocks, BUDGET, cost="sum", blocks=True))
            ),
        },
    }


def main() -> None:
    """Prints a row for each way: samples per second."""
    torch.set_num_threads(1)
    sizes = protein_sizes(MILLION)
    for heading, works in ways(sizes).items():
        table = Table(f"{MILLION:,} {heading}")
        progress(heading)
        for name, seconds in partial(medians, clock=time.process_time)(works, ROUNDS).items():
            target = (
                "target ≥ 5 M/s"
                if "blocks" in heading and name.startswith("pack_stream, sum")
                else ""
            )
            table.row(name, rate(MILLION, seconds), milliseconds(seconds), target)


if __name__ == "__main__":
    main()
