"""Calls that differ in what is not a tensor do not hold each other back."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import brim

KIB, MIB = 2**10, 2**20
MOST = 4096
HEAVY, LIGHT = 64 * KIB, KIB  # bytes per item: under 64 MiB about 1000 fit, and all


@pytest.fixture(autouse=True)
def _room(held: int) -> Iterator[None]:
    with brim.budget(held + 64 * MIB, "cpu"):
        yield


def take(size: int, bytes_per_item: int) -> int:
    torch.empty(size * bytes_per_item, dtype=torch.uint8)
    return size


class Plain:
    def __init__(self, width: int) -> None:
        self.width = width

    @brim.maximize("n")
    def run(self, n: int) -> int:
        return take(n, self.width)


class Layered(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(layers)])


@brim.maximize("n")
def by_int(width: int, n: int) -> int:
    return take(n, width)


@brim.maximize("n")
def by_keyword(n: int, *, wide: bool) -> int:
    return take(n, HEAVY if wide else LIGHT)


@brim.maximize("n")
def by_text(mode: str, n: int) -> int:
    return take(n, HEAVY if mode == "train" else LIGHT)


@brim.maximize("n")
def by_shape(shape: tuple[int, int], n: int) -> int:
    return take(n, shape[0] * shape[1])


@brim.maximize("n")
def by_dtype(dtype: torch.dtype, n: int) -> int:
    return take(n, HEAVY if dtype == torch.float64 else LIGHT)


@brim.maximize("n")
def by_module(model: nn.Module, n: int) -> int:
    return take(n, HEAVY if len(list(model.modules())) > 10 else LIGHT)


@brim.maximize("n")
def by_mode_of_module(model: nn.Module, n: int) -> int:
    return take(n, HEAVY if model.training else LIGHT)


@brim.batch(MOST)
def by_batch(n: int, width: int) -> int:
    return take(n, width)


@brim.range(MOST)
def by_range(start: int, end: int, width: int) -> None:
    take(end - start, width)


CASES: dict[str, tuple[Any, Callable[[], object], Callable[[], object]]] = {
    "an int": (by_int, lambda: by_int(HEAVY, MOST), lambda: by_int(LIGHT, MOST)),
    "a keyword": (
        by_keyword,
        lambda: by_keyword(MOST, wide=True),
        lambda: by_keyword(MOST, wide=False),
    ),
    "a text": (by_text, lambda: by_text("train", MOST), lambda: by_text("eval", MOST)),
    "a tuple": (by_shape, lambda: by_shape((64, KIB), MOST), lambda: by_shape((1, KIB), MOST)),
    "a dtype": (
        by_dtype,
        lambda: by_dtype(torch.float64, MOST),
        lambda: by_dtype(torch.float32, MOST),
    ),
    "an attribute of self": (
        Plain.run,
        lambda: Plain(HEAVY).run(MOST),
        lambda: Plain(LIGHT).run(MOST),
    ),
    "a module's layers": (
        by_module,
        lambda: by_module(Layered(12), MOST),
        lambda: by_module(Layered(1), MOST),
    ),
    "a module's mode": (
        by_mode_of_module,
        lambda: by_mode_of_module(nn.Linear(2, 2), MOST),
        lambda: by_mode_of_module(nn.Linear(2, 2).eval(), MOST),
    ),
    "batch": (by_batch, lambda: by_batch(HEAVY), lambda: by_batch(LIGHT)),
}


@pytest.mark.parametrize("case", CASES)
def test_settings_tell_calls_apart(case: str) -> None:
    adaptive, heavy, light = CASES[case]
    adaptive.clear()
    for _ in range(3):
        limited = heavy()
        assert isinstance(limited, int)
        assert limited <= 1024
    light()
    assert light() == MOST
    again = heavy()
    assert isinstance(again, int)
    assert 900 <= again <= 1024, "the heavy one has not forgotten either"


def test_range_learns_each_width_by_itself() -> None:
    by_range.clear()
    by_range(0, 2 * MOST, HEAVY)
    by_range(0, 2 * MOST, LIGHT)
    _, attempts = by_range.record(0, 2 * MOST, LIGHT)
    assert [attempt.size for attempt in attempts] == [MOST, MOST]


def test_a_call_with_new_settings_begins_with_what_others_learned() -> None:
    by_int.clear()
    by_int(HEAVY, MOST)
    _, attempts = by_int.record(HEAVY - 1, MOST)
    assert [attempt.fitted for attempt in attempts] == [True]


def test_a_counter_is_no_setting() -> None:
    @brim.maximize("n")
    def step(x: torch.Tensor, index: int, n: int) -> int:
        return take(n, HEAVY)

    x = torch.zeros(3)
    failures = 0
    for index in range(200):
        _, attempts = step.record(x, index, MOST)
        failures += sum(not attempt.fitted for attempt in attempts) if index else 0
    assert failures == 0


def test_a_counter_does_not_fill_the_memory(tmp_path: pathlib.Path) -> None:
    @brim.maximize("n", persist=tmp_path)
    def step(index: int, n: int) -> int:
        return take(n, HEAVY)

    for index in range(100):
        step(index, MOST)
    brim.SizeMemory.flush()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert 1 <= len(files) <= 12


def test_what_nothing_tells_apart_fades() -> None:
    width = [HEAVY]

    @brim.maximize("n")
    def work(n: int) -> int:
        return take(n, width[0])

    work(MOST)
    width[0] = LIGHT
    assert [work(MOST) for _ in range(3)][-1] == MOST


def test_forget_forgets_the_wider_kind_too() -> None:
    by_int.clear()
    by_int(HEAVY, MOST)
    by_int.forget(HEAVY, MOST)
    _, attempts = by_int.record(HEAVY, MOST)
    assert attempts[0].size == MOST


SCRIPT = """
import sys, torch, brim
from torch import nn
brim.install_cpu_allocator()
@brim.maximize("n", persist=sys.argv[1])
def work(model, mode, n):
    torch.empty(n * 65536, dtype=torch.uint8)
with brim.budget(brim.memory_stats("cpu").allocated + 64 * 2**20, "cpu"):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    print(len(work.record(model, "train", 4096)[1]))
"""


@pytest.mark.slow
def test_modules_are_the_same_in_another_process(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    attempts = [
        int(
            subprocess.run(
                [sys.executable, str(script), str(tmp_path / "sizes")],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(2)
    ]
    assert attempts[0] > 1
    assert attempts[1] == 1
