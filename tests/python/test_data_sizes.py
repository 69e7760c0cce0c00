"""Sizes, budgets and arguments of brim.data: every kind that people have, and every wrong one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

import brim
from brim.data import (
    BatchSamplerBase,
    BucketBatchSampler,
    PackedBatchSampler,
    SizeAwareBatchSampler,
    bucket_stream,
    create_buckets,
    least_padding_boundaries,
    pack_stream,
    size_aware_batching,
)

SIZES = [2, 2, 3, 1, 5, 4]


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.setflags(write=False)
    return array


TENSOR_DTYPES = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
NUMPY_DTYPES = ["i1", "u1", *(o + k + n for o in "<>" for k in "iuf" for n in "248")]

KINDS: dict[str, Any] = {
    "list": SIZES,
    "tuple": tuple(SIZES),
    "floats": [float(size) for size in SIZES],
    "ints and floats": [2, 2.0, 3, 1.0, 5, 4],
    "numpy scalars": [np.int8(2), np.float32(2), np.uint64(3), np.float64(1), 5, np.float16(4)],
    "tensors of ints": [torch.tensor(size) for size in SIZES],
    "tensors of floats": [torch.tensor(float(size)) for size in SIZES],
    "tensor that needs a gradient": torch.tensor(SIZES, dtype=torch.float32, requires_grad=True),
    "every second of a tensor": torch.tensor(SIZES).repeat_interleave(2)[::2],
    "column of a tensor": torch.tensor([SIZES, SIZES]).t()[:, 1],
    "every second of an array": np.repeat(SIZES, 2)[::2],
    "array backwards": np.array(SIZES[::-1])[::-1],
    "array that must not be written": read_only(np.array(SIZES)),
    "big-endian, must not be written": read_only(np.array(SIZES, dtype=">i4")),
    **{str(dtype): torch.tensor(SIZES).to(dtype) for dtype in TENSOR_DTYPES},
    **{f"numpy {dtype}": np.array(SIZES, dtype=dtype) for dtype in NUMPY_DTYPES},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sizes_means_the_same(kind: str) -> None:
    sizes = KINDS[kind]
    expected = [[0, 1], [2, 3], [4], [5]]
    assert list(SizeAwareBatchSampler(range(6), sizes, 5)) == expected
    assert list(SizeAwareBatchSampler(range(6), lambda index: sizes[index], 5)) == expected
    assert list(PackedBatchSampler(sizes, 5)) == list(PackedBatchSampler(SIZES, 5))
    assert list(BucketBatchSampler(sizes, [0, 3, 9], batch_size=2, shuffle=False)) == [
        [0, 1],
        [3],
        [2, 4],
        [5],
    ]
    *inner, last = least_padding_boundaries(sizes, 2).tolist()
    assert inner == [1, 3]
    assert 5 < last <= 6
    if isinstance(sizes, (torch.Tensor, np.ndarray)) and "f" not in str(sizes.dtype):
        assert create_buckets(sizes, 3, 2).bucket_sizes.tolist() == [3, 2, 1]


def test_a_range_holds_sizes() -> None:
    assert list(SizeAwareBatchSampler(range(4), range(1, 5), 5)) == [[0, 1], [2], [3]]
    assert list(PackedBatchSampler(range(1, 5), 5)) == [[3, 0], [2, 1]]


def test_a_mapping_holds_sizes_by_index() -> None:
    sizes = {10: 2, 20: 2, 30: 1}
    assert list(SizeAwareBatchSampler([10, 20, 30], sizes, 4)) == [[10, 20], [30]]
    assert len(SizeAwareBatchSampler([10, 20, 30], sizes, 4)) == 2
    assert list(PackedBatchSampler(sizes, 4, indices=[10, 30])) == [[10, 30]]


def test_samplers_keep_sizes_and_do_not_write_to_them() -> None:
    sizes = torch.tensor(SIZES)
    sampler = PackedBatchSampler(sizes, 5)
    assert sampler.sizes is sizes
    list(sampler)
    assert sizes.tolist() == SIZES


@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "u4", "i8", "f4", "f8"])
@pytest.mark.parametrize("mode", ["r", "r+", "array"])
def test_sizes_are_read_where_they_are(dtype: str, mode: Any, tmp_path: Path) -> None:
    sizes: Any = np.array(SIZES, dtype=dtype)
    if mode != "array":
        sizes.tofile(tmp_path / "sizes")
        sizes = np.memmap(tmp_path / "sizes", dtype=dtype, mode=mode)
    packed = PackedBatchSampler(sizes, 5, shuffle=True, seed=1)
    ordered = SizeAwareBatchSampler(range(6), sizes, 5, shuffle=True, seed=1)
    buckets = BucketBatchSampler(sizes, [0, 3, 9], max_total_size=5, seed=1)
    for column in (packed._columns[0], ordered._columns[0], buckets.sizes):  # type: ignore[index]
        assert column.data_ptr() == sizes.ctypes.data
    assert list(packed) == list(PackedBatchSampler(SIZES, 5, shuffle=True, seed=1))
    assert list(ordered) == list(SizeAwareBatchSampler(range(6), SIZES, 5, shuffle=True, seed=1))
    expected = BucketBatchSampler(SIZES, [0, 3, 9], max_total_size=5, seed=1)
    assert list(buckets) == list(expected)


class Column(Sequence[int]):
    """As that of Hugging Face's `datasets`: slow for each value, quick for many."""

    def __init__(self, values: list[int], form: Callable[[list[int]], Any]) -> None:
        self.values, self.form = values, form

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> Any:
        assert isinstance(key, slice), "one by one"
        return self.form(self.values[key])

    def __iter__(self) -> Any:
        raise AssertionError("one by one")


class Series:
    """As those of pandas and of Arrow: no sequence and no array, but NumPy makes one of it."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.asarray(self.values)


def arrow(values: Any) -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.chunked_array([values[:2], values[2:]])


def hugging_face(values: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    table = pytest.importorskip("pyarrow").table({"length": values})
    return datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="0")["length"]


COLUMNS: dict[str, Callable[[], Any]] = {
    "lists": lambda: Column(SIZES, list),
    "arrays": lambda: Column(SIZES, np.array),
    "tensors": lambda: Column(SIZES, torch.tensor),
    "series": lambda: Column(SIZES, Series),
    "Series": lambda: Series(SIZES),
    "Series of objects": lambda: Series(np.array(SIZES, dtype=object)),
    "pandas": lambda: pytest.importorskip("pandas").Series(SIZES),
    "pandas, may be missing": lambda: pytest.importorskip("pandas").Series(SIZES, dtype="Int64"),
    "Arrow": lambda: arrow(SIZES),
    "datasets": lambda: hugging_face(SIZES),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_tables_are_read_at_once(kind: str) -> None:
    make = COLUMNS[kind]
    assert list(PackedBatchSampler(make(), 5)) == list(PackedBatchSampler(SIZES, 5))
    assert list(SizeAwareBatchSampler(range(6), make(), 5)) == [[0, 1], [2, 3], [4], [5]]
    assert BucketBatchSampler(make(), [0, 3, 9], batch_size=2).sizes.tolist() == SIZES
    assert least_padding_boundaries(make(), 2).tolist() == [1, 3, 6]


def test_a_table_of_two_columns_has_two_budgets() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"nodes": SIZES, "edges": SIZES[::-1]})
    rows = list(zip(SIZES, SIZES[::-1], strict=True))
    assert list(PackedBatchSampler(table, [5, 6])) == list(PackedBatchSampler(rows, [5, 6]))


def test_the_last_boundary_may_be_infinite() -> None:
    sampler = BucketBatchSampler(SIZES, [0, 3, float("inf")], batch_size=2, shuffle=False)
    assert list(sampler) == [[0, 1], [3], [2, 4], [5]]
    sampler.load_state_dict(sampler.state_dict())


def test_sizes_of_a_narrow_dtype_do_not_wrap() -> None:
    sizes = torch.full((10,), 255, dtype=torch.uint8)
    assert list(map(len, SizeAwareBatchSampler(range(10), sizes, 1000))) == [3, 3, 3, 1]
    assert list(map(len, PackedBatchSampler(sizes, 1000))) == [3, 3, 3, 1]


def test_sums_near_the_end_of_64_bits_do_not_wrap() -> None:
    sizes = [2**62, 2**62, 2**62]
    assert list(SizeAwareBatchSampler(range(3), sizes, 2**63 - 1)) == [[0], [1], [2]]
    assert sorted(PackedBatchSampler(sizes, 2**63 - 1)) == [[0], [1], [2]]
    with pytest.warns(UserWarning, match="3 of 3 samples are left out"):
        squared = SizeAwareBatchSampler(range(3), sizes, 2**63 - 1, cost="padded_squared")
    assert list(squared) == []


def test_huge_ints_keep_their_last_digit() -> None:
    budget = 2**60 + 1
    assert list(SizeAwareBatchSampler(range(2), [2**60, 1], budget)) == [[0, 1]]
    assert list(SizeAwareBatchSampler(range(2), [2**60, 2], budget)) == [[0], [1]]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.floats(10, 50))
def test_sizes_between_whole_numbers(sizes: list[float], budget: float) -> None:
    for sampler in (
        SizeAwareBatchSampler(range(len(sizes)), sizes, budget),
        PackedBatchSampler(torch.tensor(sizes, dtype=torch.float64), budget),
    ):
        batches = list(sampler)
        assert sorted(chain.from_iterable(batches)) == list(range(len(sizes)))
        for batch in batches:
            assert sum(sizes[index] for index in batch) <= budget * (1 + 1e-12)


# ---------------------------------------------------------------- several budgets

NODES_AND_EDGES = [(2, 10), (2, 1), (3, 1), (1, 9), (1, 9)]


@pytest.mark.parametrize(
    "sizes",
    [
        NODES_AND_EDGES,
        tuple(NODES_AND_EDGES),
        [list(row) for row in NODES_AND_EDGES],
        [torch.tensor(row) for row in NODES_AND_EDGES],
        torch.tensor(NODES_AND_EDGES),
        torch.tensor(NODES_AND_EDGES, dtype=torch.float32),
        torch.tensor(NODES_AND_EDGES, dtype=torch.uint64),
        torch.tensor(NODES_AND_EDGES).t().contiguous().t(),
        np.array(NODES_AND_EDGES, dtype=">i4", order="F"),
        lambda index: NODES_AND_EDGES[index],
        lambda index: torch.tensor(NODES_AND_EDGES[index]),
        lambda index: np.array(NODES_AND_EDGES[index], dtype=float),
        dict(enumerate(NODES_AND_EDGES)),
        [(2.0, 10), (2, 1.0), (3, 1), (1, 9), (1, 9)],
    ],
)
def test_nodes_and_edges_at_once(sizes: Any) -> None:
    expected = [[0, 1], [2, 3], [4]]
    for budgets in ([5, 11], (5, 11), torch.tensor([5, 11]), np.array([5.0, 11.0])):
        assert list(SizeAwareBatchSampler(range(5), sizes, budgets)) == expected
        assert len(SizeAwareBatchSampler(range(5), sizes, budgets)) == 3
        packed = PackedBatchSampler(sizes, budgets, indices=range(5))
        assert len(packed) == len(list(packed)) == 3


def test_each_budget_has_a_cost_of_its_own() -> None:
    rows = [(1, 5), (1, 5), (1, 5), (1, 5), (1, 1)]
    sampler = SizeAwareBatchSampler(range(5), rows, [3, 10], cost=["count", "padded"])
    assert list(sampler) == [[0, 1], [2, 3], [4]]
    bucket = BucketBatchSampler(
        [5, 5, 5, 1, 1, 1], [0, 3, 9], max_total_size=[10, 2], cost=["sum", "count"], shuffle=False
    )
    assert list(bucket) == [[3, 4], [5], [0, 1], [2]]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([(1, 2), (1,)], r"sizes must have 2 numbers for each sample.*got \(1,\) at index 1"),
        ([(1, 2), 3], "sizes must have 2 numbers for each sample.*got 3 at index 1"),
        ([(1, 2), "ab"], "sizes must have 2 numbers for each sample.*got 'ab' at index 1"),
        ([(1, 2), (3, float("nan"))], "sizes must be finite and not negative, got nan at index 1"),
        ([(1, 2), (-3, 1)], "sizes must be finite and not negative, got -3 at index 1"),
        (torch.ones(2, 3), r"sizes must have shape \(samples, 2\).*got \(2, 3\)"),
        (torch.ones(2), r"sizes must have shape \(samples, 2\).*got \(2,\)"),
        (np.ones((2, 2, 2)), r"sizes must have shape \(samples, 2\).*got \(2, 2, 2\)"),
        (
            torch.tensor([[1, 2], [3, 2**63 + 5]], dtype=torch.uint64),
            r"got 9223372036854775813 at index 1, 1",
        ),
    ],
)
def test_wrong_rows_are_an_error_that_says_where(sizes: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SizeAwareBatchSampler(range(2), sizes, [5, 5])
    with pytest.raises(ValueError, match=text):
        PackedBatchSampler(sizes, [5, 5])


@pytest.mark.parametrize("given", [3, (1, 2, 3), "ab"])
def test_a_callable_that_gives_too_few_sizes_is_an_error(given: Any) -> None:
    sampler = SizeAwareBatchSampler(range(2), lambda index: given, [5, 5])
    with pytest.raises(ValueError, match=r"2 numbers for each sample.*at index 0"):
        len(sampler)
    if given != "ab":
        with pytest.raises(ValueError, match=r"sizeof must give 2 sizes.*for sample 0"):
            next(iter(sampler))
    else:
        with pytest.raises(TypeError, match="sizes must be ints or floats, got 'a' at sample 0"):
            next(iter(sampler))


# ---------------------------------------------------------------- wrong sizes


class Oddity:
    """A number of no kind."""


WRONG_SIZES: list[tuple[str, Any, type[Exception], str]] = [
    ("bools", [True, False], TypeError, "ints or floats, got True at index 0"),
    ("bool among floats", [1.5, True], TypeError, "ints or floats, got True at index 1"),
    ("bool tensor", torch.tensor([True]), TypeError, "ints or floats, got a tensor of torch.bool"),
    ("bool array", np.array([True]), TypeError, "ints or floats, got an array of bool"),
    ("complex", torch.ones(2, dtype=torch.complex64), TypeError, "a tensor of torch.complex64"),
    ("complex in a list", [1, 1j], TypeError, "ints or floats, got 1j at index 1"),
    ("objects", np.array([Oddity()]), TypeError, "ints or floats, got an array of object"),
    ("texts in an array", np.array(["a"]), TypeError, "ints or floats, got an array of <U1"),
    ("texts", [1, "2"], TypeError, "ints or floats, got '2' at index 1"),
    ("None among them", [1, None], TypeError, "ints or floats, got None at index 1"),
    ("lists", [1, [2]], TypeError, r"ints or floats, got \[2\] at index 1"),
    ("dates", np.array(["2020-01-01"], dtype="M8[D]"), TypeError, "an array of datetime64"),
    ("NaN", [1.0, float("nan")], ValueError, "nan"),
    ("infinity", torch.tensor([1.0, float("inf")]), ValueError, "inf"),
    ("float16 infinity", np.array([1, np.inf], dtype=np.float16), ValueError, "inf"),
    ("int beyond 64 bits", [1, 2**70], ValueError, "must fit 64 bits, got 11805.* at index 1"),
    ("int beyond a double", [0.5, 2**60], ValueError, r"must not exceed 2\^53, got 1152.* index 1"),
    ("uint64", torch.tensor([1, 2**63], dtype=torch.uint64), ValueError, "92233.* at index 1"),
    ("numpy uint64", np.array([1, 2**63], dtype=np.uint64), ValueError, "92233.* at index 1"),
    ("a number", torch.tensor(3), ValueError, r"must have one dimension, got shape \(\)"),
    ("a uint64", torch.tensor(3, dtype=torch.uint64), ValueError, r"one dimension.*\(\)"),
    ("a numpy number", np.int64(3), ValueError, r"must have one dimension, got shape \(\)"),
    ("a table", torch.ones(2, 2), ValueError, r"must have one dimension, got shape \(2, 2\)"),
]
NEGATIVE: list[tuple[str, Any, type[Exception], str]] = [
    ("negative", [1, -1], ValueError, "finite and not negative, got -1 at index 1"),
    ("negative float", [1, -0.5], ValueError, "finite and not negative, got -0.50* at index 1"),
    ("negative tensor", torch.tensor([1, -7]), ValueError, "not negative, got -7 at index 1"),
]
NO_SIZES: list[tuple[str, Any]] = [
    ("text", "abc"),
    ("bytes", b"abc"),
    ("nothing", None),
    ("an int", 5),
    ("a set", {1, 2}),
    ("an iterator", iter([1, 2])),
]


@pytest.mark.parametrize(("sizes", "error", "text"), [row[1:] for row in WRONG_SIZES + NEGATIVE])
@pytest.mark.parametrize(
    "make",
    [
        lambda sizes: SizeAwareBatchSampler(range(2), sizes, 5),
        lambda sizes: SizeAwareBatchSampler(RandomSampler(range(2)), sizes, 5).report(),
        lambda sizes: PackedBatchSampler(sizes, 5),
        lambda sizes: BucketBatchSampler(sizes, [0, 9], batch_size=2),
        lambda sizes: BucketBatchSampler(sizes, [0, 9], max_total_size=20),
    ],
)
def test_wrong_sizes_are_an_error_at_once_that_says_where(
    make: Callable[[Any], Any], sizes: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"sizes.*{text}"):
        make(sizes)


@pytest.mark.parametrize(("sizes", "error", "text"), [row[1:] for row in WRONG_SIZES])
def test_wrong_sizes_of_the_functions_for_buckets(
    sizes: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        least_padding_boundaries(sizes, 2)
    with pytest.raises(error, match=rf"{text}|sizes must be ints for create_buckets, got floats"):
        create_buckets(sizes, 3, 1)


@pytest.mark.parametrize("sizes", [row[1] for row in NO_SIZES])
def test_what_holds_no_sizes_is_a_type_error(sizes: Any) -> None:
    with pytest.raises(TypeError, match="sizeof must be a callable, a mapping, or the sizes"):
        SizeAwareBatchSampler(range(2), sizes, 5)
    with pytest.raises(TypeError, match="sizeof must be a callable, a mapping, or the sizes"):
        PackedBatchSampler(sizes, 5)
    for make in (
        lambda: BucketBatchSampler(sizes, [0, 9], batch_size=2),
        lambda: create_buckets(sizes, 3, 1),
        lambda: least_padding_boundaries(sizes, 2),
    ):
        with pytest.raises(TypeError, match="sizes must be a tensor, an array or a sequence"):
            make()


@pytest.mark.parametrize(
    ("size", "error", "text"),
    [
        (float("nan"), ValueError, "finite and not negative, got nan"),
        (float("inf"), ValueError, "finite and not negative, got inf"),
        (-1, ValueError, "finite and not negative, got -1"),
        (torch.tensor(-0.5), ValueError, "finite and not negative, got -0.5"),
        (2**70, ValueError, "must fit 64 bits, got 11805"),
        (True, TypeError, "must be ints or floats, got True"),
        ("3", TypeError, "must be ints or floats, got '3'"),
        (None, TypeError, "must be ints or floats, got None"),
        (1j, TypeError, "must be ints or floats, got 1j"),
    ],
)
def test_wrong_size_from_a_callable_names_the_sample(
    size: Any, error: type[Exception], text: str
) -> None:
    def sizeof(index: int) -> Any:
        return size if index == 2 else 1

    with pytest.raises(error, match=f"sizes .*{text}.* at sample 2"):
        next(iter(SizeAwareBatchSampler(range(4), sizeof, 5)))
    with pytest.raises(error, match=f"sizes .*{text}.* at index 2"):
        len(SizeAwareBatchSampler(range(4), sizeof, 5))
    with pytest.raises(error, match=f"sizes .*{text}.* at sample 2"):
        next(size_aware_batching(range(4), sizeof, 5))
    with pytest.raises(error, match=f"sizes .*{text}.* at index 2"):
        PackedBatchSampler(sizeof, 5, indices=range(4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SizeAwareBatchSampler([], [], 5),
        lambda: SizeAwareBatchSampler(range(0), lambda index: 1, 5),
        lambda: SizeAwareBatchSampler([], SIZES, 5),
        lambda: PackedBatchSampler([], 5),
        lambda: PackedBatchSampler(torch.empty(0), 5, shuffle=True),
        lambda: PackedBatchSampler(SIZES, 5, indices=[]),
        lambda: PackedBatchSampler([], 5, window=None, rank=1, world_size=2),
        lambda: BucketBatchSampler([], [0, 5], batch_size=2),
        lambda: BucketBatchSampler([], [0, 5], max_total_size=2),
    ],
)
def test_without_samples_there_are_no_batches_and_a_warning(
    make: Callable[[], BatchSamplerBase],
) -> None:
    with pytest.warns(UserWarning, match=r"there are no samples, so the \w+Sampler has no batches"):
        batches = len(sampler := make())  # some read their samples only now
    assert batches == 0
    assert list(sampler) == []
    assert sampler.report().samples == 0
    assert sampler.plan().offsets.tolist() == [0]


def test_a_stream_without_samples_has_no_batches() -> None:
    assert list(pack_stream([], 5)) == []
    assert list(bucket_stream([], [0, 5], 5)) == []
    assert list(size_aware_batching([], len, 5)) == []
    with pytest.raises(ValueError, match="sizes is empty"):
        create_buckets([], 3, 1)
    with pytest.raises(ValueError, match="sizes is empty"):
        least_padding_boundaries([], 2)


# ---------------------------------------------------------------- other wrong arguments

Make = Callable[..., Any]


def ordered(**arguments: Any) -> Any:
    return SizeAwareBatchSampler(
        **{"sampler": range(6), "sizeof": SIZES, "max_total_size": 5, **arguments}
    )


def packed(**arguments: Any) -> Any:
    return PackedBatchSampler(**{"sizes": SIZES, "max_total_size": 5, **arguments})


def bucket(**arguments: Any) -> Any:
    return BucketBatchSampler(
        **{"sizes": SIZES, "bucket_boundaries": [0, 3, 9], "batch_size": 2, **arguments}
    )


def streaming(**arguments: Any) -> Any:
    return size_aware_batching(
        **{"dataset": ["a", "bc"], "sizeof": len, "max_total_size": 5, **arguments}
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
        read_only(np.array([3, 1, 1])),
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
        ({"collate_fn": 5}, TypeError, "collate_fn must be a callable, got 5"),
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


# ---------------------------------------------------------------- samples over the budget


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: SizeAwareBatchSampler(range(6), SIZES, 3, **o),
        lambda **o: PackedBatchSampler(SIZES, 3, **o),
        lambda **o: BucketBatchSampler(SIZES, [0, 3, 9], max_total_size=3, cost="sum", **o),
    ],
)
def test_sample_over_the_budget_is_told_and_reported_or_an_error(make: Make) -> None:
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
        ["aa", "b", "cccc", "d"], len, 3, info_logger=infos.append, warn_logger=told.append
    )
    assert list(batches) == [["aa", "b"], ["d"]]
    assert told == ["1 of 4 samples are left out, over budget: 2"]
    assert infos == ["3 of 4 samples in 2 batches"]
    with pytest.warns(UserWarning, match="1 of 2 samples are left out, over budget: 1") as warned:
        list(size_aware_batching(["a", "bbbb"], len, 3))
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]


def test_many_left_out_are_counted_and_only_the_first_named() -> None:
    with pytest.warns(UserWarning, match=r"100 of 101 samples .*: 1, 2, 3, 4, 5, …$"):
        PackedBatchSampler([1] + [9] * 100, 5)


def test_no_warning_where_nothing_is_left_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sampler in (ordered(), packed(), bucket()):
            assert sum(len(batch) for batch in sampler) == 6


# ---------------------------------------------------------------- arguments of buckets


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
