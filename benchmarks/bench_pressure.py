"""A training step under a budget of bytes: recompute="auto" beside ways chosen before the step.

Each network runs once without a limit. Then its peak beyond weights and optimizer is cut to 0.9,
0.7, 0.5, 0.35 and 0.25 of torch's. A cell is the time of a settled step, of torch's without a
limit, and behind it that of the fastest other way whose own peak is below that budget. "-": it
does not fit. With --compile, behind that the fastest of torch.compile with activation_memory_budget
1, 0.5 and 0.2, with a "!" where it is ahead of "auto".

    ./dev bench pressure                     all networks, on the accelerator
    ./dev bench pressure -- BERT ViT         rows whose name has this in it
    ./dev bench pressure -- --rounds 20      steadier figures
    ./dev bench pressure -- --compile BERT   with torch.compile, some minutes a network
    ./dev bench pressure -- --lengths        1000 steps of random lengths: see pressure_lengths.py
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from harness import Work, cells_in_line, network_options, synchronize
from nn_models import MODELS, Case, Setting, torchvision_model
from nn_ways import (
    BUDGETS,
    Way,
    as_it_is,
    checkpointed,
    compiled,
    converted,
    selective,
    with_budget,
)
from pressure_lengths import run_lengths
from torch import nn
from torch.utils.checkpoint import checkpoint

import brim

SHARES = (0.9, 0.7, 0.5, 0.35, 0.25)


def every_second(model: nn.Module, blocks: Sequence[str]) -> None:
    found = [module for module in model.modules() if type(module).__name__ in blocks]
    for module in found[::2]:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


WAYS: Mapping[str, Way] = {
    "torch": as_it_is,
    "cheap": partial(converted, recompute="cheap"),
    "products": partial(converted, recompute="products"),
    "checkpoint": checkpointed,
    "every second": every_second,
    "selective": selective,
}
COMPILED: Mapping[str, Way] = dict.fromkeys(BUDGETS, compiled)

NETWORKS: Mapping[str, tuple[Callable[[Setting], Case], str]] = {
    "ResNet-50": (MODELS["ResNet-50"].make, "autocast"),
    "ConvNeXt-T": (MODELS["ConvNeXt-T"].make, "autocast"),
    "Swin-T": (torchvision_model("swin_t", "SwinTransformerBlock"), "autocast"),
    "ViT-B": (MODELS["ViT-B"].make, "autocast"),
    "BERT": (MODELS["BERT"].make, "autocast"),
    "Llama": (MODELS["Llama"].make, "bf16"),
    "GPT-2": (MODELS["GPT-2"].make, "autocast"),
    "UNet": (MODELS["UNet"].make, "autocast"),
}


class Trained:
    """A network that was changed in one way, with its optimizer."""

    def __init__(self, case: Case, way: Way, device: str) -> None:
        self.device = device
        self.case = case
        self.model = copy.deepcopy(case.model)
        way(self.model, case.blocks)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, 1e-5, fused=True)

    def step(self) -> None:
        self.case.forward(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak(self) -> int:
        """Beyond what it holds between steps."""
        for _ in range(2):
            self.step()
        gc.collect()
        with brim.PeakMeter(self.device) as meter:
            self.step()
        return meter.peak

    def seconds(self, rounds: int) -> float:
        return timed(self.step, rounds, self.device)


def timed(work: Work, rounds: int, device: str) -> float:
    times = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def fastest(times: Mapping[str, float], unit: float) -> str:
    best = min(times, key=times.__getitem__, default=None)
    return f"{times[best] / unit:.2f} {best}" if best else "-"


def cell(ours: float | None, fitting: Mapping[str, float], unit: float, compiles: bool) -> str:
    """The time of "auto", None where it fails, beside the other ways that fit."""
    eager = {way: time for way, time in fitting.items() if way not in COMPILED}
    text = f"{'-' if ours is None else f'{ours / unit:.2f}'} / {fastest(eager, unit)}"
    if compiles:
        others = {way: time for way, time in fitting.items() if way in COMPILED}
        wins = bool(others) and (ours is None or min(others.values()) < ours)
        text += f" / {fastest(others, unit)}{'!' * wins}"
    return text


def print_row(cells: Sequence[str], options: argparse.Namespace) -> None:
    """The cells of shares are wider than the first four."""
    shares = [each.rjust(44 if options.compile else 26) for each in cells[4:]]
    cells_in_line([*cells[:4], *shares], 20)


def run_row(name: str, options: argparse.Namespace) -> None:
    make, precision = NETWORKS[name]
    device, rounds = options.device, options.rounds
    torch.manual_seed(0)
    case = make(Setting(device, "full", precision))
    peaks: dict[str, int] = {}
    times: dict[str, float] = {}
    for way, change in {**WAYS, **(COMPILED if options.compile else {})}.items():
        try:
            trained = Trained(case, change, device)
            with with_budget(way):
                peaks[way], times[way] = trained.peak(), trained.seconds(rounds)
        except Exception as error:  # the others go on
            print(f"{name}, {way}: {error}", flush=True)
        trained = None  # type: ignore[assignment]
        gc.collect()
        brim.release_cached(device)
    trained = Trained(case, partial(converted, recompute="auto"), device)
    torch_peak, torch_time = peaks["torch"], times["torch"]
    cells = [f"{torch_time * 1e3:.1f}", f"{torch_peak >> 20}"]
    trained.peak()
    cells.append(f"{trained.seconds(rounds) / torch_time:.2f}")
    for share in SHARES:
        gc.collect()
        brim.release_cached(device)
        limit = brim.memory_stats(device).allocated + int(share * torch_peak)
        fitting = {w: times[w] for w, peak in peaks.items() if peak <= share * torch_peak}
        ours = None
        try:
            with brim.budget(limit, device):
                for _ in range(5):
                    trained.step()
                ours = trained.seconds(rounds)
        except torch.OutOfMemoryError:
            trained.optimizer.zero_grad(set_to_none=True)
        cells.append(cell(ours, fitting, torch_time, options.compile))
    print_row([f"{name}, {precision}", *cells], options)


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="?",
        const=1000,
        metavar="STEPS",
        help="steps of random lengths",
    )
    parser.add_argument("--layers", type=int, default=6, help="of that model")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which these steps end")


def main() -> None:
    options = network_options(__doc__, NETWORKS, 10, "steps that are timed", more_options)
    if options.lengths is not None:
        run_lengths(options.device, options.lengths, options.layers, options.seconds)
        return
    print_row(["network", "torch, ms", "peak, MiB", "no limit", *map(str, SHARES)], options)
    for name in options.networks:
        run_row(name, options)
        gc.collect()
        brim.release_cached(options.device)


if __name__ == "__main__":
    main()
