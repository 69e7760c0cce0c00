"""A training step under a budget of bytes: recompute="auto" beside ways chosen before the step.

Each network runs once without a limit. Then its peak beyond weights and optimizer is cut to 0.9,
0.7, 0.5, 0.35 and 0.25 of torch's. A cell is the time of a settled step, of torch's without a
limit, and behind it that of the fastest other way whose own peak is below that budget. "-": it
does not fit.

    ./dev bench pressure                     all networks, on the accelerator
    ./dev bench pressure -- BERT ViT         rows whose name has this in it
    ./dev bench pressure -- --rounds 20      steadier figures
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from harness import Work, cells_in_line, network_options, synchronize
from nn_models import MODELS, Case, Setting, torchvision_model
from nn_ways import Way, as_it_is, checkpointed, converted, selective
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


def run_row(name: str, device: str, rounds: int, width: int) -> None:
    make, precision = NETWORKS[name]
    torch.manual_seed(0)
    case = make(Setting(device, "full", precision))
    peaks: dict[str, int] = {}
    times: dict[str, float] = {}
    for way, change in WAYS.items():
        try:
            trained = Trained(case, change, device)
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
        best = min(fitting, key=fitting.__getitem__, default=None)
        other = f"{fitting[best] / torch_time:.2f} {best}" if best else "-"
        try:
            with brim.budget(limit, device):
                for _ in range(5):
                    trained.step()
                cells.append(f"{trained.seconds(rounds) / torch_time:.2f} / {other}")
        except torch.OutOfMemoryError:
            cells.append(f"- / {other}")
            trained.optimizer.zero_grad(set_to_none=True)
    cells_in_line([f"{name}, {precision}", *cells], width)


def main() -> None:
    names, device, rounds = network_options(__doc__, NETWORKS, 10, "steps that are timed")
    width = 20
    cells_in_line(["network", "torch, ms", "peak, MiB", "no limit", *map(str, SHARES)], width)
    for name in names:
        run_row(name, device, rounds, width)
        gc.collect()
        brim.release_cached(device)


if __name__ == "__main__":
    main()
