"""The face of bionemo's size_aware_batching: batches by size, peaks of memory, the memory model."""

from __future__ import annotations

import gc
import importlib
import inspect
import math
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
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
from brim.compat.bionemo.size_aware_batching.memory_model import PolynomialRegression
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


@pytest.mark.parametrize("limit", [0, -1, -0.5, math.nan, -math.inf])
def test_sampler_refuses_a_limit_that_is_not_positive(limit: float) -> None:
    with pytest.raises(ValueError, match="max_total_size should be positive but got"):
        SizeAwareBatchSampler(range(3), [1, 1, 1], limit)


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


# ---------------------------------------------------------------- peaks


class FakeCuda:
    """Stands for torch.cuda's statistics: the peak is what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        self.events: list[str] = []
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: self._reset())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.events.append("empty"))
        monkeypatch.setattr(
            torch.cuda, "memory_stats", lambda _: {"allocated_bytes.all.peak": self.peak}
        )

    def _reset(self) -> None:
        self.peak = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_peaks_are_of_cuda_only() -> None:
    with pytest.raises(ValueError, match="CUDA devices only"):
        collect_cuda_peak_alloc([1], lambda x: x, torch.device("cpu"))


def test_features_and_peaks_stay_in_step_when_some_run_out(
    cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(n: int) -> str:
        cuda.peak = 100 * n
        if n in (1, 4):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return f"feature {n}"

    def cleanup() -> None:
        cuda.events.append("cleanup")

    device = torch.device("cuda:0")
    features, peaks = collect_cuda_peak_alloc(range(6), work, device, cleanup)
    assert features == [f"feature {n}" for n in (0, 2, 3, 5)]
    assert peaks == [100 * n for n in (0, 2, 3, 5)]
    assert cuda.events == ["cleanup", "empty"] * 6
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "Element 1" in errors[0]
    assert "Element 4" in errors[1]
    assert all("skipped" in line for line in errors)


def test_other_errors_pass_after_the_cleanup(cuda: FakeCuda) -> None:
    def work(n: int) -> int:
        raise KeyError(n)

    with pytest.raises(KeyError):
        collect_cuda_peak_alloc(
            [7], work, torch.device("cuda"), lambda: cuda.events.append("cleanup")
        )
    assert cuda.events == ["cleanup", "empty"]


@pytest.mark.usefixtures("cuda")
def test_failed_attempt_and_element_are_gone_before_the_cleanup() -> None:
    class Held:
        pass

    alive: list[weakref.ref[Held]] = []

    def elements() -> Iterable[Held]:
        for _ in range(2):
            element = Held()
            alive.append(weakref.ref(element))
            yield element
            del element

    def work(element: Held) -> None:
        inside = Held()
        alive.append(weakref.ref(inside))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def cleanup() -> None:
        assert alive[-1]() is None, "a tensor of the failed attempt is still held"

    gc.disable()
    try:
        assert collect_cuda_peak_alloc(elements(), work, torch.device("cuda"), cleanup) == ([], [])
    finally:
        gc.enable()
    assert all(one() is None for one in alive)


@pytest.mark.cuda
def test_peaks_on_a_gpu_are_what_was_allocated() -> None:
    mib = 2**20
    device = torch.device("cuda:0")
    total = torch.cuda.get_device_properties(device).total_memory

    def work(size: int) -> int:
        torch.empty(size, dtype=torch.uint8, device=device)
        return size

    sizes = [20 * mib, 2 * total, 60 * mib]
    before = torch.cuda.memory_allocated(device)
    features, peaks = collect_cuda_peak_alloc(sizes, work, device)
    assert features == [20 * mib, 60 * mib]
    assert [peak - before for peak in peaks] == features


# ---------------------------------------------------------------- the memory model


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("has_degree0", [True, False])
def test_polynomial_is_recovered_from_its_values(degree: int, has_degree0: bool) -> None:
    generator = torch.Generator().manual_seed(degree)
    expected = PolynomialRegression(degree, has_degree0)
    expected.coeffs = torch.randn(expected.n_degrees, generator=generator)
    x = torch.randn(100, generator=generator)
    powers = range(0 if has_degree0 else 1, degree + 1)
    by_hand = sum(
        (c * x.double() ** p for c, p in zip(expected.coeffs.double(), powers, strict=True)),
        torch.zeros(100, dtype=torch.float64),
    )
    torch.testing.assert_close(expected(x), by_hand.float())
    model = PolynomialRegression(degree, has_degree0)
    model.fit(x, expected(x))
    torch.testing.assert_close(model.coeffs, expected.coeffs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes_up_to_a_billion_are_fitted_to_the_rounding_of_their_dtype(
    dtype: torch.dtype,
) -> None:
    size = torch.logspace(0, 9, 60, dtype=torch.float64)
    peak = 5e8 + 3.0 * size + 2e-9 * size**2
    model = PolynomialRegression(2)
    model.fit(size.to(dtype), peak.to(dtype))
    assert model.coeffs.dtype == dtype
    predicted = model(size.to(dtype))
    assert predicted.dtype == dtype
    torch.testing.assert_close(
        predicted.double(), peak, rtol=100 * torch.finfo(dtype).eps, atol=0.0
    )


def test_default_device_does_not_matter() -> None:
    x = torch.tensor([1.0, 2.0])
    with torch.device("meta"):
        model = PolynomialRegression(1)
        model.fit(x, 3 * x)
    torch.testing.assert_close(model(x), 3 * x)


def test_half_precision_places_have_single_precision_coefficients() -> None:
    model = PolynomialRegression(1)
    model.fit(torch.tensor([1.0, 2.0], dtype=torch.float16), torch.tensor([1e6, 2e6]))
    assert model.coeffs.dtype == torch.float32
    torch.testing.assert_close(model(torch.tensor([5.0])), torch.tensor([5e6]))


def test_fewer_points_than_coefficients_are_gone_through() -> None:
    model = PolynomialRegression(3)
    x, y = torch.tensor([2.0, 2.0, 5.0]), torch.tensor([7.0, 7.0, 11.0])
    model.fit(x, y)
    torch.testing.assert_close(model(x), y)


def test_model_before_its_fit_is_zero() -> None:
    model = PolynomialRegression(2)
    assert model(torch.tensor([1.0, 2.0])).tolist() == [0.0, 0.0]
    assert model(torch.tensor([])).tolist() == []
    assert model(torch.tensor([1, 2])).tolist() == [0.0, 0.0]


def test_coefficients_travel_in_the_state_dict() -> None:
    model = PolynomialRegression(1)
    model.fit(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]))
    other = PolynomialRegression(1)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(torch.tensor([10.0])), torch.tensor([21.0]))


def test_values_have_a_gradient() -> None:
    model = PolynomialRegression(2)
    model.coeffs = torch.tensor([1.0, 2.0, 3.0])
    x = torch.tensor([5.0], requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [32.0]
    model.fit(torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([1.0, 2.0, 3.0]))
    assert not model.coeffs.requires_grad


@pytest.mark.parametrize("degree", [-1, 1.5, "2", None])
def test_wrong_degree_is_a_value_error(degree: Any) -> None:
    with pytest.raises(ValueError, match="degree must be a non-negative integer, but got"):
        PolynomialRegression(degree)


GOOD = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("x", "y", "error", "text"),
    [
        ("hello", [1, 2, 3], TypeError, "x must be a floating point tensor, but got str"),
        (GOOD, [1, 2, 3], TypeError, "y must be a floating point tensor, but got list"),
        (GOOD.long(), GOOD, TypeError, "x must be a floating point tensor, but got torch.int64"),
        (GOOD, GOOD.bool(), TypeError, "y must be a floating point tensor, but got torch.bool"),
        (GOOD[None], GOOD, TypeError, r"x must be a 1D tensor, but got a shape of \(1, 3\)"),
        (GOOD, GOOD.sum(), TypeError, r"y must be a 1D tensor, but got a shape of \(\)"),
        (GOOD, GOOD[:2], ValueError, "number of samples in x and y must be equal.*3 and 2"),
        (GOOD[:0], GOOD[:0], ValueError, "empty"),
        (GOOD, torch.tensor([1.0, math.nan, 2.0]), ValueError, r"y\[1\] is nan"),
        (torch.tensor([1.0, 2.0, math.inf]), GOOD, ValueError, r"x\[2\] is inf"),
    ],
)
def test_wrong_points_are_an_error_and_leave_the_model_alone(
    x: Any, y: Any, error: type[Exception], text: str
) -> None:
    model = PolynomialRegression(1)
    model.fit(GOOD, 2 * GOOD)
    before = model.coeffs.clone()
    with pytest.raises(error, match=text):
        model.fit(x, y)
    assert torch.equal(model.coeffs, before)


@pytest.mark.parametrize("x", [torch.ones(2, 2), torch.tensor(1.0), [1.0]])
def test_values_are_of_one_dimensional_tensors_only(x: Any) -> None:
    with pytest.raises(TypeError, match="x must be a 1D tensor"):
        PolynomialRegression(1)(x)
