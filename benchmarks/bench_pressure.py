"""A training step under a budget of bytes: recompute="auto" beside ways chosen before the step.

Each network runs once without a limit. Then its peak beyond weights and optimizer is cut to 0.9,
0.7, 0.5, 0.35 and 0.25 of torch's. A cell is the time of a settled step, of torch's without a
limit, and behind it that of the fastest other way whose own peak is below that budget. "-": it
does not fit. All of a cell take turns, since hosts are uneven. With --compile, behind that the
fastest of torch.compile with activation_memory_budget 1, 0.5 and 0.2, which are timed once, with a
"!" where it is ahead of "auto".

    ./dev bench pressure                     all networks, on the accelerator
    ./dev bench pressure -- BERT ViT         rows whose name has this in it
    ./dev bench pressure -- --rounds 20      steadier figures
    ./dev bench pressure -- --scale 8        eight times the batch: less of a step is the host's
    ./dev bench pressure -- --compile BERT   with torch.compile, some minutes a network
    ./dev bench pressure -- --budgets 0.5 --turns 1 --ways cheap products -- ViT      in a hurry
    ./dev bench pressure -- --lengths        1000 steps of random lengths: see pressure_lengths.py
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from harness import network_options, synchronize
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
from results import Panel, Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import brim

SHARES = (0.9, 0.7, 0.5, 0.35, 0.25)
TURNS = 3
SETTLING = 12  # steps of "auto" under a new budget that are not timed


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
        self.settling = 1  # steps of the next turn that are not timed
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

    def turn(self, rounds: int, within: AbstractContextManager[object]) -> list[float]:
        """The seconds of each step, after one for the allocator's cache, and some that settle."""
        times = []
        settling, self.settling = self.settling, 1
        with within:
            for _ in range(settling + rounds):
                synchronize(self.device)
                begin = time.perf_counter()
                self.step()
                synchronize(self.device)
                times.append(time.perf_counter() - begin)
        return times[settling:]


def in_turns(
    turns: Mapping[str, Callable[[], list[float]]], count: int = TURNS
) -> dict[str, float]:
    """The median of each; those that run out of memory are left out."""
    times: dict[str, list[float]] = {way: [] for way in turns}
    for _ in range(count):
        for way, turn in turns.items():
            if way in times:
                try:
                    times[way].extend(turn())
                except torch.OutOfMemoryError:
                    del times[way]
    return {way: statistics.median(each) for way, each in times.items()}


def fastest(times: Mapping[str, float], unit: float) -> str:
    best = min(times, key=times.__getitem__, default=None)
    return f"{times[best] / unit:.2f} {best}" if best else "-"


def cell(ours: float | None, fitting: Mapping[str, float], unit: float, compiles: bool) -> str:
    """The time of "auto", None where it fails, beside the other ways that fit."""
    eager = {way: time for way, time in fitting.items() if way not in COMPILED}
    ahead = ours is not None and all(ours < theirs for theirs in eager.values())
    text = "-" if ours is None else f"{'**' * ahead}{ours / unit:.2f}{'**' * ahead}"
    text += f" / {fastest(eager, unit)}"
    if compiles:
        others = {way: time for way, time in fitting.items() if way in COMPILED}
        wins = bool(others) and (ours is None or min(others.values()) < ours)
        text += f" / {fastest(others, unit)}{'!' * wins}"
    return text


def run_row(name: str, options: argparse.Namespace) -> list[str]:
    make, precision = NETWORKS[name]
    device, rounds = options.device, options.rounds
    torch.manual_seed(0)
    case = make(Setting(device, "full", precision, options.scale))
    trained: dict[str, Trained] = {}
    peaks: dict[str, int] = {}
    once: dict[str, float] = {}  # the time of compiled ones, of torch's
    ways = {way: WAYS[way] for way in WAYS if way == "torch" or way in options.ways}
    for way, change in {**ways, **(COMPILED if options.compile else {})}.items():
        try:
            with with_budget(way):
                trained[way] = Trained(case, change, device)
                peaks[way] = trained[way].peak()
                if way in COMPILED:
                    pair = {
                        w: partial(trained[w].turn, rounds, nullcontext()) for w in ("torch", way)
                    }
                    times = in_turns(pair, options.turns)
                    once[way] = times[way] / times["torch"]
        except Exception as error:  # the others go on
            print(f"{name}, {way}: {error}", flush=True)
    ours = Trained(case, partial(converted, recompute="auto"), device)
    ours.peak()
    cells = []
    for share in (None, *options.budgets):
        gc.collect()
        brim.release_cached(device)
        limit = int((share or 0) * peaks["torch"])
        turns = {
            way: partial(trained[way].turn, rounds, nullcontext())
            for way, peak in peaks.items()
            if way == "torch" or (peak <= limit and way not in once)
        }
        if share is None:
            within: Callable[[], AbstractContextManager[object]] = nullcontext
        else:
            within = partial(brim.budget, brim.memory_stats(device).allocated + limit, device)
        ours.settling = SETTLING
        turns["auto"] = lambda: ours.turn(rounds, within())  # noqa: B023
        times = in_turns(turns, options.turns)
        times |= {way: each * times["torch"] for way, each in once.items()}
        ours.optimizer.zero_grad(set_to_none=True)
        unit = times["torch"]
        if share is None:
            cells += [f"{unit * 1e3:.1f}", f"{peaks['torch'] >> 20}", f"{times['auto'] / unit:.2f}"]
        else:
            fitting = {way: times[way] for way in times if peaks.get(way, limit + 1) <= limit}
            cells.append(cell(times.get("auto"), fitting, unit, options.compile))
    return [f"{name}, {precision}", *cells]


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument("--budgets", type=float, nargs="+", default=SHARES, metavar="SHARE")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each way in a cell")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--scale", type=float, default=1, help="times the usual batch")
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
    options = network_options(__doc__, NETWORKS, 4, "steps of a turn", more_options)
    if options.lengths is not None:
        run_lengths(options.device, options.lengths, options.layers, options.seconds)
        return
    shares = list(map(str, options.budgets))
    batch = f", {options.scale:g} times the usual batch" * (options.scale != 1)
    compiled = " / torch.compile" * options.compile
    table = Table(
        "Time of a settled step under a budget, of torch's: auto / the fastest other way"
        f"{compiled}{batch}",
        ("network", "torch, ms", "peak, MiB", "no limit", *shares),
        device=options.device,
        width=20,
        column=44 if options.compile else 26,
        panels=[
            Panel("time, of torch's: auto", shares, 0, 1),
            Panel("time, of torch's: the fastest other way", shares, 1, 1),
        ],
    )
    for name in options.networks:
        table.row(*run_row(name, options))
        gc.collect()
        brim.release_cached(options.device)


if __name__ == "__main__":
    main()
