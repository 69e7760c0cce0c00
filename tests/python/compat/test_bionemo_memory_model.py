"""The face of bionemo's size_aware_batching: the memory model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from brim.compat.bionemo.size_aware_batching.memory_model import PolynomialRegression


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
