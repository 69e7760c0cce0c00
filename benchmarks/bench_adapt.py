"""Adaptive execution beside torch_max_mem, toma and accelerate, in one run.

The nearest-neighbour cases run under a budget on the CPU and, if there is a GPU, under a cap of
8 GiB there.

    ./dev bench adapt
    python benchmarks/bench_adapt.py call       only what a call that fits costs
"""

from __future__ import annotations

import logging
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from adaptive_works import largest_that_fits
from harness import Work, adaptive_peers, install_peers, median, medians, peer
from results import Table

import brim

# ---- a call that fits ----------------------------------------------------------------------------


def tiny_call() -> None:
    def function(x: torch.Tensor, batch_size: int) -> None:
        return None

    x = torch.zeros(8)
    maximized = brim.maximize("batch_size")(function)
    variants: dict[str, tuple[Callable[..., object], torch.Tensor]] = {
        "bare": (function, x),
        "brim": (maximized, x),
        "brim, device='cpu'": (brim.maximize("batch_size", device="cpu")(function), x),
    }
    if torch.accelerator.is_available():
        there = x.to(torch.accelerator.current_accelerator())
        variants["brim, a tensor on the accelerator"] = (maximized, there)
        variants["the same, random state not kept"] = (
            brim.maximize("batch_size", restore_random_state=False)(function),
            there,
        )
    if torch_max_mem := peer("torch_max_mem"):
        maximizer: Any = torch_max_mem.maximize_memory_utilization(safe_devices=["cpu", "cuda"])
        variants["torch_max_mem"] = (maximizer(function), x)
    works = {name: lambda f=f, x=x: f(x, batch_size=32) for name, (f, x) in variants.items()}
    times = medians(works, 51, calls=2000)
    table = Table(
        "A call that fits, tiny function: over the bare call", device=brim.default_device()
    )
    bare = times.pop("bare")
    for name, seconds in times.items():
        target = "target ≤ 0.35 µs" if name.startswith("brim") else ""
        table.row(name, f"{(seconds - bare) * 1e6:.3f} µs", "", target)


def toma_overhead() -> None:
    def body(chunk: torch.Tensor, start: int, end: int) -> None:
        chunk[:] = 1.0

    def native(tensor: torch.Tensor, step: int) -> None:
        for start in range(0, tensor.shape[0], step):
            end = min(start + step, tensor.shape[0])
            body(tensor.narrow(0, start, end - start), start, end)

    tensor = torch.zeros(128, 256, 256)
    ours = brim.chunked(32)(body)
    works: dict[str, Work] = {
        "native": lambda: native(tensor, 32),
        "brim.chunked": lambda: ours(tensor),
    }
    if toma := peer("toma"):
        theirs = toma.toma.chunked(initial_step=32)(body)
        works["toma.chunked"] = lambda: theirs(tensor)
        works["toma simple.chunked"] = lambda: toma.simple.chunked(body, tensor, 32)
    # Each in a loop of its own, as in pytest-benchmark: toma's garbage collections would leave the
    # caches cold for the next.
    turns = [{name: median(work, 20) for name, work in works.items()} for _ in range(7)]
    times = {name: statistics.median(turn[name] for turn in turns) for name in works}
    table = Table("toma's own benchmark, chunks of 32 of 128×256×256: against the native loop")
    for name, seconds in times.items():
        target = "target ≤ 1.05×" if name == "brim.chunked" else ""
        table.row(name, f"{seconds / times['native']:.3f}×", "", target)


# ---- nearest neighbours under a budget -----------------------------------------------------------


def nearest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, y).topk(k=3, dim=1, largest=False).indices


def knn(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> torch.Tensor:
    return torch.cat([nearest(part, y) for part in x.split(batch_size)])


def first_calls_of_peers(x: torch.Tensor, y: torch.Tensor, largest: int, table: Table) -> None:
    sizes: list[int] = []

    def counted(batch_size: int) -> torch.Tensor:
        sizes.append(batch_size)
        return knn(x, y, batch_size)

    for name, make in adaptive_peers():
        sizes.clear()
        brim.release_cached(x.device)
        seconds = median(make(counted, len(x)), 1, warmup=0, device=x.device)
        table.row(f"{name}: failed attempts", str(len(sizes) - 1))
        table.row(f"{name}: size reached, of the largest", f"{sizes[-1] / largest:.1%}")
        table.row(f"{name}: first call", f"{seconds:.2f} s")


def nearest_neighbours(x: torch.Tensor, y: torch.Tensor, budget: str) -> None:
    device = x.device
    table = Table(
        f"Nearest neighbours, {len(x)} of {len(y)} in {x.shape[1]} dimensions, on {device.type} "
        f"under {budget}",
        device=device,
    )
    with brim.budget(budget, device=device):
        out = torch.empty(len(x), 3, dtype=torch.long, device=device)
        fitting = largest_that_fits(lambda size: knn(x, y, size), len(x) + 1, device)
        largest = min(fitting, len(x))
        table.row("the largest batch size that fits, by bisection", str(largest))
        first_calls_of_peers(x, y, largest, table)

        def chunk(part: torch.Tensor, start: int, end: int) -> None:
            out[start:end] = nearest(part, y)

        ours: Any = None
        calls: list[Any] = []  # what each call of `ours` tried
        steps: list[Any] = []

        def maximize() -> None:
            nonlocal ours
            ours = brim.maximize("batch_size", device=device)(knn)
            calls[:] = [ours.record(x, y, batch_size=len(x))[1]]

        def chunked() -> None:
            steps[:] = brim.chunked(len(x), device=device)(chunk).record(x)[1]

        works = {"known": lambda: knn(x, y, largest), "maximize": maximize, "chunked": chunked}
        times = medians(
            works,
            3 if device.type == "cpu" else 7,
            warmup=0,
            device=device,
            after=lambda: brim.release_cached(device),
        )
        calls += [ours.record(x, y, batch_size=len(x))[1] for _ in range(2)]
    tries, failed_later = calls[0], sum(not t.fitted for call in calls[1:] for t in call)
    for name, value, target in (
        ("maximize: failed attempts, first call", len(tries) - 1, "target ≤ 2"),
        ("maximize: sizes tried", " ".join(str(t.size) for t in tries), ""),
        ("maximize: size reached, first call", tries[-1].size / largest, "target ≥ 97 %"),
        ("maximize: size reached, third call", calls[2][-1].size / largest, "target ≥ 99 %"),
        ("maximize: failed attempts, second and third call", failed_later, ""),
        ("maximize: first call / one that knew the size", "maximize", "target ≤ 1.3×"),
        ("chunked, nothing known: out of memory", sum(not s.fitted for s in steps), "target 0"),
        ("chunked: steps taken", " ".join(str(s.size) for s in steps), ""),
        ("chunked: first call / one that knew the size", "chunked", "target ≤ 1.15×"),
    ):
        if value in times:
            value = f"{times[value] / times['known']:.2f}×"
        text = f"{value:.1%}" if isinstance(value, float) else str(value)
        table.row(f"brim.{name}", text, "", target)


def main() -> None:
    if sys.argv[1:] == ["call"]:
        tiny_call()
        return
    logging.disable(logging.INFO)
    # If oneDNN finds no memory for its scratch, torch warns at length and takes another way.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    install_peers()
    brim.install_cpu_allocator()  # before the inputs, so that they count
    tiny_call()
    toma_overhead()
    torch.manual_seed(0)
    nearest_neighbours(torch.rand(2**16, 128), torch.rand(2**11, 128), "256MiB")
    if torch.cuda.is_available():
        x, y = (torch.rand(2**n, 128, device="cuda") for n in (16, 17))
        nearest_neighbours(x, y, "8GiB")


if __name__ == "__main__":
    main()
