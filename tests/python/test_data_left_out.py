"""Samples over the budget are left out, counted and named, or an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from brim.data import (
    BucketBatchSampler,
    PackedBatchSampler,
    SizeAwareBatchSampler,
    size_aware_batching,
)

SIZES = [2, 2, 3, 1, 5, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: SizeAwareBatchSampler(range(6), SIZES, 3, **o),
        lambda **o: PackedBatchSampler(SIZES, 3, **o),
        lambda **o: BucketBatchSampler(SIZES, [0, 3, 9], max_total_size=3, cost="sum", **o),
    ],
)
def test_sample_over_the_budget_is_told_and_reported_or_an_error(
    make: Callable[..., Any],
) -> None:
    with pytest.warns(UserWarning, match="2 of 6 samples are left out, over budget: 4, 5") as told:
        sampler = make()
    assert [Path(warning.filename) for warning in told] == [Path(__file__)]
    assert sorted(chain.from_iterable(sampler)) == [0, 1, 2, 3]
    report = sampler.report()
    assert report.left_out["over budget"].tolist() == [4, 5]
    assert (report.samples, report.batched) == (6, 4)
    assert "over budget" in str(report)
    with pytest.raises(ValueError, match="sample 4 exceeds the budget by itself: its size is 5"):
        make(oversize="error")


def test_streaming_tells_of_a_sample_over_the_budget_at_the_end() -> None:
    def sizeof(index: int) -> int:
        return SIZES[index]

    running = iter(SizeAwareBatchSampler(range(6), sizeof, 3))
    batches = [next(running) for _ in range(4)]
    with pytest.warns(UserWarning, match="2 of 6 samples are left out, over budget: 4, 5") as told:
        assert next(running, None) is None
    assert [Path(warning.filename) for warning in told] == [Path(__file__)]
    assert next(running, None) is None  # and says it once
    assert batches == [[0], [1], [2], [3]]
    with pytest.warns(UserWarning, match="over budget: 4, 5") as told:
        len(SizeAwareBatchSampler(range(6), sizeof, 3))
    assert [Path(warning.filename) for warning in told] == [Path(__file__)]
    refusing = SizeAwareBatchSampler(range(6), sizeof, 3, oversize="error")
    with pytest.raises(ValueError, match="sample 4 exceeds the budget by itself"):
        for _ in refusing:
            pass
    with pytest.raises(ValueError, match="sample 4 exceeds the budget by itself"):
        len(refusing)


def test_loggers_of_the_generator_are_told_once_at_the_end() -> None:
    told: list[str] = []
    infos: list[str] = []
    batches = size_aware_batching(
        ["aa", "b", "cccc", "d"],
        len,
        3,
        info_logger=infos.append,
        warn_logger=told.append,
        cost="sum",
    )
    assert list(batches) == [["aa", "b"], ["d"]]
    assert told == ["1 of 4 samples are left out, over budget: 2"]
    assert infos == ["3 of 4 samples in 2 batches"]
    with pytest.warns(UserWarning, match="1 of 2 samples are left out, over budget: 1") as warned:
        list(size_aware_batching(["a", "bbbb"], len, 3, cost="sum"))
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]


def test_many_left_out_are_counted_and_only_the_first_named() -> None:
    with pytest.warns(UserWarning, match=r"100 of 101 samples .*: 1, 2, 3, 4, 5, …$"):
        PackedBatchSampler([1] + [9] * 100, 5)


def test_no_warning_where_nothing_is_left_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sampler in (
            SizeAwareBatchSampler(range(6), SIZES, 5),
            PackedBatchSampler(SIZES, 5),
            BucketBatchSampler(SIZES, [0, 3, 9], batch_size=2),
        ):
            assert sum(len(batch) for batch in sampler) == 6
