"""Watching changes nothing: a recorded, observed or restored call chooses the same sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import brim


def training(optimizer: Any) -> Callable[[int], object]:
    """A step whose first call makes what later ones find: gradients, the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    steps = optimizer(model.parameters())

    def step(n: int) -> None:
        steps.zero_grad()
        model(torch.randn(n, 128)).square().mean().backward()
        steps.step()

    return step


def keeping() -> Callable[[int], object]:
    """Each call leaves a result."""
    kept = []

    def work(n: int) -> None:
        inside = torch.randn(n, 4096)
        kept.append(inside.sum(0))

    return work


WORKS: dict[str, Callable[[], Callable[[int], object]]] = {
    "AdamW": lambda: training(torch.optim.AdamW),
    "SGD": lambda: training(lambda p: torch.optim.SGD(p, 0.01)),
    "inference": lambda: lambda n: torch.randn(n, 4096).cos().sum(1),
    "pairs": lambda: lambda n: torch.cdist(torch.ones(n * 4, 8), torch.ones(n * 4, 8)).sum(),
    "keeping": keeping,
}

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "observer": lambda: {"observer": lambda attempt: None},
    "restore": lambda: {"restore": (lambda: None, lambda _: None)},  # copies would take room
    "record": dict,
}


def sizes_of(work: Callable[[int], object], room: int, option: str = "") -> list[int]:
    sizes = []

    @brim.maximize("n", device="cpu", **(OPTIONS[option]() if option else {}))
    def call(n: int) -> None:
        sizes.append(n)
        work(n)

    run = call.record if option == "record" else call
    gc.collect()
    held = brim.memory_stats("cpu").allocated
    with brim.budget(held + room, device="cpu"):
        for n in (64, 64, 64, 40, 64, 96, 64):
            run(n)
    return sizes


def peak_of(work: Callable[[int], object], size: int = 64) -> int:
    """Bytes above what was held before the first of three calls."""
    gc.collect()
    held = brim.memory_stats("cpu").allocated
    peaks = []
    for _ in range(3):
        with brim.PeakMeter("cpu") as meter:
            work(size)
        peaks.append(meter.start + meter.peak - held)
    return max(peaks)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """After failures garbage is collected, which takes long where a test session has much."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.filterwarnings("ignore:.* did not come back")  # gradients
@pytest.mark.parametrize("kind", [*WORKS])
@pytest.mark.parametrize("share", [0.6, 1.02, 1.3])
def test_a_watched_call_chooses_the_same_sizes(kind: str, share: float) -> None:
    brim.install_cpu_allocator()
    least = peak_of(WORKS[kind](), 8)
    room = least + int(share * (peak_of(WORKS[kind]()) - least))
    expected = sizes_of(WORKS[kind](), room)
    for option in OPTIONS:
        assert sizes_of(WORKS[kind](), room, option) == expected, option


def test_a_size_that_fits_is_not_lowered_by_what_was_measured() -> None:
    """Also in a memory that knows of a failure with other arguments: all calls are measured."""
    brim.install_cpu_allocator()
    work = WORKS["AdamW"]()
    room = int(1.02 * peak_of(WORKS["AdamW"]()))
    sizes = []

    @brim.maximize("n", device="cpu", strategy="predictive")
    def call(x: torch.Tensor, n: int) -> None:
        if x.ndim == 2:
            torch.empty(n, 2**16)
        else:
            sizes.append(n)
            work(n)

    held = brim.memory_stats("cpu").allocated
    with brim.budget(held + room, device="cpu"):
        _, attempts = call.record(torch.zeros(1, 1), 64)
        assert len(attempts) > 1
        for _ in range(6):
            call(torch.zeros(1), 64)
    assert sizes == [64] * 6


def test_timed_calls_are_not_lowered_by_what_was_measured() -> None:
    brim.install_cpu_allocator()
    work = WORKS["AdamW"]()
    room = int(1.02 * peak_of(WORKS["AdamW"]()))
    sizes = []

    @brim.maximize("n", device="cpu", objective="throughput", lower=64)
    def call(n: int) -> None:
        sizes.append(n)
        work(n)

    held = brim.memory_stats("cpu").allocated
    with brim.budget(held + room, device="cpu"):
        for _ in range(5):
            call(65)
    assert set(sizes) <= {64, 65}  # 64 by its rate
    assert sizes[:2] == [65, 65]


def nearest(x: torch.Tensor, y: torch.Tensor, chunk: int = 4096) -> torch.Tensor:
    parts = [(part[:, None, :] - y[None, :, :]).pow(2).sum(-1).mean(1) for part in x.split(chunk)]
    return torch.cat(parts)


def test_another_number_of_rows_begins_where_others_fitted() -> None:
    brim.install_cpu_allocator()
    function = brim.maximize("chunk", device="cpu")(nearest)
    y = torch.randn(100, 16)
    held = brim.memory_stats("cpu").allocated
    with brim.budget(held + 2**22, device="cpu"):
        _, attempts = function.record(torch.randn(3000, 16), y)
        assert len(attempts) > 1
        first = attempts[-1].size
        for rows in (2900, 2950, 3100, 2900, 2950, 3100, 2900, 2950):
            _, attempts = function.record(torch.randn(rows, 16), y)
            assert len(attempts) == 1, rows
            assert attempts[-1].size >= 0.9 * first


def test_a_lighter_shape_grows_from_the_hint_without_a_failure() -> None:
    brim.install_cpu_allocator()
    function = brim.maximize("chunk", device="cpu")(nearest)
    x = torch.randn(3000, 16)
    held = brim.memory_stats("cpu").allocated
    with brim.budget(held + 2**22, device="cpu"):
        function(x, torch.randn(200, 16))
        light = torch.randn(20, 16)
        found = []
        for _ in range(5):
            _, attempts = function.record(x, light)
            assert len(attempts) == 1
            found.append(attempts[-1].size)
        fresh = brim.maximize("chunk", device="cpu")(nearest)
        for _ in range(5):
            _, attempts = fresh.record(x, light)
    assert found[0] < found[-1]
    assert found[-1] >= 0.97 * attempts[-1].size


def test_forget_forgets_the_hint_too() -> None:
    sizes = []

    @brim.maximize("n", device="cpu")
    def work(x: torch.Tensor, n: int) -> None:
        sizes.append(n)
        if n > 8:
            raise torch.OutOfMemoryError("CPU out of memory.")

    work(torch.zeros(1), 64)
    work.forget(torch.zeros(1), 64)
    sizes.clear()
    work(torch.zeros(2), 64)
    assert sizes[0] == 64
