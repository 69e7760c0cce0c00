"""Regression, collecting peaks and the memory model: results, alignment, bounds, wrong input."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import brim

MIB = 2**20


def allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


# ------------------------------------------------------------------ PolynomialRegression


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_regression_takes_lists_arrays_and_tensors(make: Any) -> None:
    x, y = [1, 2, 3, 4], [3.0, 9.0, 19.0, 33.0]
    model = brim.PolynomialRegression(2).fit(make(x), make(y))
    one = model.predict(10)
    assert isinstance(one, float)
    assert one == pytest.approx(201)
    many = model.predict(make([10, 20]))
    assert isinstance(many, torch.Tensor)
    assert many.tolist() == pytest.approx([201, 801])
    assert model.coefficients == pytest.approx([1, 0, 2], abs=1e-9)


def test_regression_of_several_features() -> None:
    x = [(n, size) for n in (1, 2, 5) for size in (10, 20, 70)]
    model = brim.PolynomialRegression(2).fit(x, [n * size + 3 for n, size in x])
    assert model.exponents == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
    assert model.predict((4, 40)) == pytest.approx(163)
    assert model.predict([(4, 40), (2, 30)]).tolist() == pytest.approx([163, 63])
    assert model.inverse(1003.5, at=(None, 100)) == 10
    assert model.inverse(1003.5, at=(4, None)) == 250


def test_inverse_is_exact_at_the_boundary() -> None:
    model = brim.PolynomialRegression(2).fit(
        [1, 10, 100, 1000], [s * s for s in (1, 10, 100, 1000)]
    )
    for budget in (2, 99, 12345, 1e12):
        size = model.inverse(budget)
        assert model.predict(size) <= budget < model.predict(size + 1)
    assert model.inverse(0.5) == 0
    assert model.inverse(10**9, upper=77) == 77
    assert model.inverse("1kB") == 31


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda m: brim.PolynomialRegression(-1),
            ValueError,
            "degree must be from 0 to 16, got -1",
        ),
        (lambda m: brim.PolynomialRegression(99), ValueError, "got 99"),
        (lambda m: brim.PolynomialRegression(1.5), TypeError, "degree must be an int, got 1.5"),
        (lambda m: brim.PolynomialRegression(True), TypeError, "degree must be an int"),
        (lambda m: m.fit([1, 2], [1, 2]), ValueError, "needs at least 3"),
        (lambda m: m.fit([1, 2, 2], [1, 2, 2]), ValueError, "2 different"),
        (lambda m: m.fit([1, 2, 3], [1, 2]), ValueError, "got 3 and 2"),
        (lambda m: m.fit([1, math.nan, 3], [1, 2, 3]), ValueError, "x must hold finite"),
        (lambda m: m.fit([1, 2, 3], [1, 2, math.inf]), ValueError, "y must hold finite"),
        (lambda m: m.fit("123", [1, 2, 3]), TypeError, "x must be numbers"),
        (lambda m: m.fit([1, 2, 3], [1, 2, "a"]), TypeError, "y must be numbers"),
        (lambda m: m.fit([1, 2, 3], [1j, 2, 3]), TypeError, "y must be numbers"),
        (lambda m: m.fit([[[1]]], [1]), ValueError, "x must be one number or one row"),
        (lambda m: m.predict(1), ValueError, "fit first"),
        (lambda m: m.fit([1, 2, 3], [1, 2, 3]).predict([[1, 2]]), ValueError, "1 feature"),
        (lambda m: m.fit([1, 2, 3], [1, 2, 3]).inverse(math.nan), ValueError, "budget"),
        (lambda m: m.fit([1, 2, 3], [1, 2, 3]).inverse(1, lower=5, upper=4), ValueError, "lower"),
        (lambda m: m.fit([1, 2, 3], [1, 2, 3]).inverse(1, at=(1,)), ValueError, "None once"),
        (lambda m: m.fit([1, 2, 3], [1, 2, 3]).inverse("lots"), ValueError, "lots"),
    ],
)
def test_regression_names_wrong_input(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(brim.PolynomialRegression(2))


# ------------------------------------------------------------------ collect_peaks


def test_peaks_are_absolute_and_aligned_with_the_inputs(held: int) -> None:
    kept = allocate(MIB)

    def work(size: int) -> str:
        allocate(size)
        return f"size {size}"

    samples = brim.collect_peaks(work, (s for s in (300, 100, 200)), device="cpu")
    assert samples.features == ["size 300", "size 100", "size 200"]
    assert samples.peaks == [held + MIB + size for size in (300, 100, 200)]
    assert [s.start for s in samples] == [held + MIB] * 3
    assert samples.out_of_memory == [False] * 3
    assert "feature='size 300'" in repr(samples[0])
    del kept


def test_out_of_memory_stays_as_a_bound_and_is_gone_before_cleanup(held: int) -> None:
    at_cleanup = []

    def work(size: int) -> int:
        first = allocate(size)
        second = allocate(size)
        return len(first) + len(second)

    with brim.budget(held + 8 * MIB, device="cpu"):
        samples = brim.collect_peaks(
            work,
            [MIB, 6 * MIB, 2 * MIB],
            device="cpu",
            cleanup=lambda: at_cleanup.append(brim.memory_stats("cpu").allocated),
        )
    assert samples.out_of_memory == [False, True, False]
    assert samples.features == [2 * MIB, None, 4 * MIB]
    assert samples.peaks == [held + 2 * MIB, held + 12 * MIB, held + 4 * MIB]
    assert samples[1].requested == 6 * MIB
    assert at_cleanup == [held] * 3


def test_injected_out_of_memory_is_a_sample() -> None:
    with brim.testing.inject_oom(at=2):
        samples = brim.collect_peaks(allocate, [10, 20, 30], device="cpu")
    assert samples.out_of_memory == [False, True, False]
    assert samples[1].peak >= samples[1].start + 20


def test_another_error_passes_untouched_after_cleanup() -> None:
    cleaned = []
    error = KeyError("mine")

    def work(size: int) -> None:
        if size == 2:
            raise error

    with pytest.raises(KeyError) as caught:
        brim.collect_peaks(work, [1, 2, 3], device="cpu", cleanup=lambda: cleaned.append(1))
    assert caught.value is error
    assert len(cleaned) == 2


def test_collect_names_wrong_input() -> None:
    with pytest.raises(TypeError, match="work must be callable, got 3"):
        brim.collect_peaks(3, [1], device="cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cleanup must be callable, got 3"):
        brim.collect_peaks(allocate, [1], device="cpu", cleanup=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device"):
        brim.collect_peaks(allocate, [1], device="nowhere")


# ------------------------------------------------------------------ MemoryModel

SHAPES = [(1, 16), (2, 32), (64, 16), (1, 512), (8, 100), (8, 256), (64, 512)]


def bytes_of(n: float, length: float) -> float:
    return 5e6 + 700 * n * length + 8 * n * length**2


@pytest.fixture
def model() -> brim.MemoryModel:
    return brim.MemoryModel().fit(SHAPES, [bytes_of(*shape) for shape in SHAPES])


def test_model_answers_both_ways(model: brim.MemoryModel) -> None:
    assert model.peak(3, 300) == pytest.approx(bytes_of(3, 300), rel=1e-6)
    assert model.peak_of([100, 300, 20]) == model.peak(3, 300)
    for n, length in ((3, 300), (1, 1), (64, 512), (64, 16), (100, 600)):
        assert model.peak(n, length) <= model.safe_peak(n, length)
        assert bytes_of(n, length) <= model.safe_peak(n, length)
    assert model.safe_peak(64, 512) == bytes_of(64, 512)  # was measured
    n = model.largest_batch(300, "100MiB")
    assert model.safe_peak(n, 300) <= 100 * MIB < model.safe_peak(n + 1, 300)
    assert n == model.largest_batch(300, 100 * MIB)
    assert model.largest_batch(300, 1000) == 0
    assert model.error.worst < 0.01
    assert len(model.error.each) == len(SHAPES)


def test_model_takes_tensors_and_arrays(model: brim.MemoryModel) -> None:
    peaks = [bytes_of(*shape) for shape in SHAPES]
    for make in (torch.tensor, np.array):
        other = brim.MemoryModel().fit(make(SHAPES), make(peaks))
        assert other.peak(3, 300) == model.peak(3, 300)


def test_model_of_one_size() -> None:
    model = brim.MemoryModel().fit([1, 10, 100], [1100, 2000, 11000])
    assert model.kind == "size"
    assert model.peak(50) == pytest.approx(6000)
    size = model.largest_size("10kB")
    assert model.safe_peak(size) <= 10_000 < model.safe_peak(size + 1)
    assert model.phases == [{"1": pytest.approx(1000), "s": pytest.approx(100)}]


def test_an_out_of_memory_bound_is_kept(model: brim.MemoryModel) -> None:
    bound = 3 * bytes_of(64, 600)
    raised = brim.MemoryModel().fit(
        [*SHAPES, (64, 600)],
        [*(bytes_of(*shape) for shape in SHAPES), bound],
        [False] * len(SHAPES) + [True],
    )
    assert model.peak(64, 600) < bound <= raised.peak(64, 600)
    assert "1 that ran out of memory" in str(raised)


def test_model_is_copied_pickled_and_saved(model: brim.MemoryModel) -> None:
    loaded = brim.MemoryModel()
    loaded.load_state_dict(model.state_dict())
    copies = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded]
    for other in copies:
        assert type(other) is brim.MemoryModel
        assert str(other) == str(model)
        assert other.safe_peak(9, 99) == model.safe_peak(9, 99)
        assert other.state_dict() == model.state_dict()
    assert not copy.copy(brim.MemoryModel()).fitted
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == model.state_dict()
    with pytest.raises(ValueError, match='state_dict has no "kind"'):
        loaded.load_state_dict({})
    with pytest.raises(TypeError, match="wrong type"):
        loaded.load_state_dict({**model.state_dict(), "floor": "high"})
    with pytest.raises(ValueError, match="not negative"):
        loaded.load_state_dict({**model.state_dict(), "margin": -1.0})


def test_model_says_what_it_is(model: brim.MemoryModel) -> None:
    assert "4.77 MiB + 700 B · nL + 8 B · nL²" in str(model)
    assert repr(model).startswith("MemoryModel(batch, 7 samples, worst error ")
    assert repr(brim.MemoryModel()) == "MemoryModel(not fitted)"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.fit([], []), ValueError, "sizes is empty"),
        (lambda m: m.fit([1, (2, 3)], [1, 2]), ValueError, "all numbers or all pairs"),
        (lambda m: m.fit([(1, 2, 3)], [1]), ValueError, "pairs"),
        (lambda m: m.fit([1, 2], [1]), ValueError, "same length"),
        (lambda m: m.fit([1, 2], [1, 2], [True]), ValueError, "same length"),
        (lambda m: m.fit([1, 1], [1, 2]), ValueError, "at least 2 different"),
        (lambda m: m.fit([(1, 2), (2, 3)], [1, 2]), ValueError, "at least 3 different"),
        (lambda m: m.fit([1, -2], [1, 2]), ValueError, "sizes must be finite and positive, got -2"),
        (lambda m: m.fit([1, 2], [1, math.nan]), ValueError, "peaks must be finite"),
        (lambda m: m.peak(3), ValueError, "fit or probe first"),
        (lambda m: m.fit([1, 2], [1, 2]).peak(1, 2), ValueError, "one size"),
        (lambda m: m.fit([1, 2], [1, 2]).largest_batch(1, 2), ValueError, "one size"),
        (lambda m: m.fit([1, 2], [1, 2]).peak("a"), TypeError, "n must be a number, got 'a'"),
        (lambda m: m.fit([1, 2], [1, 2]).peak(-1), ValueError, "not negative, got -1"),
        (lambda m: m.fit([1, 2], [1, 2]).largest_size(math.nan), ValueError, "budget"),
        (lambda m: m.fit([1, 2], [1, 2]).largest_size("8G"), ValueError, "8G"),
        (
            lambda m: m.fit([1, 2], [1, 2]).largest_size(-1),
            ValueError,
            "budget must be 0 or more, got -1",
        ),
    ],
)
def test_model_names_wrong_input(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(brim.MemoryModel())


def test_safe_peak_is_no_less_than_what_was_measured() -> None:
    peaks = [10, 20, 40, 95, 82, 320]
    sizes = [1, 2, 4, 8, 16, 32]
    model = brim.MemoryModel().fit(sizes, peaks)
    assert all(model.safe_peak(s) >= peak for s, peak in zip(sizes, peaks, strict=True))
    assert model.largest_size(90) < 8


def test_a_model_of_batches_answers_for_empty_samples() -> None:
    peaks = [bytes_of(*shape) for shape in SHAPES]
    peaks[1] *= 1.1
    model = brim.MemoryModel().fit(SHAPES, peaks)
    budget = (model.safe_peak(1, 0) + model.safe_peak(1e6, 0)) / 2
    n = model.largest_batch(0, budget)
    assert model.safe_peak(n, 0) <= budget < model.safe_peak(n + 1, 0)


def test_lengths_that_would_overflow_are_rejected(model: brim.MemoryModel) -> None:
    assert model.peak(1, 1e100) > 1e200
    for call in (model.peak, model.safe_peak):
        with pytest.raises(ValueError, match="length must be at most 1e100, got 1e\\+155"):
            call(1, 1e155)
    with pytest.raises(ValueError, match="length must be at most 1e100"):
        model.largest_batch(1e155, "1GiB")
    with pytest.raises(ValueError, match="sizes must be at most 1e100"):
        brim.MemoryModel().fit([1, 1e200], [1, 2])


# ------------------------------------------------------------------ probe


def test_probe_warms_up_grows_and_keeps_what_it_measured(held: int) -> None:
    calls: list[int] = []

    def work(size: int) -> None:
        calls.append(size)
        allocate(size * 1000)

    model = brim.MemoryModel.probe(work, range(1, 1001), device="cpu")
    assert calls[0] == calls[1] == 1
    assert calls[1:] == sorted(calls[1:])
    assert calls[-1] == 1000
    assert len(model.samples) == 7
    assert [sample.n for sample in model.samples] == calls[1:]
    assert model.peak(500) == pytest.approx(held + 500_000, rel=1e-3)


@pytest.mark.parametrize("others", [0, 100_000, 30 * MIB])
def test_probe_stays_within_its_budget_and_fills_it_whatever_others_hold(
    others: int, held: int
) -> None:
    kept = allocate(others)  # as tests before this one may, and the weights of a model do
    held += kept.nbytes
    largest = 0

    def work(n: int, length: int) -> None:
        nonlocal largest
        largest = max(largest, n * length**2)
        allocate(n * length**2)

    shapes = [(n, length) for n in (1, 2, 4, 8, 16, 32) for length in (16, 32, 64, 128, 256)]
    with brim.budget(held + MIB, device="cpu"):  # an attempt over it would be out of memory
        model = brim.MemoryModel.probe(work, shapes, device="cpu", budget=held + MIB)
    assert not any(sample.out_of_memory for sample in model.samples)
    assert MIB / 4 < largest <= MIB
    n = model.largest_batch(64, held + MIB)
    assert 0.85 * MIB < n * 64**2 <= MIB


def test_probe_makes_a_bound_of_what_fails_anyway(held: int) -> None:
    with brim.budget(held + 64 * MIB, device="cpu"):
        model = brim.MemoryModel.probe(
            lambda size: allocate(size if size < 50 else 128 * MIB), [1, 4, 16, 64, 256], "cpu"
        )
    assert [sample.out_of_memory for sample in model.samples].count(True) == 1
    assert model.peak(64) >= held + 128 * MIB


@pytest.mark.parametrize(
    ("sizes", "options", "error", "text"),
    [
        ([], {}, ValueError, "sizes is empty"),
        ([3], {}, ValueError, "at least 2 different ones for a fit, got 1"),
        ([(1, 2), (1, 2), (2, 2)], {}, ValueError, "at least 3 different ones for a fit, got 2"),
        ([1, (2, 3)], {}, ValueError, "all numbers or all pairs"),
        ([0, 1, 2], {}, ValueError, "positive, got 0"),
        ([1, 2.5], {}, TypeError, "sizes must be ints, got 2.5"),
        ([1, float("nan")], {}, TypeError, "sizes must be ints, got nan"),
        (5, {}, TypeError, r"sizes must be numbers or pairs \(n, length\), got 5"),
        (["a"], {}, TypeError, r"sizes must be numbers or pairs \(n, length\), got \['a'\]"),
        ([None], {}, TypeError, r"sizes must be numbers or pairs \(n, length\), got \[None\]"),
        ([1, 2], {"probes": 1}, ValueError, "probes must be 2 or more, got 1"),
        ([1, 2], {"probes": 2.5}, TypeError, "probes must be an int"),
        ([1, 2], {"budget": 0}, ValueError, "budget must be a positive"),
        ([1, 2], {"budget": "lots"}, ValueError, 'budget "lots" is not understood'),
        ([1, 2], {"device": "nowhere"}, ValueError, "device"),
    ],
)
def test_probe_names_wrong_input(
    sizes: list[Any], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        brim.MemoryModel.probe(allocate, sizes, **{"device": "cpu", **options})


def test_probe_says_when_nothing_fits(held: int) -> None:
    with (
        brim.budget(held + MIB, device="cpu"),
        pytest.raises(torch.OutOfMemoryError, match="Even the smallest of the sizes, 3, does not"),
    ):
        brim.MemoryModel.probe(lambda size: allocate(2 * MIB), [3, 5], "cpu")
    with pytest.raises(ZeroDivisionError):
        brim.MemoryModel.probe(lambda size: 1 // 0, [3, 5], "cpu")
    with pytest.raises(TypeError, match="fn must be callable"):
        brim.MemoryModel.probe(3, [3, 5], "cpu")  # type: ignore[arg-type]


def test_floats_in_lists_keep_double_precision() -> None:
    model = brim.PolynomialRegression(1).fit([1e9, 1e9 + 1], [1.0, 2.0])
    assert model.predict(1e9 + 1) == pytest.approx(2.0, rel=1e-6)
    assert brim.PolynomialRegression(1).fit([1, 2], [1, 2]).predict(16777217.0) == pytest.approx(
        16777217, rel=1e-12
    )
    peaks = [1e9 + 1, 2e9 + 1, 3e9 + 1]
    assert [s.peak for s in brim.MemoryModel().fit([1, 2, 3], peaks).samples] == peaks


def test_what_was_measured_bounds_what_is_smaller() -> None:
    # Nothing of this kind fits such a staircase, so the margin is large.
    shapes = [(n, length) for n in (1, 4, 16) for length in (10, 100, 1000)]
    peaks = [1000 * 2 ** (n * length).bit_length() for n, length in shapes]
    model = brim.MemoryModel().fit(shapes, peaks)
    assert model.margin > 0.1
    for (n, length), peak in zip(shapes, peaks, strict=True):
        assert model.safe_peak(n, length) <= max(peak, model.peak(n, length))
        assert model.peak(n, length) > peak or model.largest_batch(length, peak) >= n
    largest = [model.largest_batch(100, budget) for budget in range(10_000, 40_000_000, 500_000)]
    assert largest == sorted(largest)


def test_out_of_memory_of_copying_numbers_is_not_a_wrong_argument() -> None:
    points = list(range(1, 65))
    with pytest.raises(torch.OutOfMemoryError), brim.testing.inject_oom(at=1):
        brim.PolynomialRegression(1).fit(points, points)
    number = torch.ones((), dtype=torch.float64)
    model = brim.MemoryModel().fit([1, 2, 3], [30, 50, 70])
    with pytest.raises(torch.OutOfMemoryError), brim.testing.inject_oom(at=1):
        model.peak_of([number, number])
    tried = []

    @brim.maximize("n", device="cpu")
    def work(n: int) -> brim.PolynomialRegression:
        tried.append(n)
        return brim.PolynomialRegression(1).fit(points[:n], points[:n])

    with brim.testing.inject_oom(at=1):
        work(n=64)
    assert tried[0] == 64
    assert len(tried) > 1


def test_one_failure_within_the_budget_does_not_end_a_probe() -> None:
    layer = torch.nn.Linear(16, 32)

    def work(size: int) -> None:
        layer(torch.empty(size, 16)).sum().backward()

    def outcome(at: int) -> list[tuple[float, bool]] | None:
        try:
            with brim.testing.inject_oom(at=at):
                model = brim.MemoryModel.probe(work, [1, 256], device="cpu")
        except torch.OutOfMemoryError:  # of brim's own copies, before the first call
            return None
        return [(sample.n, sample.out_of_memory) for sample in model.samples]

    outcomes = [outcome(at) for at in range(1, 31, 3)]
    known = [each for each in outcomes if each is not None]
    assert len(known) >= 7
    assert all(each == known[0] for each in known)
