"""Samplers fitted to work whose need is unlike what the memory model expects."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from brim.data import PackedBatchSampler


def made_of_bytes(bytes_of: Callable[[list[int]], float]) -> Callable[[list[int]], None]:
    """Work on a batch of lengths that holds so many bytes."""

    def work(lengths: list[int]) -> None:
        torch.empty(max(int(bytes_of(lengths)), 1), dtype=torch.uint8)

    return work


LENGTHS = [  # few of many sizes
    min(8 + index % 37 * (1 + index % 11), 400) for index in range(600)
]


def shares_used(
    made: Any, lengths: list[int], bytes_of: Callable[[list[int]], float], room: int
) -> list[float]:
    return [bytes_of([lengths[index] for index in batch]) / room for batch in made]


@pytest.mark.filterwarnings("ignore:the sizes of the samples do not determine")
@pytest.mark.parametrize("cost", ["padded", "sum"])
def test_a_loss_that_compares_each_sample_with_each_other_one(cost: str, held: int) -> None:
    def bytes_of(lengths: list[int]) -> float:
        return 1000.0 * len(lengths) ** 2

    room = 2**20
    made = PackedBatchSampler.fit(
        LENGTHS, made_of_bytes(bytes_of), LENGTHS, held + room, "cpu", cost=cost, shuffle=True
    )
    assert made.report().batched == 600
    assert max(shares_used(made, LENGTHS, bytes_of, room)) <= 1


@pytest.mark.filterwarnings("ignore:the sizes of the samples|.*are left out, over budget")
@pytest.mark.parametrize("cost", ["padded", "sum"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        pytest.param(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), marks=pytest.mark.slow),
    ],
)
def test_batches_that_ran_out_of_memory_without_saying_how_much_are_not_made(
    cost: str, error: Exception, held: int
) -> None:
    def work(lengths: list[int]) -> None:
        torch.empty(1000)
        if len(lengths) * max(lengths) > 3000:
            raise error

    for before in (0, 1000):  # bytes: what is measured includes them
        kept = torch.empty(before, dtype=torch.uint8)
        made = PackedBatchSampler.fit(
            *(LENGTHS, work, LENGTHS, held + 2**20, "cpu"),
            cost=cost,
            shuffle=True,
            oversize="leave_out",
        )
        assert max(len(batch) * max(LENGTHS[index] for index in batch) for batch in made) <= 3000
        del kept


def test_a_need_that_grows_faster_than_any_term_stays_within_the_budget(held: int) -> None:
    def bytes_of(lengths: list[int]) -> float:
        return len(lengths) * max(lengths) ** 3 / 100

    room = 2 * 2**20
    with pytest.warns(UserWarning, match="sizes of the samples do not determine|are left out"):
        made = PackedBatchSampler.fit(
            LENGTHS, made_of_bytes(bytes_of), LENGTHS, held + room, "cpu", shuffle=True
        )
    assert max(shares_used(made, LENGTHS, bytes_of, room)) <= 1


@pytest.mark.filterwarnings("ignore:the sizes of the samples|.*are left out, over budget")
@pytest.mark.parametrize("of_each", [False, True])
@pytest.mark.parametrize(
    ("cut", "jump"), [(20, 0.9), (100, 0.1), (100, 0.9), (150, 0.1), (230, 20)]
)
def test_a_need_that_jumps_at_a_length_leaves_out_only_samples_that_do_not_fit(
    jump: float, cut: int, of_each: bool, held: int
) -> None:
    dice = random.Random(0)
    lengths = [min(max(int(dice.lognormvariate(4, 0.6)), 8), 400) for _ in range(800)]
    room = 2**20

    def bytes_of(lengths: list[int]) -> float:
        jumps = len(lengths) if of_each else 1
        return 1000 + 3000 * len(lengths) + (jump * room * jumps if max(lengths) > cut else 0)

    made = PackedBatchSampler.fit(
        lengths, made_of_bytes(bytes_of), lengths, held + room, "cpu", shuffle=True
    )
    assert max(shares_used(made, lengths, bytes_of, room)) <= 1
    assert made.report().batched == sum(bytes_of([length]) <= room for length in lengths)


@pytest.mark.filterwarnings("ignore:the sizes of the samples")
@pytest.mark.parametrize("cut", [300, 500, 900])
def test_an_algorithm_that_needs_many_times_as_much_above_a_length(cut: int, held: int) -> None:
    dice = random.Random(1)
    lengths = [min(max(int(dice.lognormvariate(6, 0.6)), 16), 2048) for _ in range(2000)]
    room = 16 * 2**20

    def bytes_of(lengths: list[int]) -> float:
        times = 6 if max(lengths) > cut else 1
        return 100_000 + 100 * times * len(lengths) * max(lengths)

    made = PackedBatchSampler.fit(
        lengths, made_of_bytes(bytes_of), lengths, held + room, "cpu", shuffle=True
    )
    assert max(shares_used(made, lengths, bytes_of, room)) <= 1
    assert made.report().batched == 2000


def test_empty_samples_do_not_stand_for_others(held: int) -> None:
    lengths = [0] * 50 + LENGTHS

    def bytes_of(lengths: list[int]) -> float:
        return 100 * len(lengths) + 1000 * len(lengths) * max(lengths)

    room = 2 * 2**20
    made = PackedBatchSampler.fit(
        lengths, made_of_bytes(bytes_of), lengths, held + room, "cpu", shuffle=True
    )
    used = shares_used(made, lengths, bytes_of, room)
    assert made.report().batched == 650
    assert 0.9 <= max(used) <= 1


@pytest.mark.parametrize("floor", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("before", [0, 1000, 2**20])
def test_samples_after_each_other_with_a_high_floor_are_all_used(
    floor: float, before: int, held: int
) -> None:
    def bytes_of(lengths: list[int]) -> float:
        return max(floor * 2**21, 100 * sum(lengths))

    kept = torch.empty(before, dtype=torch.uint8)
    held += kept.nbytes
    made = PackedBatchSampler.fit(
        LENGTHS, made_of_bytes(bytes_of), LENGTHS, held + 2 * 2**20, "cpu", cost="sum", shuffle=True
    )
    assert made.report().batched == 600
    assert max(shares_used(made, LENGTHS, bytes_of, 2 * 2**20)) >= 0.9


NOTHING = """
import brim, pytest
from brim.data import PackedBatchSampler
for cost in ("padded", "sum"):
    with pytest.raises(ValueError, match="held no memory on"):
        PackedBatchSampler.fit([1, 2, 3], lambda batch: None, [1, 2, 3], 2**20, "cpu", cost=cost)
"""


def test_work_that_holds_nothing_on_the_device_is_refused() -> None:
    """In a process of its own: here tensors of other tests may be held."""
    subprocess.run([sys.executable, "-c", NOTHING], check=True)
