"""What `brim.nn` keeps and costs beside `torch.nn` and other ways to keep less, in one run.

Each row is a model, what of it is trained, and a precision; each line a way: torch as it is, brim,
brim with `recompute="cheap"` and "products", `torch.utils.checkpoint` per block, selective
checkpointing (which keeps matrix products, convolutions and attention), Liger where it is
installed, and torch.compile with activation_memory_budget 1, 0.5 and 0.2. On an accelerator real
shapes, on a CPU small ones. "kept" is what the allocator holds between forward and backward beyond
what it held before, "peak" the most during both, each with the loss and without an optimizer.

    ./dev bench nn                                  the usual rows, and the host time of each layer
    ./dev bench nn -- --quick                       fewer rows, no torch.compile
    ./dev bench nn -- Llama "BERT, BitFit"          rows whose name has this in it, of all rows
    ./dev bench nn -- --list                        the names of all rows
    ./dev bench nn -- Llama --ways torch cheap      ways whose name has this in it
    ./dev bench nn -- --quick --scale 4             four times the batch size: a step is no longer
                                                    bound by the host
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness import Work, medians, progress, synchronize
from nn_models import MODELS, QUICK, ROWS, USUAL, Case, Forward, Setting
from nn_plot import plot
from nn_ways import BUDGETS, WAYS, NotThereError, with_budget
from results import Panel, Table
from torch import nn

import brim
import brim._table

MIB = 1 << 20
PLOTS = Path(__file__).resolve().parent.parent / "build" / "nn_plots"


@dataclass
class Figures:
    """What one way needs: bytes and seconds."""

    kept: float
    peak: float
    seconds: float = math.nan


# -- One row ---------------------------------------------------------------------------------------


def memory(model: nn.Module, forward: Forward, device: str) -> Figures:
    """Bytes kept between forward and backward, and the most during both."""
    for _ in range(2):  # workspaces of libraries come with the first step
        with brim.PeakMeter(device) as meter:
            loss = forward(model)
            synchronize(device)
            kept = meter.left
            loss.backward()
            synchronize(device)
        del loss
        model.zero_grad(set_to_none=True)
    return Figures(kept, meter.peak)


def seconds(models: dict[str, nn.Module], forward: Forward, device: str) -> dict[str, float]:
    """Median seconds of a step of each, in turns."""

    def clear() -> None:
        for each in models.values():
            each.zero_grad(set_to_none=True)

    works: dict[str, Work] = {
        way: lambda model=model: forward(model).backward() for way, model in models.items()
    }
    rounds, warmup = (3, 1) if device == "cpu" else (20, 3)
    return medians(works, rounds, warmup=warmup, device=device, after=clear)


def compare(case: Case, ways: Sequence[str], device: str) -> dict[str, Figures | str]:
    """The figures of each way, or why it has none. All are compiled for the budget of the first."""
    models: dict[str, nn.Module] = {}
    found: dict[str, Figures | str] = {}
    with with_budget(ways[0]):
        for way in ways:
            progress(f"{way} …")
            model = copy.deepcopy(case.model)
            try:
                WAYS[way](model, case.blocks)
                found[way] = memory(model, case.forward, device)
                models[way] = model
            except NotThereError as error:
                found[way] = str(error)
            except Exception as error:  # the others go on
                text = str(error).strip().splitlines() or [""]
                found[way] = f"failed: {type(error).__name__}: {text[0][:80]}"
        progress("times …")
        for way, time in seconds(models, case.forward, device).items():
            found[way].seconds = time  # type: ignore[union-attr]
    return found


def figures_of(case: Case, ways: Sequence[str], device: str) -> dict[str, Figures]:
    """Print the figures of each way; returns them."""
    found = compare(case, [way for way in ways if way not in BUDGETS], device)
    for way in ways:
        if way in BUDGETS:  # by itself: code that is compiled for another budget is dropped
            found |= compare(case, [way], device)
    figures = {way: each for way, each in found.items() if isinstance(each, Figures)}
    lines = []
    for way, each in found.items():
        if isinstance(each, str):
            lines.append([way, each])
            continue
        first = next(iter(figures.values()))
        cells = [way]
        for own, of in ((each.kept, first.kept), (each.peak, first.peak)):
            cells += [f"{own / MIB:.1f}", f"{own / of:.3f}"]
        lines.append([*cells, f"{each.seconds * 1e3:.2f}", f"{each.seconds / first.seconds:.3f}"])
    head = ["way", "kept MiB", "ratio", "peak MiB", "ratio", "ms", "ratio"]
    print(brim._table.Table(head, lines), flush=True)
    return figures


def run_row(
    row: tuple[str, str, str], device: str, ways: Sequence[str], scale: int, plots: Path
) -> list[str]:
    """Print what one row shows; returns its cells in the table of all, or none."""
    name = ", ".join(row) + (f", {scale} times the batch" if scale > 1 else "")
    model, training, precision = row
    print(f"\n{name}, on {device}", flush=True)
    try:
        case = MODELS[model].build(Setting(device, training, precision, scale))
    except ImportError as error:
        print(f"    left out: {error}")
        return []
    found = figures_of(case, ways, device)
    points = {way: (each.seconds * 1e3, each.peak / MIB) for way, each in found.items()}
    if points:
        path = plot(f"{name}, {device}", points, plots)
        drawn = "no plot: matplotlib is not installed" if path is None else os.path.relpath(path)
        print(f"    {drawn}")
    del case
    gc.collect()
    brim.release_cached(device)
    if "torch" not in found:
        return []
    first = found["torch"]
    return [
        name,
        f"{first.kept / MIB:.0f} ({first.peak / MIB:.0f})",
        *(in_short(found[way], first) if way in found else "-" for way in ways[1:]),
    ]


def in_short(own: Figures, of: Figures) -> str:
    ratios = (own.kept / of.kept, own.peak / of.peak, own.seconds / of.seconds)
    return " / ".join(f"{ratio:.2f}" for ratio in ratios)


# -- Host time --------------------------------------------------------------------------------

LAYERS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.Linear(4, 4), (2, 4)),
    (lambda: nn.Conv1d(2, 2, 3), (1, 2, 5)),
    (lambda: nn.Conv2d(2, 2, 3), (1, 2, 5, 5)),
    (lambda: nn.Conv3d(2, 2, 1), (1, 2, 3, 3, 3)),
    (lambda: nn.ConvTranspose2d(2, 2, 3), (1, 2, 5, 5)),
    (lambda: nn.BatchNorm2d(2), (2, 2, 3, 3)),
    (lambda: nn.BatchNorm2d(2).eval(), (2, 2, 3, 3)),
    (lambda: nn.LayerNorm(4), (2, 4)),
    (lambda: nn.RMSNorm(4), (2, 4)),
    (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    (nn.ReLU, (2, 4)),
    (lambda: nn.ReLU(inplace=True), (2, 4)),
    (nn.ReLU6, (2, 4)),
    (nn.LeakyReLU, (2, 4)),
    (nn.Hardtanh, (2, 4)),
    (nn.GELU, (2, 4)),
    (nn.SiLU, (2, 4)),
    (nn.Dropout, (2, 4)),
    (lambda: nn.MaxPool2d(2), (1, 2, 4, 4)),
    (lambda: nn.AvgPool2d(2), (1, 2, 4, 4)),
    (lambda: nn.AdaptiveAvgPool2d(2), (1, 2, 4, 4)),
)


def host_times(device: str) -> None:
    head = ["layer", "torch.nn", "brim.nn", "ratio", "frozen: torch", "frozen: brim", "its ratio"]
    title = "Host time of forward and backward on a tiny tensor (µs, medians)"
    table = Table(title, head, device=device, width=20)
    for cells in host_time_rows(device):
        table.row(*cells)


def host_time_rows(device: str) -> Iterator[list[str]]:
    for make, shape in LAYERS:
        layer = make().to(device)
        name = type(layer).__name__
        name += " inplace" * bool(getattr(layer, "inplace", False)) + " eval" * (not layer.training)
        cells = [name]
        for frozen in (False, True):
            layer.requires_grad_(not frozen)
            ours = copy.deepcopy(layer)
            brim.convert(ours)
            works = {
                "torch": tiny_step(layer, shape, device),
                "brim": tiny_step(ours, shape, device),
            }
            # The device's queue is waited for when the clock has stopped: this is the host's time.
            wait = partial(synchronize, device)
            times = medians(works, 35, calls=30, warmup=5, after=wait)
            cells += [f"{seconds * 1e6:.1f}" for seconds in times.values()]
            cells.append(f"{times['brim'] / times['torch']:.2f}")
        yield cells


def tiny_step(layer: nn.Module, shape: tuple[int, ...], device: str) -> Work:
    x = torch.randn(shape, device=device, requires_grad=True)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    inplace = getattr(layer, "inplace", False)
    grad = torch.ones_like(layer(x * 1))

    def step() -> None:
        y = layer(x * 1 if inplace else x)
        torch.autograd.grad(y, [x, *parameters], grad)

    return step


# -- Command line ----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", help="parts of the names of rows; default: the usual")
    parser.add_argument("--quick", action="store_true", help="fewer rows, no torch.compile")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--ways", nargs="+", default=[""], help="parts of the names of ways")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="whether to run torch.compile too; default: on an accelerator, without --quick",
    )
    parser.add_argument("--scale", type=int, default=1, help="times the usual batch size")
    parser.add_argument("--device", help="cpu, cuda, …; default: the accelerator if there is one")
    parser.add_argument("--plots", type=Path, default=PLOTS, help="folder for pictures")
    return parser.parse_args()


def chosen_rows(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    if options.rows:
        parts = [part.lower() for part in options.rows]
        return [row for row in ROWS if any(part in ", ".join(row).lower() for part in parts)]
    usual = QUICK if options.quick else USUAL
    return [row for row in ROWS if row in usual]


def main() -> None:
    options = arguments()
    if options.list:
        print("\n".join(", ".join(row) for row in ROWS))
        return
    if options.scale < 1:
        raise SystemExit(f"--scale must be at least 1, got {options.scale}")
    warnings.filterwarnings("ignore")  # of the frameworks
    device = options.device or brim.default_device().type
    compiles = options.compile
    if compiles is None:
        compiles = device != "cpu" and not options.quick
    ways = [
        way
        for way in WAYS
        if way == "torch" or any(part.lower() in way.lower() for part in options.ways)
        if compiles or way not in BUDGETS
    ]
    rows = chosen_rows(options)
    if not rows:
        raise SystemExit(f"no row matches {options.rows}: --list prints all")
    found = []
    for place, row in enumerate(rows):
        progress(f"row {place + 1} of {len(rows)}")
        found.append(run_row(row, device, ways, options.scale, options.plots))
    print()
    parts = ("kept", "peak", "time")
    panels = [Panel(f"{part}, of torch's", ways[1:], i, 1) for i, part in enumerate(parts)]
    table = Table(
        f"{' / '.join(parts)}, of torch's",
        ("network", "torch MiB (peak)", *ways[1:]),
        device=device,
        width=36,
        column=20,
        panels=panels,
    )
    for cells in filter(None, found):
        table.row(*cells)
    if not options.rows and not options.quick:
        host_times(device)


if __name__ == "__main__":
    main()
