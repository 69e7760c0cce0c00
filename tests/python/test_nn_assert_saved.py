"""brim.assert_saved: a limit on what a model keeps, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import brim

from .audit_cases import ELEMENTS, GRADIENT, C, frozen, image


def test_assert_saved_measures_the_model_as_it_is() -> None:
    x = image(**GRADIENT)
    model = frozen(nn.ReLU(), nn.Conv2d(C, C, 1))
    assert brim.assert_saved(model, x, at_most="32KiB") == 32768
    with pytest.raises(AssertionError) as caught:
        brim.assert_saved(model, x, at_most=32767)
    message = str(caught.value)
    assert message.startswith("the model keeps 32768 bytes for backward, at most 32767 are allowed")
    assert message.splitlines()[-1].split() == ["0", "ReLU", "32.00", "KiB"]
    brim.convert(model)
    assert brim.assert_saved(model, x, at_most="1KiB") == 1024


def test_assert_saved_passes_keyword_arguments_on() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return x * scale

    kept = brim.assert_saved(Scaled(), image(**GRADIENT), scale=image(), at_most="1GiB")
    assert kept == 0  # the scale is an argument


def test_a_limit_is_anything_that_is_a_whole_number() -> None:
    layer, x = nn.ReLU(), image(**GRADIENT) * 1
    assert brim.assert_saved(layer, x, at_most=np.int64(4 * ELEMENTS)) == 4 * ELEMENTS
    with pytest.raises(AssertionError, match=f"at most {ELEMENTS} are allowed"):
        brim.assert_saved(layer, x, at_most=np.int32(ELEMENTS))
    assert brim.assert_saved(nn.Identity(), x, at_most="0") == 0
    with pytest.raises(AssertionError, match="at most 0 are allowed"):
        brim.assert_saved(layer, x, at_most="0")


@pytest.mark.parametrize("at_most", ["lots", "50%", -1, np.int64(-1)])
def test_a_wrong_limit_is_an_error(at_most: Any) -> None:
    with pytest.raises(ValueError, match=rf"at_most must be .*, got .?{at_most}"):
        brim.assert_saved(nn.ReLU(), image(), at_most=at_most)


@pytest.mark.parametrize("at_most", [True, 1.5, None, np.float32(1.0), [1]])
def test_a_limit_of_a_wrong_type_is_an_error(at_most: Any) -> None:
    with pytest.raises(TypeError, match="at_most must be an int"):
        brim.assert_saved(nn.ReLU(), image(), at_most=at_most)


def test_nothing_is_a_limit_too() -> None:
    assert brim.assert_saved(nn.AvgPool2d(2).to("cpu"), image(), at_most=0) == 0
    with pytest.raises(AssertionError):
        brim.assert_saved(nn.Sequential(nn.ReLU()), image(**GRADIENT), at_most=0)


@pytest.mark.parametrize("function", [brim.audit, lambda m: brim.assert_saved(m, at_most=1)])
def test_only_modules(function: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got 3"):
        function(3)
