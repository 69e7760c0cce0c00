"""Wrong arguments of brim.data, and odd ones that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import brim
from brim.data import (
    BucketBatchSampler,
    PackedBatchSampler,
    SizeAwareBatchSampler,
    create_buckets,
    least_padding_boundaries,
    size_aware_batching,
)

SIZES = [2, 2, 3, 1, 5, 4]
Make = Callable[..., Any]


def ordered(**arguments: Any) -> Any:
    return SizeAwareBatchSampler(
        **{"sampler": range(6), "sizeof": SIZES, "max_total_size": 5, "cost": "sum", **arguments}
    )


def packed(**arguments: Any) -> Any:
    return PackedBatchSampler(**{"sizes": SIZES, "max_total_size": 5, "cost": "sum", **arguments})


def bucket(**arguments: Any) -> Any:
    return BucketBatchSampler(
        **{"sizes": SIZES, "bucket_boundaries": [0, 3, 9], "batch_size": 2, **arguments}
    )


def streaming(**arguments: Any) -> Any:
    return size_aware_batching(
        **{"dataset": ["a", "bc"], "sizeof": len, "max_total_size": 5, "cost": "sum", **arguments}
    )


UNFITTED = brim.MemoryModel()
MAXIMA: list[tuple[Any, type[Exception], str]] = [
    (0, ValueError, "max_total_size must be a positive, finite number, got 0"),
    (-1, ValueError, "max_total_size must be a positive, finite number, got -1"),
    (-0.5, ValueError, "max_total_size must be a positive, finite number, got -0.5"),
    (float("nan"), ValueError, "max_total_size must be a positive, finite number, got nan"),
    (float("inf"), ValueError, "max_total_size must be a positive, finite number, got inf"),
    (2**70, ValueError, "max_total_size must fit 64 bits, got 11805"),
    (True, TypeError, "max_total_size must be a positive number, got True"),
    (None, TypeError, "max_total_size must be a positive number, got None"),
    (3j, TypeError, "max_total_size must be a positive number, got 3j"),
    ({5}, TypeError, r"max_total_size must be a positive number, got \{5\}"),
    ("8GiB", TypeError, "max_total_size must be a positive number, got '8GiB'; text is for"),
    ([], ValueError, "max_total_size is empty"),
    ([5, 0], ValueError, "max_total_size must be a positive, finite number, got 0"),
    ([5, "a"], TypeError, "max_total_size must be a positive number, got 'a'"),
    (torch.tensor([True]), TypeError, "max_total_size must be ints or floats, got a tensor of"),
]


@pytest.mark.parametrize("make", [ordered, packed, streaming])
@pytest.mark.parametrize(("maximum", "error", "text"), MAXIMA)
def test_wrong_budget(make: Make, maximum: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(max_total_size=maximum)


@pytest.mark.parametrize(
    ("maximum", "error", "text"), [row for row in MAXIMA if row[0] is not None]
)
def test_wrong_budget_of_buckets(maximum: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        bucket(max_total_size=maximum, batch_size=None)


@pytest.mark.parametrize("maximum", [5, 5.0, np.int8(5), np.float32(5), torch.tensor(5.0), 5.9])
def test_a_budget_may_be_any_real_number(maximum: Any) -> None:
    assert list(ordered(max_total_size=maximum)) == [[0, 1], [2, 3], [4], [5]]


@pytest.mark.parametrize("make", [ordered, packed, streaming])
@pytest.mark.parametrize(
    ("cost", "error", "text"),
    [
        ("x", ValueError, 'cost must be "sum", "count".* got "x"'),
        ("Sum", ValueError, 'cost must be "sum", "count".* got "Sum"'),
        (None, TypeError, 'cost must be "sum", "count".* got None'),
        (7, TypeError, 'cost must be "sum", "count".*or a function .* got 7'),
        (UNFITTED, ValueError, "cost is a memory model that has not been fitted"),
        (["sum", "count"], ValueError, "cost has 2 entries and max_total_size 1"),
    ],
)
def test_wrong_cost(make: Make, cost: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(cost=cost)


COMMON: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"oversize": "x"}, ValueError, 'oversize must be "leave_out", .*"truncate", got \'x\''),
    ({"oversize": None}, ValueError, 'oversize must be "leave_out", .*"truncate", got None'),
    ({"oversize": 5}, ValueError, 'oversize must be "leave_out", .*"truncate", got 5'),
    ({"batch_multiple": 0}, ValueError, "batch_multiple must be at least 1, got 0"),
    ({"batch_multiple": 1.5}, TypeError, "batch_multiple must be an int, got 1.5"),
    ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
    ({"world_size": 2.0}, TypeError, "world_size must be an int, got 2.0"),
    ({"rank": 1}, ValueError, "rank must be from 0 to world_size - 1 = 0, got 1"),
    ({"rank": -1, "world_size": 2}, ValueError, "rank must be at least 0, got -1"),
    ({"rank": "0"}, TypeError, "rank must be an int, got '0'"),
    ({"rank": False}, TypeError, "rank must be an int, got False"),
    ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    ({"seed": 2**63}, ValueError, r"seed must be below 2\*\*63, got 92233"),
    ({"seed": 1.5}, TypeError, "seed must be an int, got 1.5"),
    ({"seed": True}, TypeError, "seed must be an int, got True"),
    ({"shuffle": 1}, TypeError, "shuffle must be True or False, got 1"),
    ({"as_tensors": None}, TypeError, "as_tensors must be True or False, got None"),
    ({"generator": 5}, TypeError, "generator must be a torch.Generator, got 5"),
    ({"generator": torch.Generator(), "seed": 1}, ValueError, "either seed or generator, not both"),
    ({"generator": torch.Generator(), "seed": 0}, ValueError, "got seed=0 and generator=<torch"),
    ({"colour": 1}, TypeError, r"^\w+BatchSampler got an unexpected keyword argument 'colour'"),
    (
        {"shuffle": True, "generator": torch.Generator(), "world_size": 2},
        ValueError,
        "seed must be given when world_size > 1",
    ),
]


@pytest.mark.parametrize("make", [ordered, packed, bucket])
@pytest.mark.parametrize(("arguments", "error", "text"), COMMON)
def test_wrong_argument_of_a_sampler(
    make: Make, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(**arguments)


@pytest.mark.parametrize("sampler", [SizeAwareBatchSampler, PackedBatchSampler])
@pytest.mark.parametrize(("arguments", "error", "text"), COMMON)
def test_wrong_argument_of_fit_is_an_error_before_anything_is_measured(
    sampler: Any, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    calls: list[object] = []
    with pytest.raises(error, match=text):
        sampler.fit(SIZES, calls.append, SIZES, "1GiB", "cpu", **arguments)
    assert calls == []


@pytest.mark.parametrize("sizeof", [SIZES, SIZES.__getitem__, dict(enumerate(SIZES))])
def test_wrong_batch_multiple_is_told_of_before_sizes_are_asked_for(sizeof: Any) -> None:
    with pytest.raises(ValueError, match=r"batch_multiple must not exceed .*, 2, got 3"):
        ordered(sizeof=sizeof, max_batch_size=2, batch_multiple=3)


@pytest.mark.parametrize("make", [ordered, packed, bucket])
def test_wrong_epoch(make: Make) -> None:
    sampler = make(shuffle=True, seed=0)
    for epoch, error, text in (
        (-1, ValueError, "epoch must be at least 0, got -1"),
        (2**63, ValueError, r"epoch must be below 2\*\*63"),
        (1.0, TypeError, "epoch must be an int, got 1.0"),
        (True, TypeError, "epoch must be an int, got True"),
        (None, TypeError, "epoch must be an int, got None"),
    ):
        with pytest.raises(error, match=text):
            sampler.set_epoch(epoch)
    sampler.set_epoch(np.int32(3))
    assert sampler.epoch == 3


@pytest.mark.parametrize(
    ("window", "error", "text"),
    [
        (0, ValueError, "window must be at least 1, got 0"),
        (-5, ValueError, "window must be at least 1, got -5"),
        (2**63, ValueError, r"window must be below 2\*\*63"),
        (1.5, TypeError, "window must be an int, got 1.5"),
        (True, TypeError, "window must be an int, got True"),
        ("10", TypeError, "window must be an int, got '10'"),
    ],
)
def test_wrong_window(window: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        packed(window=window)


READ_ONLY = np.array([3, 1, 1])
READ_ONLY.setflags(write=False)
MASK = [True, False, True, True, True, True]


@pytest.mark.parametrize(
    ("indices", "error", "text"),
    [
        ([0, 6], ValueError, "from 0 to 5, the samples that have a size, got 6 at place 1"),
        ([-1], ValueError, "from 0 to 5, the samples that have a size, got -1 at place 0"),
        (range(3, 7), ValueError, "from 0 to 5, the samples that have a size, got 6 at place 3"),
        ([0, 2**70], ValueError, "must fit 64 bits, got 11805.* at place 1"),
        ([0.5], TypeError, "must be ints, got 0.5 at place 0"),
        (["a"], TypeError, "must be ints, got 'a' at place 0"),
        (MASK, TypeError, "must be ints, got True at place 0"),
        (torch.tensor(MASK), TypeError, "a tensor of torch.bool"),
        (np.array(MASK), TypeError, "an array of bool"),
        (torch.tensor([0.0]), TypeError, "whole numbers in one dimension, got torch.float64"),
        (torch.tensor([[0]]), TypeError, r"whole numbers in one dimension.*\(1, 1\)"),
        (torch.tensor(1), TypeError, r"whole numbers in one dimension.*shape \(\)"),
        ("01", TypeError, "must be a.* iterable of indices, got '01'"),
        (5, TypeError, "must be a.* iterable of indices, got 5"),
    ],
)
def test_wrong_indices(indices: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"(sampler|indices) .*{text}|{text}"):
        ordered(sampler=indices)
    with pytest.raises(error, match=text.replace("a.* iterable", "an iterable")):
        packed(indices=indices)


@pytest.mark.parametrize(
    "indices",
    [
        [3, 1, 1],
        (3, 1, 1),
        torch.tensor([3, 1, 1], dtype=torch.uint8),
        torch.tensor([3, 0, 1, 0, 1])[::2],
        np.array([3, 1, 1], dtype=">i2"),
        np.array([3, 1, 1], dtype=np.uint64),
        READ_ONLY,
        [np.int64(3), torch.tensor(1), 1],
    ],
)
def test_every_kind_of_indices_means_the_same(indices: Any) -> None:
    assert list(ordered(sampler=indices)) == [[3, 1, 1]]
    assert list(packed(indices=indices)) == [[1, 1, 3]]


def test_sampler_with_more_samples_than_sizes() -> None:
    with pytest.raises(ValueError, match="sampler has 9 samples, and sizeof only 6 sizes"):
        ordered(sampler=range(9))
    assert list(ordered(sampler=range(3))) == [[0, 1], [2]]


def test_a_callable_needs_indices_to_pack() -> None:
    with pytest.raises(ValueError, match="indices must say which samples there are"):
        packed(sizes=lambda index: 1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dataset": 5}, TypeError, "dataset must be an iterable of samples, got 5"),
        ({"dataset": "abc"}, TypeError, "dataset must be an iterable of samples, got 'abc'"),
        ({"sizeof": [1, 2]}, TypeError, r"sizeof must be a callable or a mapping.*got \[1, 2\]"),
        ({"sizeof": 5}, TypeError, "sizeof must be a callable, a mapping.*got 5"),
        ({"collate_fn": 5}, TypeError, "collate_fn must be callable, got 5"),
        ({"info_logger": 5}, TypeError, "info_logger must be callable, got 5"),
        ({"warn_logger": 5}, TypeError, "warn_logger must be callable, got 5"),
        ({"oversize": "x"}, ValueError, "oversize must be .*got 'x'"),
    ],
)
def test_wrong_argument_of_the_generator_is_an_error_of_the_call(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        streaming(**arguments)  # not iterated over


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: create_buckets(SIZES, 0, 1), ValueError, "max_width=0 .*at least 1"),
        (lambda: create_buckets(SIZES, 1, 0), ValueError, "min_bucket_count=0 .*at least 1"),
        (lambda: create_buckets(SIZES, 1.5, 1), TypeError, "max_width must be an int, got 1.5"),  # type: ignore[arg-type]
        (lambda: create_buckets(SIZES, True, 1), TypeError, "max_width must be an int, got True"),
        (lambda: create_buckets([1.5], 1, 1), ValueError, "sizes must be ints"),
        (lambda: least_padding_boundaries(SIZES, 0), ValueError, "buckets=0 .*at least 1"),
        (lambda: least_padding_boundaries(SIZES, 1.5), TypeError, "buckets must be an int"),  # type: ignore[arg-type]
        (lambda: least_padding_boundaries(SIZES, 2**70), ValueError, "buckets must"),
    ],
)
def test_wrong_argument_for_making_buckets(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"batch_size": None}, ValueError, "batch_size or max_total_size"),
        ({"max_total_size": 5}, ValueError, "either batch_size or max_total_size, not both"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": [2, 0]}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": [2]}, ValueError, "one for each of the 2 buckets, got 1"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an int, got 2.0"),
        ({"batch_size": 2**70}, ValueError, r"batch_size must be below 2\*\*63"),
        ({"drop_last": 1}, TypeError, "drop_last must be True or False, got 1"),
        ({"bucket_boundaries": [0]}, ValueError, "bucket_boundaries must be at least two, got 1"),
        ({"bucket_boundaries": [0, 3, 3]}, ValueError, "finite and ascending, got 3 at index 2"),
        ({"bucket_boundaries": [0, float("nan")]}, ValueError, "bucket_boundaries must be finite"),
        ({"bucket_boundaries": [-float("inf"), 9]}, ValueError, "bucket_boundaries must be finite"),
        ({"bucket_boundaries": [[0, 9]]}, TypeError, "bucket_boundaries must be ints or floats"),
        ({"bucket_boundaries": [0, "9"]}, TypeError, "bucket_boundaries .* got '9' at index 1"),
        ({"bucket_boundaries": [False, True]}, TypeError, "bucket_boundaries .* got False"),
        ({"bucket_boundaries": [0, 2**53 + 1]}, ValueError, "bucket_boundaries must not exceed"),
        ({"bucket_boundaries": torch.ones(2, 2)}, ValueError, "bucket_boundaries must have one"),
        ({"bucket_boundaries": None}, TypeError, "bucket_boundaries must be a tensor"),
        ({"bucket_boundaries": [100, 200]}, RuntimeError, "no sample is in any bucket"),
    ],
)
def test_wrong_argument_of_buckets(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        bucket(**arguments)
