"""Sizes of samples in brim.data: every kind that people have, and every wrong one."""

from __future__ import annotations

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
    assert list(SizeAwareBatchSampler(range(6), sizes, 5, cost="sum")) == expected
    assert (
        list(SizeAwareBatchSampler(range(6), lambda index: sizes[index], 5, cost="sum")) == expected
    )
    assert list(PackedBatchSampler(sizes, 5, cost="sum")) == list(
        PackedBatchSampler(SIZES, 5, cost="sum")
    )
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
    assert list(SizeAwareBatchSampler(range(4), range(1, 5), 5, cost="sum")) == [[0, 1], [2], [3]]
    assert list(PackedBatchSampler(range(1, 5), 5, cost="sum")) == [[3, 0], [2, 1]]


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
    assert list(PackedBatchSampler(make(), 5, cost="sum")) == list(
        PackedBatchSampler(SIZES, 5, cost="sum")
    )
    assert list(SizeAwareBatchSampler(range(6), make(), 5, cost="sum")) == [
        [0, 1],
        [2, 3],
        [4],
        [5],
    ]
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
    assert list(SizeAwareBatchSampler(range(2), [2**60, 1], budget, cost="sum")) == [[0, 1]]
    assert list(SizeAwareBatchSampler(range(2), [2**60, 2], budget, cost="sum")) == [[0], [1]]


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
        assert list(SizeAwareBatchSampler(range(5), sizes, budgets, cost="sum")) == expected
        assert len(SizeAwareBatchSampler(range(5), sizes, budgets, cost="sum")) == 3
        packed = PackedBatchSampler(sizes, budgets, indices=range(5), cost="sum")
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
    ("a cube", torch.ones(2, 2, 2), ValueError, r"one dimension, got shape \(2, 2, 2\)"),
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
