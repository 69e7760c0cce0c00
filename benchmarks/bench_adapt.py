"""Adaptive execution beside torch_max_mem, toma and accelerate, in one run.

Costs are medians over batches that take turns, so that a slower moment of the machine meets all
alike. The nearest-neighbour cases run under a budget on the CPU and, where there is a GPU, under a
cap of 8 GiB there.

    ./dev bench adapt
    python benchmarks/bench_adapt.py call       what a call that fits costs, alone
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peers
import torch

import brim

BATCHES = 51


def medians(
    works: dict[str, Callable[[], object]], calls: int, batches: int = BATCHES
) -> dict[str, float]:
    """Median seconds a call of each."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(batches):
        for name, work in works.items():
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            times[name].append((time.perf_counter() - begin) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def medians_of_loops(
    works: dict[str, Callable[[], object]], calls: int, rounds: int
) -> dict[str, float]:
    """Median seconds of one call, each work in a loop of its own, as pytest-benchmark has it.

    toma's garbage collections would leave the caches cold for whoever comes next.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            for _ in range(calls):
                begin = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def row(name: str, value: str, target: str = "") -> None:
    print(f"  {name:<58}{value:>14}   {target}")


# ---- a call that fits ----------------------------------------------------------------------------


def tiny_call() -> None:
    def function(x: torch.Tensor, batch_size: int) -> None:
        return None

    x = torch.zeros(8)
    variants: dict[str, tuple[Callable[..., object], torch.Tensor]] = {
        "bare": (function, x),
        "brim": (brim.maximize("batch_size")(function), x),
        "brim, device='cpu'": (brim.maximize("batch_size", device="cpu")(function), x),
    }
    if torch.accelerator.is_available():
        there = x.to(torch.accelerator.current_accelerator())
        variants["brim, a tensor on the accelerator"] = (variants["brim"][0], there)
        variants["the same, random state not kept"] = (
            brim.maximize("batch_size", restore_random_state=False)(function),
            there,
        )
    if torch_max_mem := peers.find("torch_max_mem"):
        maximizer: Any = torch_max_mem.maximize_memory_utilization(safe_devices=["cpu", "cuda"])
        variants["torch_max_mem"] = (maximizer(function), x)
    times = medians(
        {name: lambda f=f, x=x: f(x, batch_size=32) for name, (f, x) in variants.items()},
        calls=2000,
    )
    print("A call that fits, tiny function: over the bare call")
    for name in variants:
        if name != "bare":
            target = "target ≤ 0.35 µs" if name.startswith("brim") else ""
            row(name, f"{(times[name] - times['bare']) * 1e6:.3f} µs", target)


def toma_overhead() -> None:
    def body(chunk: torch.Tensor, start: int, end: int) -> None:
        chunk[:] = 1.0

    def native(tensor: torch.Tensor, step: int) -> None:
        for start in range(0, tensor.shape[0], step):
            end = min(start + step, tensor.shape[0])
            body(tensor.narrow(0, start, end - start), start, end)

    tensor = torch.zeros(128, 256, 256)
    ours = brim.chunked(32)(body)
    works: dict[str, Callable[[], object]] = {
        "native": lambda: native(tensor, 32),
        "brim.chunked": lambda: ours(tensor),
    }
    if toma := peers.find("toma"):
        theirs = toma.toma.chunked(initial_step=32)(body)
        works["toma.chunked"] = lambda: theirs(tensor)
        works["toma simple.chunked"] = lambda: toma.simple.chunked(body, tensor, 32)
    times = medians_of_loops(works, calls=20, rounds=7)
    print("toma's own benchmark, chunks of 32 of 128×256×256: against the native loop")
    for name, value in times.items():
        target = "target ≤ 1.05×" if name == "brim.chunked" else ""
        row(name, f"{value / times['native']:.3f}×", target)


# ---- nearest neighbours under a budget -----------------------------------------------------------


@dataclass
class Case:
    device: torch.device
    budget: str
    x: torch.Tensor
    y: torch.Tensor

    def knn(self, x: torch.Tensor, y: torch.Tensor, batch_size: int, k: int = 3) -> torch.Tensor:
        return torch.cat(
            [
                torch.cdist(x[start : start + batch_size], y)
                .topk(k=k, dim=1, largest=False)
                .indices
                for start in range(0, x.shape[0], batch_size)
            ]
        )

    def fits(self, batch_size: int) -> bool:
        try:
            self.knn(self.x, self.y, batch_size)
        except torch.OutOfMemoryError:
            return False
        finally:
            brim.release_cached(self.device)
        return True

    def largest(self) -> int:
        low, high = 1, self.x.shape[0]
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low

    def timed(self, work: Callable[[], object]) -> float:
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def peers_on(case: Case, largest: int) -> None:
    """What the peers need and reach, first call."""
    sizes: list[int] = []

    def counted(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> torch.Tensor:
        sizes.append(batch_size)
        return case.knn(x, y, batch_size)

    def report(name: str, run: Callable[[], object]) -> None:
        sizes.clear()
        brim.release_cached(case.device)
        seconds = case.timed(run)
        row(f"{name}: failed attempts", str(len(sizes) - 1))
        row(f"{name}: size reached, of the largest", f"{sizes[-1] / largest:.1%}")
        row(f"{name}: first call", f"{seconds:.2f} s")

    if torch_max_mem := peers.find("torch_max_mem"):
        maximizer: Any = torch_max_mem.maximize_memory_utilization(safe_devices=["cpu", "cuda"])
        theirs = maximizer(counted)
        report("torch_max_mem", lambda: theirs(case.x, case.y, batch_size=case.x.shape[0]))
    if accelerate := peers.find("accelerate.utils"):
        report(
            "accelerate",
            lambda: accelerate.find_executable_batch_size(
                lambda batch_size: counted(case.x, case.y, batch_size),
                starting_batch_size=case.x.shape[0],
            )(),
        )


def nearest_neighbours(case: Case) -> None:
    print(
        f"Nearest neighbours, {case.x.shape[0]} of {case.y.shape[0]} "
        f"in {case.x.shape[1]} dimensions, on {case.device.type} under {case.budget}"
    )
    with brim.budget(case.budget, device=case.device):
        out = torch.empty(case.x.shape[0], 3, dtype=torch.long, device=case.device)
        largest = case.largest()
        row("the largest batch size that fits, by bisection", str(largest))
        peers_on(case, largest)

        def chunk(part: torch.Tensor, start: int, end: int) -> None:
            out[start:end] = torch.cdist(part, case.y).topk(k=3, dim=1, largest=False).indices

        known, maximize, chunked = [], [], []
        for _ in range(3 if case.device.type == "cpu" else 7):
            brim.release_cached(case.device)
            known.append(case.timed(lambda: case.knn(case.x, case.y, largest)))
            brim.release_cached(case.device)
            ours = brim.maximize("batch_size", device=case.device)(case.knn)
            first: list[Any] = []
            maximize.append(
                case.timed(
                    lambda f=ours, kept=first: kept.append(
                        f.record(case.x, case.y, batch_size=case.x.shape[0])[1]
                    )
                )
            )
            later = [ours.record(case.x, case.y, batch_size=case.x.shape[0])[1] for _ in range(2)]
            brim.release_cached(case.device)
            parts = brim.chunked(case.x.shape[0], device=case.device)(chunk)
            steps: list[Any] = []
            chunked.append(case.timed(lambda f=parts, kept=steps: kept.append(f.record(case.x)[1])))
        tries, third = first[0], later[-1]
        row("brim.maximize: failed attempts, first call", str(len(tries) - 1), "target ≤ 2")
        row("brim.maximize: sizes tried", " ".join(str(t.size) for t in tries))
        row(
            "brim.maximize: size reached, first call",
            f"{tries[-1].size / largest:.1%}",
            "target ≥ 97 %",
        )
        row(
            "brim.maximize: size reached, third call",
            f"{third[-1].size / largest:.1%}",
            "target ≥ 99 %",
        )
        failed_later = sum(not t.fitted for call in later for t in call)
        row("brim.maximize: failed attempts, second and third call", str(failed_later))
        ratio = statistics.median(maximize) / statistics.median(known)
        row("brim.maximize: first call / one that knew the size", f"{ratio:.2f}×", "target ≤ 1.3×")
        row(
            "brim.chunked, nothing known: out of memory",
            str(sum(not s.fitted for s in steps[0])),
            "target 0",
        )
        row("brim.chunked: steps taken", " ".join(str(s.size) for s in steps[0]))
        ratio = statistics.median(chunked) / statistics.median(known)
        row("brim.chunked: first call / one that knew the size", f"{ratio:.2f}×", "target ≤ 1.15×")


def main() -> None:
    if sys.argv[1:] == ["call"]:
        tiny_call()
        return
    logging.disable(logging.INFO)
    # Where oneDNN finds no memory for its scratch, torch says so at length and takes another way.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    peers.install()
    brim.install_cpu_allocator()  # before the inputs, so that they count
    tiny_call()
    toma_overhead()
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    nearest_neighbours(Case(cpu, "256MiB", torch.rand(2**16, 128), torch.rand(2**11, 128)))
    if torch.cuda.is_available():
        cuda = torch.device("cuda", torch.cuda.current_device())
        x, y = torch.rand(2**16, 128, device=cuda), torch.rand(2**17, 128, device=cuda)
        nearest_neighbours(Case(cuda, "8GiB", x, y))


if __name__ == "__main__":
    main()
