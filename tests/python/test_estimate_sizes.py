"""Sizes foreseen: brim.largest_size, and maximize(foresee=True)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim._estimate import _largest

from .test_estimate import adam, mlp


def quadratic(n: int) -> None:
    torch.zeros(1 << 20)
    torch.zeros(n, n)


def training_with(model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> None:
    optimizer.zero_grad()
    model(torch.zeros(batch_size, 256)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("upper", [None, 100_000])
@pytest.mark.parametrize("budget", ["8MiB", "64MiB", "1GiB"])
def test_largest_size_of_a_training_step_is_exact(budget: str, upper: int | None) -> None:
    model = mlp()
    optimizer = adam(model.parameters())

    def step(batch_size: int) -> None:
        training_with(model, optimizer, batch_size)

    held = brim.memory_stats("cpu").allocated  # other tests' modules too
    limit = held + brim.parse_bytes(budget)

    def fits(work: Callable[[int], object], size: int) -> bool:
        found = brim.estimate(work, size, device="cpu")
        others = max(0, held - found.held_before)
        return found.held_before + found.peak + others <= limit

    for work, name in ((step, "batch_size"), (quadratic, "n")):
        size = brim.largest_size(work, name, limit, device="cpu", upper=upper)
        assert fits(work, size)
        assert size == upper or not fits(work, size + 1)


def squares(n: int) -> None:
    x = torch.rand(n, 8)
    torch.cdist(x, x)


def powers_of_two(n: int) -> None:
    torch.empty(1 << (n - 1).bit_length(), 256)


def two_paths(n: int) -> None:
    torch.empty(n, 1000 if n > 50 else 10)


def padded(n: int) -> None:
    torch.empty(-(-n // 64) * 64, 300)


def with_a_logarithm(n: int) -> None:
    torch.empty(n * n.bit_length())


SHAPES: dict[Callable[[int], None], tuple[int, int]] = {  # bytes, and traces that are enough
    squares: (1 << 20, 6),
    powers_of_two: (300 << 10, 14),
    two_paths: (100_000, 16),
    padded: (1 << 22, 14),
    with_a_logarithm: (1 << 22, 20),
}


@pytest.mark.parametrize("lower", [1, 3])
@pytest.mark.parametrize("upper", [None, 4095, 1 << 20])
@pytest.mark.parametrize("work", SHAPES)
def test_the_largest_size_fits_and_the_next_does_not(
    work: Callable[[int], None], upper: int | None, lower: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, enough = SHAPES[work]
    estimate, traced, sizes = brim.estimate, _largest.traced, []

    def counted(fn: Any, args: Any, kwargs: dict[str, Any], **options: Any) -> Any:
        sizes.append(kwargs["n"])
        return traced(fn, args, kwargs, **options)

    monkeypatch.setattr(_largest, "traced", counted)
    monkeypatch.setattr(_largest, "stats_of", lambda _: None)  # what other tests hold
    size = brim.largest_size(work, "n", limit, device="cpu", lower=lower, upper=upper)
    assert estimate(work, size, device="cpu", capacity=limit).fits
    if size != upper:
        assert not estimate(work, size + 1, device="cpu", capacity=limit).fits
        assert {size, size + 1} <= {*sizes}
    assert len(sizes) <= enough


def test_a_foreseen_size_is_a_multiple_that_fits(held: int) -> None:
    @brim.maximize("n", q=100, foresee=True, device="cpu")
    def work(n: int) -> int:
        squares(n)
        return n

    with brim.budget(held + (1 << 20), device="cpu"):
        size, attempts = work.record(4000)
    assert size == 400
    assert [attempt.fitted for attempt in attempts] == [True]


def test_largest_size_is_0_where_nothing_fits_and_upper_where_all_does() -> None:
    assert brim.largest_size(quadratic, "n", "1KiB", device="cpu") == 0
    assert brim.largest_size(quadratic, "n", "100GiB", device="cpu", upper=7) == 7
    with pytest.raises(ValueError, match="upper must not be below lower"):
        brim.largest_size(quadratic, "n", "1GiB", device="cpu", lower=3, upper=2)
    with pytest.raises(TypeError, match="name must be the name of an argument, got 3"):
        brim.largest_size(quadratic, 3, "1GiB", device="cpu")  # type: ignore[arg-type]


def test_largest_size_names_the_arguments_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"quadratic that is the size: it has n, got 'batch_size'"):
        brim.largest_size(quadratic, "batch_size", "1GiB", device="cpu")
    assert brim.largest_size(quadratic, "n", budget="100GiB", device="cpu", upper=7) == 7
    assert brim.largest_size(lambda **sizes: quadratic(**sizes), "n", "1KiB", device="cpu") == 0


def test_largest_size_of_what_does_not_grow_is_an_error_or_upper() -> None:
    def work(n: int) -> None:
        for _ in range(min(n, 10)):
            torch.zeros(16)

    with pytest.raises(brim.EstimateError, match=r"work does not depend on n .*Give upper"):
        brim.largest_size(work, "n", "1GiB", device="cpu")
    assert brim.largest_size(work, "n", "1GiB", device="cpu", upper=9) == 9


def test_largest_size_for_a_gpu_that_is_not_there() -> None:
    model = mlp()
    optimizer = adam(model.parameters())

    def step(batch_size: int) -> None:
        training_with(model, optimizer, batch_size)

    size = brim.largest_size(step, "batch_size", "24GiB", device="cuda")
    found = brim.estimate(step, size, device="cuda", capacity="24GiB")
    assert found.fits
    assert found.reserved > 0.9 * (24 << 30)


def test_largest_size_where_sizes_beyond_all_data_need_the_same(held: int) -> None:
    x = torch.zeros(4096, 64)

    def repeated(n: int) -> None:
        for part in x.split(n):
            part.repeat(1, 64)

    budget = held + x.nbytes + (16 << 20)
    size = brim.largest_size(repeated, "n", budget, device="cpu", upper=1 << 20)
    assert 0.97 * 1024 < size <= 1024


def test_largest_size_counts_on_the_cache_being_released() -> None:
    def growing(n: int) -> None:
        for times in (1, 2, 3, 4):  # none of the cached blocks is large enough for the next
            torch.empty(times * n, dtype=torch.uint8)

    held = brim.memory_stats("cuda").allocated if torch.cuda.is_available() else 0
    size = brim.largest_size(growing, "n", held + (1 << 30), device="cuda", upper=1 << 30)
    assert 0.97 * (1 << 28) < size <= 1 << 28


# ---- maximize(foresee=True) ----------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["96MiB", "300MiB"])
def test_the_first_call_starts_at_a_size_that_fits(budget: str) -> None:
    model = mlp()
    optimizer = adam(model.parameters())

    @brim.maximize("batch_size", foresee=True, device="cpu")
    def step(batch_size: int) -> int:
        training_with(model, optimizer, batch_size)
        return batch_size

    with brim.budget(budget, device="cpu"):
        size, attempts = step.record(1 << 20)
        assert [attempt.fitted for attempt in attempts] == [True]
        with pytest.raises(torch.OutOfMemoryError):
            training_with(model, optimizer, int(size / 0.97) + 1)
        later, attempts = step.record(1 << 20)
        assert later >= size
        assert all(attempt.fitted for attempt in attempts)


def test_what_cannot_be_foreseen_runs_as_usual_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @brim.maximize("n", foresee=True, device="cpu")
    def work(x: torch.Tensor, n: int) -> float:
        return float(x[:n].sum()) if x.sum() > 0 else 0.0

    with caplog.at_level("INFO", logger="brim"):
        assert work(torch.ones(4), 3) == 3.0
    assert "cannot be foreseen" in caplog.text
    assert "test_estimate_sizes.py" in caplog.text


def test_foresee_takes_one_name() -> None:
    with pytest.raises(ValueError, match="foresee takes one name"):
        brim.maximize("a", "b", foresee=True)


def test_the_size_that_is_searched_must_not_be_given() -> None:
    with pytest.raises(ValueError, match="n is the size that is searched, and must not be given"):
        brim.largest_size(lambda n: torch.empty(n), "n", "1KiB", device="cpu", upper=100, n=5)
