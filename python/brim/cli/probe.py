"""Measure how a function's memory grows with its size, and predict the largest size that fits."""

from __future__ import annotations

import argparse
import math
import time
from bisect import bisect_right
from typing import Any

import torch

import brim
from brim._table import Part, Table
from brim.cli import arguments as types
from brim.cli.result import Result, add_output_options

HELP = "how a function's memory grows with its size"
EXAMPLE = """\
  brim probe train.py:step --sizes 1:64 --budget 8GiB --plot step.png
  brim probe train.py:step --sizes 1:32 --lengths 16:512   # called as step(n, length)"""

_MOST_CANDIDATES = 32  # per range
_NEAR_BUDGET = 5  # sizes
_ANY = 2**53  # what a model answers if memory does not grow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the function, its sizes, the device and the budget."""
    parser.add_argument(
        "function",
        type=types.function,
        help="module:function or file.py:function; called with a size, or with (n, length)",
    )
    parser.add_argument(
        "--sizes", type=_range, required=True, help="1:64, or a list: 1,2,4,8 (with --lengths: n)"
    )
    parser.add_argument("--lengths", type=_range, help="16:512, or a list")
    parser.add_argument("--device", type=types.device, help="cpu, cuda, …")
    parser.add_argument(
        "--budget", type=types.budget, help="e.g. 8GiB (default: 90%% of what is free)"
    )
    parser.add_argument(
        "--probes",
        type=types.whole(2),
        default=7,
        help="how many sizes to measure (default: 7); more if memory hardly grows, and near the "
        "budget",
    )
    add_output_options(parser, plot=True)


def _range(text: str) -> list[int]:
    """Parse `a:b` into integers spaced evenly on a logarithmic scale, or `a,b,c` as given.

    Example:
        >>> _range("1:6"), _range("8,2"), len(_range("1:100000"))
        ([1, 2, 3, 4, 5, 6], [8, 2], 31)
    """
    first, colon, last = text.partition(":")
    parts = [first, last] if colon else text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= _ANY for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be whole numbers from 1 to 2**53, such as 1:64 or 1,2,4, got {text}"
        )
    numbers = [int(part) for part in parts]
    if not colon:
        return numbers
    low, high = numbers
    if low > high:
        raise argparse.ArgumentTypeError(
            f"must go from the smallest to the largest, such as {high}:{low}, got {text}"
        )
    if high - low < _MOST_CANDIDATES:
        return list(range(low, high + 1))
    step = math.log(high / low) / (_MOST_CANDIDATES - 1)
    return sorted({round(low * math.exp(step * i)) for i in range(_MOST_CANDIDATES)})


def run(arguments: argparse.Namespace) -> Result:
    """Probe; then show the measurements, the model and the largest sizes within the budget."""
    device = arguments.device or brim.default_device()
    sizes: list[Any] = arguments.sizes
    first = sizes[:1]
    if arguments.lengths is not None:
        sizes = [(n, length) for n in sizes for length in arguments.lengths]
        first = sizes[0]
    types.check_no_model(arguments.function)
    types.check_call(arguments.function, *first)
    seconds: dict[tuple[float, ...], float] = {}  # of the last call with each size

    def work(*size: int) -> None:  # what is returned would count in the next call
        begin = time.perf_counter()
        arguments.function(*size)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds[size] = time.perf_counter() - begin

    model = brim.MemoryModel.probe(
        work,
        sizes,
        device,
        budget=arguments.budget,
        probes=arguments.probes,
        near_budget=_NEAR_BUDGET if arguments.lengths is None else 0,
    )
    stats = brim.memory_stats(device)
    limit = (
        brim.parse_bytes(arguments.budget, of=stats.limit)
        if arguments.budget
        else stats.allocated + int(0.9 * stats.free)
    )
    figures = {
        "device": str(device),
        "budget": limit,
        "measured": [_measured(model, sample, seconds) for sample in model.samples],
        "margin": model.margin,
        "largest": _largest(model, arguments.lengths, limit),
    }
    return Result(
        _parts(model, figures),
        figures,
        draw=lambda path: model.plot(path, budget=limit, seconds=seconds),
    )


def _measured(
    model: brim.MemoryModel, sample: brim.MemorySample, seconds: dict[tuple[float, ...], float]
) -> dict[str, Any]:
    shape = (sample.n, sample.length) if model.kind == "batch" else (sample.n,)
    return {
        "size": [int(number) for number in shape],
        "peak": int(sample.peak),
        "out_of_memory": sample.out_of_memory,
        "predicted": round(model.peak(*shape)),
        "seconds": None if sample.out_of_memory else seconds.get(shape),
    }


def _largest(
    model: brim.MemoryModel, lengths: list[int] | None, limit: int
) -> list[dict[str, Any]]:
    """The largest size within the limit, or the largest n for some of the lengths."""
    furthest = max(int(sample.n) for sample in model.samples)
    if lengths is None:
        found: list[dict[str, Any]] = [{"size": model.largest_size(limit)}]
    else:
        found = [{"length": x, "size": model.largest_batch(x, limit)} for x in _some(lengths)]
    for each in found:
        if each["size"] >= _ANY:
            each["size"] = None  # memory does not grow
        each["extrapolated"] = each["size"] is None or each["size"] > furthest
        each["by_formula"] = _by_formula(model, each.get("length"), limit)
    return found


def _by_formula(model: brim.MemoryModel, length: int | None, limit: int) -> int | None:
    """The largest size that the fitted formula allows: memory may grow faster beyond what it saw.

    None if memory does not grow.
    """
    fits = bisect_right(range(1, _ANY), float(limit), key=lambda n: model.peak(n, length))
    return None if fits >= _ANY - 1 else fits


def _parts(model: brim.MemoryModel, figures: dict[str, Any]) -> list[Part]:
    rows = [_row(**each) for each in sorted(figures["measured"], key=lambda each: each["size"])]
    within = f"within {brim.format_bytes(figures['budget'])} on {figures['device']}"
    furthest = max(each["size"][0] for each in figures["measured"])
    found = figures["largest"]
    if "length" in found[0]:
        cells = [[str(each["length"]), _size(each), _formula(each)] for each in found]
        largest: list[Part] = [
            f"{within}:",
            "",
            Table(["length", "largest n", "by the formula"], cells),
        ]
        if any(each["extrapolated"] for each in found):
            largest += [
                "",
                f"* measured up to n {furthest}. This n fits even with the fastest growth that the "
                "measurements allow; the formula holds if memory goes on growing as it did. "
                "Larger --sizes tell more",
            ]
    else:
        largest = [f"{within}: size {_size(found[0])}"]
        if found[0]["extrapolated"]:
            largest += ["", *_beyond(furthest, found[0])]
        elif found[0]["by_formula"] is None or found[0]["by_formula"] > found[0]["size"]:
            largest += [
                f"the formula alone would allow {_formula(found[0])}, but it may be wrong by its "
                f"margin of {100 * figures['margin']:.1f} %"
            ]
    head = ["size", "measured", "predicted", "error", "time"]
    return [Table(head, rows), "", str(model), "", *largest]


def _row(
    size: list[int], peak: int, out_of_memory: bool, predicted: int, seconds: float | None
) -> list[str]:
    measured = brim.format_bytes(peak)
    return [
        " x ".join(map(str, size)),
        f"> {measured}" if out_of_memory else measured,
        brim.format_bytes(predicted),
        "out of memory" if out_of_memory else f"{predicted / peak - 1:+.1%}",
        "" if seconds is None else f"{seconds:.3f} s",
    ]


def _beyond(furthest: int, found: dict[str, Any]) -> list[Part]:
    """What fits beyond the measured sizes, from certain to likely."""
    careful, formula = _size(found), _formula(found)
    rows = [
        [str(furthest), "was measured"],
        [careful, "fits even if memory grows as fast beyond that as the measurements allow"],
    ]
    if f"{formula}*" != careful:
        rows.append([f"{formula}*", "fits if memory goes on growing by the formula"])
    note = "* was not measured"
    times = math.inf if found["by_formula"] is None else found["by_formula"] / furthest
    if times >= 1.1:
        far = f", {times:,.0f} times as large as what was" if 10 <= times < math.inf else ""
        note = f"{note}{far}: larger --sizes tell more"
    return [Table(["size", ""], rows, left=2), "", note]


def _size(found: dict[str, Any]) -> str:
    text = "any" if found["size"] is None else str(found["size"])
    return f"{text}*" if found["extrapolated"] else text


def _formula(found: dict[str, Any]) -> str:
    return "any" if found["by_formula"] is None else str(found["by_formula"])


def _some(lengths: list[int]) -> list[int]:
    """At most eight of them, including the first and the last.

    Example:
        >>> _some(list(range(1, 100)))
        [1, 15, 29, 43, 57, 71, 85, 99]
    """
    if len(lengths) <= 8:
        return lengths
    return [lengths[round(i * (len(lengths) - 1) / 7)] for i in range(8)]
