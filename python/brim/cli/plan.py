"""Put samples into batches under a budget, from their lengths alone.

The lengths are whole numbers in a text file (between spaces, commas or line ends), or a column of
a .npy, .npz, .arrow, .feather or .parquet file; of lists or strings in it the lengths are taken.
`-` is standard input, as text; so is no file at all behind a pipe.

Exits with 1 if a sample is left out because it is over the budget, or if there is no batch.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import brim
from brim import data
from brim._table import Part, Table
from brim._whole_file import write_whole
from brim.cli import arguments as types
from brim.cli.lengths import lengths_file, name_of, read_lengths
from brim.cli.result import Result, add_output_options

HELP = "batches of samples of different lengths, under a budget"
EXAMPLE = """\
  brim plan lengths.txt --max-total-size 16384 --shuffle --seed 0 --output plan.npz
  brim plan data.parquet --column tokens --method bucket --max-total-size 8192
  cut -f 2 samples.tsv | brim plan --max-total-size 16384

reading the plan again:
  batches = pyarrow.parquet.read_table("plan.parquet")["indices"].to_pylist()
  plan = numpy.load("plan.npz")       # batch b: indices[offsets[b]:offsets[b + 1]]
  pairs = numpy.load("plan.npy")      # a row per sample: number of its batch, its index"""

_ONLY = {
    "window": "packed",
    "buckets": "bucket",
    "boundaries": "bucket",
    "batch_size": "bucket",
    "drop_last": "bucket",
}
_REPORTED = (
    "samples batched batches fill padding world_size imbalance fill_histogram padding_histogram"
)
_BARS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the samplers."""
    add = parser.add_argument
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    buckets = parser.add_mutually_exclusive_group()

    def number(
        name: str, least: int, text: str, default: int | None = None, to: Any = parser
    ) -> None:
        to.add_argument(name, metavar="N", type=types.whole(least), default=default, help=text)

    add(
        "file",
        nargs="?" if is_piped else None,
        default="-",
        type=lengths_file,
        help="the lengths: text, .npy, .npz, .arrow, .parquet, …, or - for standard input, which "
        "need not be named behind a pipe",
    )
    add("--column", help="which column of the file, if it has several")
    add("--max-total-size", metavar="N", type=_number, help="the budget of a batch")
    add(
        "--method",
        choices=("packed", "ordered", "bucket"),
        default="packed",
        help="batches as full as possible (the default), in the samples' order, or of like lengths",
    )
    add(
        "--cost",
        choices=("padded", "sum", "padded_squared", "flops", "count"),
        default="padded",
        help="what a batch costs; padded (the default) is n times the longest",
    )
    add("--shuffle", action="store_true", help="take the samples in random order")
    number("--seed", 0, "determines the order with --epoch (default: 0)", 0)
    number("--epoch", 0, "default: 0", 0)
    number("--max-batch-size", 1, "the most samples in a batch")
    number("--batch-multiple", 1, "each batch has a multiple of N samples (default: 1)", 1)
    add(
        "--oversize",
        choices=("leave_out", "error", "alone", "truncate"),
        default="leave_out",
        help="what to do with a sample over the budget (default: leave_out)",
    )
    number("--world-size", 1, "how many ranks share the batches", 1)
    number("--rank", 0, "whose batches --output writes (default: 0)", 0)
    number("--window", 1, "packed: samples that are packed together")
    number("--buckets", 1, "bucket: how many, with the least padding (default: 30)", to=buckets)
    buckets.add_argument(
        "--boundaries",
        metavar="N,N,…",
        type=_boundaries,
        help="bucket: their boundaries, such as 0,64,256,1024",
    )
    number("--batch-size", 1, "bucket: instead of a budget")
    add("--drop-last", action="store_true", help="bucket: leave out batches below --batch-size")
    add(
        "--output",
        type=types.output_file(".npy", ".npz", ".parquet"),
        metavar="FILE",
        help="write the plan: .parquet, .npz or .npy",
    )
    add_output_options(parser, plot=True)


def _number(text: str) -> float:
    try:
        value = int(text) if text.isdecimal() else float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number such as 16384, got {text}")
    return value


def _boundaries(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    ascend = all(a < b for a, b in pairwise(numbers))
    if len(numbers) < 2 or not ascend or not all(map(math.isfinite, numbers)):
        raise argparse.ArgumentTypeError(
            f"must be two or more ascending numbers such as 0,64,256,1024, got {text}"
        )
    return numbers


def run(arguments: argparse.Namespace) -> Result:
    """Read the lengths, make a sampler, and report on its batches."""
    for option, method in _ONLY.items():
        if getattr(arguments, option) and arguments.method != method:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} goes with --method {method}, got {arguments.method}")
    if arguments.max_total_size is None and arguments.batch_size is None:
        raise ValueError("--max-total-size is missing, or --batch-size with --method bucket")
    if arguments.rank >= arguments.world_size:
        raise ValueError(
            f"--rank must be below --world-size ({arguments.world_size}), got {arguments.rank}"
        )
    lengths = read_lengths(arguments.file, arguments.column)
    if len(lengths) == 0:
        raise ValueError(f"{name_of(arguments.file)} holds no lengths")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says what is left out
        sampler = _sampler(lengths, arguments)
    sampler.set_epoch(arguments.epoch)
    report = sampler.report()
    if arguments.output:
        _write(sampler.plan(), Path(arguments.output))
    figures = {name: getattr(arguments, name) for name in ("method", "cost", "max_total_size")}
    figures |= {name: getattr(report, name) for name in _REPORTED.split()}
    figures["left_out"] = {reason: len(lost) for reason, lost in report.left_out.items()}
    if arguments.output:
        figures["output"] = arguments.output
    lost = any(reason.startswith("over") for reason in report.left_out) or not report.batches
    return Result(_parts(report, figures), figures, draw=report.plot, status=int(lost))


def _sampler(lengths: Any, arguments: argparse.Namespace) -> data.BatchSamplerBase:
    names = ("cost", "shuffle", "seed", "max_batch_size", "batch_multiple", "oversize")
    options = {name: getattr(arguments, name) for name in (*names, "world_size", "rank")}
    budget = arguments.max_total_size
    if arguments.method == "ordered":
        return data.SizeAwareBatchSampler(range(len(lengths)), lengths, budget, **options)
    if arguments.method == "packed":
        window = {"window": arguments.window} if arguments.window else {}
        return data.PackedBatchSampler(lengths, budget, **window, **options)
    boundaries = arguments.boundaries
    if boundaries is None:
        boundaries = data.least_padding_boundaries(lengths, arguments.buckets or 30)
    return data.BucketBatchSampler(
        lengths,
        boundaries,
        batch_size=arguments.batch_size,
        max_total_size=budget,
        drop_last=arguments.drop_last,
        **options,
    )


def _write(plan: data.Plan, path: Path) -> None:
    """Write all batches: NumPy or Parquet.

    Parquet has a row per batch, with the column `indices`, a list. `.npz` has the arrays `offsets`
    and `indices`: batch b is `indices[offsets[b]:offsets[b + 1]]`. `.npy` has a row per sample: the
    number of its batch, and its index.
    """
    import numpy as np

    offsets, indices = plan.offsets.numpy(), plan.indices.numpy()
    if path.suffix.lower() == ".npz":
        write_whole(path, lambda out: np.savez(out, offsets=offsets, indices=indices))
    elif path.suffix.lower() == ".npy":
        batches = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        rows = np.stack([batches, indices], axis=1)
        write_whole(path, lambda out: np.save(out, rows))
    else:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ImportError("Parquet files need pyarrow: pip install 'brim[arrow]'") from None
        lists = pa.LargeListArray.from_arrays(offsets, indices)
        write_whole(path, lambda out: pq.write_table(pa.table({"indices": lists}), out))


def _parts(report: brim.data.PlanReport, figures: dict[str, Any]) -> list[Part]:
    parts: list[Part] = [str(report), ""]
    counts = report.fill_histogram
    rows = [_bar(i, count, max(counts)) for i, count in enumerate(counts) if count]
    if rows:
        parts.append(Table(["fill of a batch", "", "batches"], rows, left=2))
    if "output" in figures:
        parts += ["", f"plan: {figures['output']}"]
    return parts


def _bar(place: int, count: int, most: int) -> list[str]:
    share = f"{5 * place:3} to {5 * place + 5:3} %" if place < 20 else "over 100 %"
    length = -(-count * _BARS // most)  # rounded up, so that a few batches can be seen
    return [share, "█" * length, str(count)]
