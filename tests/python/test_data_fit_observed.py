"""`fit(…, observer=…)`: what it tells while it measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import brim
from brim.data import FitAttempt, PackedBatchSampler

LENGTHS = [5 + 7 * i % 90 for i in range(400)]


def fit(work: Any, room: int, held: int, **options: Any) -> PackedBatchSampler:
    return PackedBatchSampler.fit(LENGTHS, work, LENGTHS, held + room, "cpu", **options)


def padded(lengths: list[int]) -> None:
    torch.zeros(len(lengths) * max(lengths), 1024, dtype=torch.uint8)


def test_each_batch_is_told_of_and_the_sampler_is_the_same(held: int) -> None:
    sizes: list[int] = []
    told: list[FitAttempt] = []

    def work(lengths: list[int]) -> None:
        assert len(told) == len(sizes)  # at once, not in the end
        sizes.append(len(lengths) * max(lengths) * 1024)
        padded(lengths)

    plain = fit(padded, 2**20, held)
    made = fit(work, 2**20, held, observer=told.append)
    assert made.max_total_size == plain.max_total_size
    assert list(made) == list(plain)
    assert made.fit_report is not None
    assert [each.number for each in told] == list(range(1, made.fit_report.runs + 1))
    assert [each.peak for each in told] == sizes
    assert all(each.fitted and each.held >= held and each.seconds > 0 for each in told)
    assert told[0].size == len(told[0].indices) > 0


@pytest.mark.filterwarnings("ignore:the sizes of the samples|.*are left out, over budget")
def test_a_failed_batch_is_told_of_when_it_is_gone(held: int) -> None:
    told: list[tuple[bool, int]] = []

    def observer(attempt: FitAttempt) -> None:
        told.append((attempt.fitted, brim.memory_stats("cpu").allocated))

    def work(lengths: list[int]) -> None:
        kept = torch.zeros(len(lengths) * max(lengths), 1024, dtype=torch.uint8)
        if kept.nbytes > 900 * 1024:
            raise torch.OutOfMemoryError("out of memory")

    fit(work, 2**20, held, observer=observer)
    failures = [allocated for fitted, allocated in told if not fitted]
    assert failures
    assert set(failures) == {held}


def test_the_last_failure_is_told_of_too(held: int) -> None:
    told: list[FitAttempt] = []

    def work(lengths: list[int]) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(Exception, match=r"smallest sample|out of memory"):
        fit(work, 2**20, held, observer=told.append)
    assert told
    assert not any(each.fitted for each in told)


def test_other_errors_pass_and_are_no_attempt(held: int) -> None:
    told: list[FitAttempt] = []

    def work(lengths: list[int]) -> None:
        padded(lengths)
        if told:
            raise KeyError("a defect")

    with pytest.raises(KeyError, match="a defect"):
        fit(work, 2**20, held, observer=told.append)
    assert [each.fitted for each in told] == [True]


def test_an_observer_must_be_callable(held: int) -> None:
    with pytest.raises(TypeError, match="observer must be callable"):
        fit(padded, 2**20, held, observer=True)
