"""Steps of random lengths under a budget of which the longest needs twice: `--lengths`.

A Llama-like model takes steps with recompute="auto": 64 to 8192 tokens on an accelerator, fewer on
a CPU. The budget is what is held between steps, and half of what the longest needs beyond. Some
steps under the budget, then the same lengths without a limit, and so on: a caching allocator that
was once without a limit has cached more than the budget, so it gives that back in between.

The gradients of some steps are compared, with torch's deterministic algorithms: with those of the
same model without a limit, of which they must have the same bits, or differ by no more than those
of two runs of torch do; and with those of an unconverted copy, which other kernels may round
differently.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from harness import progress, synchronize
from results import Table
from torch import Tensor, nn

import brim

CHUNK = 40  # steps before it is the other one's turn
CHECKED = 0.05  # of the steps
FACTOR = 4  # times how far two runs of torch are apart
ROUNDING = {torch.bfloat16: 3e-2, torch.float32: 1e-4}  # between kernels, of a gradient's norm


def llama(device: str, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = device == "cpu"
    config = LlamaConfig(
        hidden_size=192 if small else 2048,
        intermediate_size=672 if small else 8192,
        num_hidden_layers=layers,
        num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        vocab_size=2048 if small else 32768,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.float32 if small else torch.bfloat16).train()


class Steps:
    """A model under recompute="auto", its optimizer, and an unconverted copy."""

    def __init__(self, device: str, layers: int) -> None:
        self.device = device
        self.plain = llama(device, layers)
        self.ours = copy.deepcopy(self.plain)
        brim.convert(self.ours, recompute="auto")
        self.optimizer = torch.optim.AdamW(self.ours.parameters(), 1e-5, fused=True)

    def ids(self, length: int) -> Tensor:
        numbers = torch.Generator().manual_seed(length)
        ids = torch.randint(self.plain.config.vocab_size, (1, length), generator=numbers)
        return ids.to(self.device)

    def backward(self, model: nn.Module, ids: Tensor) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def step(self, length: int) -> None:
        self.backward(self.ours, self.ids(length))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds(self, length: int) -> float:
        synchronize(self.device)
        begin = time.perf_counter()
        self.step(length)
        synchronize(self.device)
        return time.perf_counter() - begin

    def gradients(self, model: nn.Module, ids: Tensor) -> list[Tensor]:
        self.backward(model, ids)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    def check(self, length: int, limit: int) -> tuple[float, float, float]:
        """How far the gradients are from those without a limit, and from those of the plain model.

        The third is how far two runs of the plain model are apart.
        """
        ids = self.ids(length)
        with torch.no_grad():
            for theirs, ours in zip(self.plain.parameters(), self.ours.parameters(), strict=True):
                theirs.copy_(ours)
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(False)  # whose backward is not deterministic
        try:
            with brim.budget(limit, self.device):
                short = self.gradients(self.ours, ids)
            free = self.gradients(self.ours, ids)
            plain, once_more = (self.gradients(self.plain, ids) for _ in range(2))
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
            torch.use_deterministic_algorithms(False)
        return apart(short, free), apart(short, plain), apart(plain, once_more)


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest distance of a gradient, as a share of its norm."""
    return max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(found, expected, strict=True)
    )


class Found:
    """What the steps showed so far."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rounding = ROUNDING[dtype]
        self.steps = self.failures = self.checked = self.equal = self.wrong = 0
        self.ratios: list[float] = []
        self.quarters: list[list[float]] = [[], [], [], []]  # of the lengths
        self.furthest = [0.0, 0.0, 0.0]

    def add_check(self, distances: tuple[float, float, float]) -> None:
        short, plain, noise = distances
        self.checked += 1
        self.equal += short == 0
        self.wrong += short > FACTOR * noise or plain > self.rounding
        self.furthest = [max(pair) for pair in zip(self.furthest, distances, strict=True)]

    def line(self) -> str:
        ratio = statistics.median(self.ratios) if self.ratios else float("nan")
        return f"{self.steps} steps, {self.failures} failed, {self.wrong} wrong, time {ratio:.3f}"


def run_lengths(device: str, steps: int, layers: int, seconds: float) -> None:
    """Take the steps, or as many as fit in the time, and print what they showed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    end = time.perf_counter() + seconds
    shortest, longest = (16, 1024) if device == "cpu" else (64, 8192)
    works = Steps(device, layers)
    works.step(shortest)
    works.step(longest)
    gc.collect()
    with brim.PeakMeter(device) as meter:
        works.step(longest)
    peak = meter.peak
    limit = brim.memory_stats(device).allocated + peak // 2
    name, half = brim.format_bytes(peak), brim.format_bytes(peak // 2)
    progress(f"the longest needs {name} beyond weights, limit {half}")
    chosen = random.Random(0)
    found = Found(works.ours.dtype)
    brim.nn.reset_pressure()
    while found.steps < steps and time.perf_counter() < end:
        count = min(CHUNK, steps - found.steps)
        lengths = [chosen.randint(shortest, longest) for _ in range(count)]
        times: list[list[float]] = []
        for length in lengths:  # libraries take their time to plan kernels for new shapes
            works.gradients(works.plain, works.ids(length))
        for is_free in (False, True):
            clean(device)
            times.append([])
            for length in lengths:
                if time.perf_counter() > end:
                    break
                within = nullcontext() if is_free else brim.budget(limit, device)
                times[-1].append(timed(works, length, within))
        found.steps += len(times[0])
        found.failures += times[0].count(float("inf"))
        for length, short, free in zip(lengths, *times, strict=False):
            found.ratios.append(short / free)
            found.quarters[4 * (length - 1) // longest].append(short / free)
        clean(device)
        for length in chosen.choices(lengths, k=max(1, round(CHECKED * count))):
            found.add_check(works.check(length, limit))
            clean(device)
        progress(f"{found.line()}, {max(end - time.perf_counter(), 0):.0f} s left")
    title = f"Steps of {shortest} to {longest} tokens under half of what the longest needs"
    tell(found, Table(title, device=device))


def timed(works: Steps, length: int, within: AbstractContextManager[object]) -> float:
    """The seconds of a step; infinite if it does not fit."""
    try:
        with within:
            return works.seconds(length)
    except torch.OutOfMemoryError:
        works.optimizer.zero_grad(set_to_none=True)
        return float("inf")


def clean(device: str) -> None:
    gc.collect()
    brim.release_cached(device)


def tell(found: Found, table: Table) -> None:
    table.row("steps", str(found.steps))
    table.row("that ran out of memory", str(found.failures), "", "none")
    table.row(
        "time, of that without a limit, median",
        f"{statistics.median(found.ratios):.3f}",
        "",
        "1.05",
    )
    for number, ratios in enumerate(found.quarters, 1):
        if ratios:
            table.row(f"… of lengths in quarter {number}", f"{statistics.median(ratios):.3f}")
    table.row("gradients compared", str(found.checked))
    table.row("… with the bits of those without a limit", str(found.equal))
    table.row("… wrong", str(found.wrong), "", "none")
    short, plain, noise = (f"{distance:.1e}" for distance in found.furthest)
    table.row("furthest from those without a limit, of its norm", short)
    table.row("… from an unconverted copy", plain, f"{found.rounding:g} may be rounding")
    table.row("… two runs of that copy", noise, "0: torch is deterministic")
    print(f"  {brim.nn.pressure()}")
