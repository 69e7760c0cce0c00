"""The face of bionemo's size_aware_batching: names, and batches by size."""

from __future__ import annotations

import importlib
import inspect
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from brim.compat.bionemo.size_aware_batching import memory_model, sampler, utils
from brim.compat.bionemo.size_aware_batching.sampler import (
    SizeAwareBatchSampler,
    size_aware_batching,
)
from brim.compat.bionemo.size_aware_batching.utils import collect_cuda_peak_alloc

PACKAGE = "brim.compat.bionemo.size_aware_batching"
TENSORS = [torch.tensor([2 * i + 1, 2 * i + 2]) for i in range(5)]


def batches_by_hand(sizes: list[float], limit: float) -> list[list[int]]:
    """The reference: indices in their order, a new batch where the next would not fit."""
    batches: list[list[int]] = []
    for index, size in enumerate(sizes):
        if size > limit:
            continue
        if not batches or sum(sizes[i] for i in batches[-1]) + size > limit:
            batches.append([])
        batches[-1].append(index)
    return batches


# ---------------------------------------------------------------- names


def test_module_tree_and_public_names_are_the_originals() -> None:
    assert set(sampler.__all__) == {
        "BucketBatchSampler",
        "Real",
        "SizeAwareBatchSampler",
        "size_aware_batching",
    }
    assert set(utils.__all__) == {"Buckets", "collect_cuda_peak_alloc", "create_buckets"}
    assert isinstance(3, sampler.Real)
    assert isinstance(0.5, sampler.Real)
    assert not isinstance("3", sampler.Real)
    for name, names in (("sampler", sampler.__all__), ("utils", utils.__all__)):
        module = importlib.import_module(f"{PACKAGE}.{name}")
        assert all(hasattr(module, public) for public in names)
    assert issubclass(memory_model.PolynomialRegression, torch.nn.Module)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            size_aware_batching,
            "dataset sizeof max_total_size collate_fn info_logger warn_logger",
        ),
        (SizeAwareBatchSampler, "sampler sizeof max_total_size info_logger warn_logger"),
        (
            sampler.BucketBatchSampler,
            "sizes bucket_boundaries base_batch_sampler_class base_batch_sampler_shared_kwargs "
            "base_batch_sampler_individual_kwargs shuffle generator",
        ),
        (collect_cuda_peak_alloc, "dataset work device cleanup"),
        (utils.create_buckets, "sizes max_width min_bucket_count"),
    ],
)
def test_arguments_have_the_originals_names_and_order(
    function: Callable[..., Any], names: str
) -> None:
    assert list(inspect.signature(function).parameters) == names.split()


def test_the_original_is_not_needed() -> None:
    code = (
        f"import sys, {PACKAGE}.sampler, {PACKAGE}.utils, {PACKAGE}.memory_model;"
        "sys.exit('bionemo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- batches


def test_documented_example_of_size_aware_batching() -> None:
    batches = list(size_aware_batching(TENSORS, torch.Tensor.numel, 4, collate_fn=default_collate))
    assert [torch.as_tensor(batch).tolist() for batch in batches] == [
        [[1, 2], [3, 4]],
        [[5, 6], [7, 8]],
        [[9, 10]],
    ]


def test_documented_example_of_the_sampler() -> None:
    batch_sampler = SizeAwareBatchSampler(
        sampler=SequentialSampler(TENSORS),
        sizeof=lambda index: TENSORS[index].numel(),
        max_total_size=4,
    )
    assert list(batch_sampler) == [[0, 1], [2, 3], [4]]


@given(
    st.lists(st.integers(0, 12) | st.sampled_from([0.5, 2.25, 11.5])),
    st.integers(0, 15) | st.just(math.inf),
)
def test_batches_are_those_of_the_reference(sizes: list[float], limit: float) -> None:
    expected = batches_by_hand(sizes, limit)
    assert list(size_aware_batching(range(len(sizes)), sizes.__getitem__, limit)) == expected
    if limit > 0:
        quiet = SizeAwareBatchSampler(range(len(sizes)), sizes, limit, None, None)
        assert list(quiet) == expected
        assert list(quiet) == expected


@pytest.mark.parametrize(
    "sizeof",
    [
        [3, 1, 2, 2, 4].__getitem__,
        [3, 1, 2, 2, 4],
        (3, 1, 2, 2, 4),
        dict(enumerate([3, 1, 2, 2, 4])),
        torch.tensor([3, 1, 2, 2, 4]),
        torch.tensor([3.0, 1, 2, 2, 4]),
        np.array([3, 1, 2, 2, 4]),
        np.array([3, 1, 2, 2, 4], dtype=np.float32),
        lambda i: torch.tensor([3, 1, 2, 2, 4])[i],
        lambda i: np.array([3, 1, 2, 2, 4])[i],
        lambda i: Decimal([3, 1, 2, 2, 4][i]),
    ],
)
def test_sizes_come_as_function_mapping_sequence_tensor_or_array(sizeof: Any) -> None:
    batch_sampler = SizeAwareBatchSampler(range(5), sizeof, 4)
    assert list(batch_sampler) == [[0, 1], [2, 3], [4]]
    assert [batch_sampler._sizeof(i) for i in range(5)] == [3, 1, 2, 2, 4]


def test_mapping_is_asked_for_the_elements_themselves() -> None:
    sizes = {"a": 3, "b": 1, "c": 2}
    assert list(size_aware_batching("abc", sizes, 4)) == [["a", "b"], ["c"]]


@pytest.mark.parametrize("number", [lambda n: torch.tensor(n, dtype=torch.uint8), np.uint8])
def test_total_of_small_integers_does_not_wrap(number: Callable[[int], Any]) -> None:
    assert list(size_aware_batching(range(3), lambda _: number(200), 250)) == [[0], [1], [2]]


def test_iterable_is_read_no_further_than_the_batch_needs() -> None:
    read = []

    def endless() -> Iterator[int]:
        for i in range(10**9):
            read.append(i)
            yield i

    batches = size_aware_batching(endless(), lambda _: 1, 3)
    assert next(batches) == [0, 1, 2]
    assert read == [0, 1, 2, 3]


def test_sampler_is_asked_anew_for_each_iteration() -> None:
    generator = torch.Generator().manual_seed(0)
    random = RandomSampler(range(50), generator=generator)
    batch_sampler = SizeAwareBatchSampler(random, [1] * 50, 7, info_logger=None)
    first, second = list(batch_sampler), list(batch_sampler)
    assert first != second
    for batches in (first, second):
        assert sorted(chain.from_iterable(batches)) == list(range(50))


def test_two_iterators_do_not_disturb_each_other() -> None:
    batch_sampler = SizeAwareBatchSampler(range(9), [1] * 9, 2, info_logger=None)
    expected = list(batch_sampler)
    assert list(zip(batch_sampler, batch_sampler, strict=True)) == [(b, b) for b in expected]


@pytest.mark.parametrize("workers", [0, 2])
def test_works_as_the_batch_sampler_of_a_data_loader(workers: int) -> None:
    lengths = [3, 1, 2, 2, 4]
    data = [torch.full((4,), length) for length in lengths]
    loader: DataLoader[torch.Tensor] = DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=SizeAwareBatchSampler(range(5), lengths, 4, info_logger=None),
        num_workers=workers,
    )
    assert [batch[:, 0].tolist() for batch in loader] == [[3, 1], [2, 2], [4]]


# ---------------------------------------------------------------- reports


def test_sampler_prints_and_warns_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    batch_sampler = SizeAwareBatchSampler(range(4), [1, 9, 2, 2], 4)
    with pytest.warns(UserWarning, match="max_total_size") as warned:
        assert list(batch_sampler) == [[0, 2], [3]]
    assert [str(one.message) for one in warned] == [
        "Size of element 1 exceeds max_total_size (9 > 4), skipping",
        "3 of 4 samples were batched; the other 1 exceed max_total_size=4",
    ]
    assert capsys.readouterr().out == "Batched 3 samples into 2 batches of at most 4 each\n"


def test_function_reports_only_to_the_loggers_it_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(size_aware_batching(range(3), [1, 9, 2], 4)) == [[0, 2]]
    info: list[str] = []
    warned: list[str] = []
    list(size_aware_batching(range(3), [1, 9, 2], 4, None, info.append, warned.append))
    assert len(info) == 1
    assert "2 samples into 1 batches" in info[0]
    assert len(warned) == 2
    assert "element 1" in warned[0]
    assert capsys.readouterr().out == ""


def test_nothing_is_warned_of_when_everything_fits() -> None:
    warned: list[str] = []
    list(size_aware_batching(range(3), [1, 4, 2], 4, warn_logger=warned.append))
    assert warned == []


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("limit", [-1, -0.5, math.nan, -math.inf])
def test_sampler_refuses_a_limit_that_is_negative(limit: float) -> None:
    with pytest.raises(ValueError, match="max_total_size should not be negative but got"):
        SizeAwareBatchSampler(range(3), [1, 1, 1], limit)


def test_sampler_accepts_a_limit_of_zero() -> None:
    """The original's documentation says no, its own tests say yes."""
    sampler = SizeAwareBatchSampler(range(3), [0, 1, 0], 0)
    for _ in range(2):
        with pytest.warns(UserWarning, match="exceed"):
            assert list(sampler) == [[0, 2]]


@pytest.mark.parametrize("limit", [{}, "4", None, [4]])
def test_sampler_refuses_a_limit_that_is_no_number(limit: Any) -> None:
    with pytest.raises(ValueError, match="max_total_size should be int or float"):
        SizeAwareBatchSampler(range(3), -1, limit)  # type: ignore[arg-type]


def test_function_accepts_a_limit_of_zero() -> None:
    assert list(size_aware_batching(range(3), [0, 1, 0], 0)) == [[0, 2]]
    with pytest.raises(ValueError, match="max_total_size must be a number, but got nan"):
        size_aware_batching(range(3), [0, 1, 0], math.nan)


@pytest.mark.parametrize(
    "sizeof", [" invalid type", b"123", 7, None, {1, 2}, torch.ones(2, 2), np.float64(3)]
)
def test_sizeof_of_another_kind_is_a_type_error_at_once(sizeof: Any) -> None:
    with pytest.raises(TypeError, match=r"^sizeof must be a callable"):
        SizeAwareBatchSampler(range(3), sizeof, 60)
    with pytest.raises(TypeError, match=r"^sizeof must be a callable"):
        size_aware_batching(range(3), sizeof, 60)


@pytest.mark.parametrize("wrong", ["not a sampler", 5, None])
def test_sampler_of_another_kind_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="sampler should be an instance of"):
        SizeAwareBatchSampler(wrong, {}, 60)


def test_collate_fn_that_cannot_be_called_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="collate_fn must be a callable or None, but got 3"):
        size_aware_batching(range(3), [1, 1, 1], 2, collate_fn=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [math.nan, -1, -0.25, math.inf, -math.inf, torch.tensor(math.nan)])
@pytest.mark.parametrize("limit", [4, math.inf])
def test_what_is_no_size_is_a_value_error_that_names_the_element(size: Any, limit: float) -> None:
    batches = size_aware_batching("abc", {"a": 4, "b": size, "c": 1}, limit)
    with pytest.raises(ValueError, match=r"the size of element b is .*at least 0"):
        list(batches)


def test_failing_sizeof_is_a_runtime_error_from_its_cause() -> None:
    def sizeof(index: int) -> int:
        raise OSError("no such file")

    with pytest.raises(RuntimeError, match="sizeof raises error at data=0: no such file") as caught:
        list(SizeAwareBatchSampler(range(3), sizeof, 1))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RuntimeError, match="sizeof raises error at data=0"):
        list(SizeAwareBatchSampler(range(3), {}, 1))


def test_size_that_does_not_compare_is_a_type_error_that_shows_it() -> None:
    with pytest.raises(TypeError, match=r"'>' not supported.*sizeof\(0\) is '0', not int or float"):
        list(SizeAwareBatchSampler(range(3), str, 1))  # type: ignore[arg-type]
