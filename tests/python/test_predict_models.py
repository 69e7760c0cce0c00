"""The memory model on real networks: seven probes, then shapes that it has not seen."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

import brim

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from bench_predict import Step, cnn, transformer


def held_out_errors(
    step: Step, ns: list[int], sizes: list[int], device: str, most: int
) -> tuple[brim.MemoryModel, list[float]]:
    """Errors on a dozen shapes, some of them not among the candidates either."""
    candidates = [(n, size) for n in ns for size in sizes if n * size <= most]
    model = brim.MemoryModel.probe(step, candidates, device, restore=False)
    assert len(model.samples) == 7
    seen = {(sample.n, sample.length) for sample in model.samples}
    dice = random.Random(7)
    shapes: list[tuple[int, int]] = []
    while len(shapes) < 12:
        n, size = dice.randint(ns[0], ns[-1]), dice.randint(sizes[0], sizes[-1])
        if n * size <= most and (n, size) not in seen:
            shapes.append((n, size))
    samples = brim.collect_peaks(lambda shape: step(*shape), shapes, device)
    errors = [
        model.peak(n, size) / sample.peak - 1
        for (n, size), sample in zip(shapes, samples, strict=True)
    ]
    return model, errors


def check(model: brim.MemoryModel, errors: list[float]) -> None:
    worst = max(abs(error) for error in errors)
    assert worst <= 0.05, (str(model), errors)


@pytest.mark.parametrize("optimize", [False, True])
def test_transformer_layer_is_told_within_five_percent(optimize: bool) -> None:
    ns, lengths = [1, 2, 3, 5, 8, 16, 32, 64], [16, 24, 32, 64, 96, 128, 256, 384, 512]
    check(*held_out_errors(transformer("cpu", optimize), ns, lengths, "cpu", 4096))


@pytest.mark.parametrize("optimize", [False, True])
def test_small_cnn_is_told_within_five_percent(optimize: bool) -> None:
    ns, sides = [4, 6, 8, 12, 16, 24, 32], [32, 40, 48, 64, 96]
    check(*held_out_errors(cnn("cpu", optimize), ns, sides, "cpu", 1536))


@pytest.mark.cuda
@pytest.mark.parametrize("optimize", [False, True])
def test_transformer_layer_is_told_within_five_percent_on_cuda(optimize: bool) -> None:
    ns, lengths = [1, 2, 3, 5, 8, 16, 32, 64], [16, 24, 32, 64, 96, 128, 256, 384, 512]
    check(*held_out_errors(transformer("cuda", optimize), ns, lengths, "cuda", 64 * 512))


@pytest.mark.cuda
@pytest.mark.parametrize("optimize", [False, True])
def test_small_cnn_is_told_within_five_percent_on_cuda(optimize: bool) -> None:
    ns, sides = [1, 2, 4, 8, 16, 32, 64], [16, 24, 32, 48, 64, 96, 128]
    check(*held_out_errors(cnn("cuda", optimize), ns, sides, "cuda", 64 * 128))


def test_what_the_model_allows_fits(held: int) -> None:
    step = transformer("cpu", optimize=True)
    ns, lengths = [1, 2, 4, 8, 16, 32], [16, 32, 64, 128, 256]
    model = brim.MemoryModel.probe(step, [(n, length) for n in ns for length in lengths], "cpu")
    step(1, 16)  # the optimizer's state, which probe took away again
    budget = held + 40 * 2**20
    for length in (30, 100, 200):
        n = model.largest_batch(length, budget)
        assert n > 0
        with brim.budget(budget, device="cpu"), brim.PeakMeter("cpu") as meter:
            step(n, length)
        assert meter.start + meter.peak > 0.8 * budget
