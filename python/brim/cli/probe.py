"""`brim probe`: how a function's memory grows with its size, and the largest size that fits."""

from __future__ import annotations

import argparse
import math
from typing import Any

import brim
from brim.cli import arguments
from brim.cli.table import print_table

HELP = "how a function's memory grows with its size"

_MOST_CANDIDATES = 32  # per range


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the function, its sizes, the device and the budget."""
    parser.add_argument(
        "function",
        type=arguments.function,
        help="module:function or file.py:function; called with a size, or with (n, length)",
    )
    parser.add_argument(
        "--sizes", type=_range, required=True, help="1:64, or a list: 1,2,4,8 (with --lengths: n)"
    )
    parser.add_argument("--lengths", type=_range, help="16:512, or a list")
    parser.add_argument("--device", type=arguments.device, help="cpu, cuda, …")
    parser.add_argument(
        "--budget", type=arguments.budget, help="e.g. 8GiB (default: 90%% of what is free)"
    )
    parser.add_argument("--probes", type=int, default=7, help="how many sizes to measure")


def _range(text: str) -> list[int]:
    """Parse `a:b` into integers spaced evenly on a logarithmic scale, or `a,b,c` as given.

    Example:
        >>> _range("1:6"), _range("8,2"), len(_range("1:100000"))
        ([1, 2, 3, 4, 5, 6], [8, 2], 31)
    """
    wrong = argparse.ArgumentTypeError(f"must be positive, such as 1:64 or 1,2,4, got {text}")
    first, colon, last = text.partition(":")
    parts = [first, last] if colon else text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise wrong
    numbers = [int(part) for part in parts]
    if not colon:
        return numbers
    low, high = numbers
    if low > high:
        raise wrong
    if high - low < _MOST_CANDIDATES:
        return list(range(low, high + 1))
    step = math.log(high / low) / (_MOST_CANDIDATES - 1)
    return sorted({round(low * math.exp(step * i)) for i in range(_MOST_CANDIDATES)})


def run(arguments: argparse.Namespace) -> int:
    """Probe, then print the measurements, the model and the largest sizes within the budget."""
    device = arguments.device or brim.default_device()
    sizes: list[Any] = arguments.sizes
    if arguments.lengths is not None:
        sizes = [(n, length) for n in sizes for length in arguments.lengths]
    model = brim.MemoryModel.probe(
        arguments.function, sizes, device, budget=arguments.budget, probes=arguments.probes
    )
    head = ["size", "measured", "predicted", "error"]
    print_table(head, (_row(model, sample) for sample in model.samples))
    print(f"\n{model}\n")
    stats = brim.memory_stats(device)
    limit = (
        brim.parse_bytes(arguments.budget, of=stats.limit)
        if arguments.budget
        else stats.allocated + stats.free
    )
    print(f"Largest sizes within {brim.format_bytes(limit)} on {device}:\n")
    if arguments.lengths is None:
        print(f"size {_most(model.largest_size(limit))}")
        return 0
    lengths = _some(arguments.lengths)
    rows = ([str(length), _most(model.largest_batch(length, limit))] for length in lengths)
    print_table(["length", "largest n"], rows)
    return 0


def _row(model: brim.MemoryModel, sample: brim.MemorySample) -> list[str]:
    batch = model.kind == "batch"
    shape = (sample.n, sample.length) if batch else (sample.n,)
    predicted = model.peak(*shape)
    size = " x ".join(f"{number:.0f}" for number in shape)
    measured = brim.format_bytes(round(sample.peak))
    return [
        size,
        f"> {measured}" if sample.out_of_memory else measured,
        brim.format_bytes(round(predicted)),
        "out of memory" if sample.out_of_memory else f"{predicted / sample.peak - 1:+.1%}",
    ]


def _most(size: int) -> str:
    return "any" if size >= 2**53 else str(size)


def _some(lengths: list[int]) -> list[int]:
    """At most eight of them, including the first and the last.

    Example:
        >>> _some(list(range(1, 100)))
        [1, 15, 29, 43, 57, 71, 85, 99]
    """
    if len(lengths) <= 8:
        return lengths
    return [lengths[round(i * (len(lengths) - 1) / 7)] for i in range(8)]
