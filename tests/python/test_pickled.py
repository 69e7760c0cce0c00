"""Reports and models can be pickled and copied: they cross process borders."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import brim
from brim.data import PackedBatchSampler


def attempts() -> Any:
    with brim.budget("1MiB", device="cpu"):
        return brim.batch(2**20, device="cpu")(torch.empty).record()[1]


def plan_report() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the sample that is left out
        return PackedBatchSampler([5, 2, 80, 3], max_total_size=10).report()


def estimate() -> Any:
    layer = torch.nn.Linear(64, 64)
    return brim.estimate(lambda: layer(torch.ones(8, 64)).sum().backward(), device="cuda")


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
MAKERS: dict[str, Callable[[], Any]] = {
    "memory_stats": lambda: brim.memory_stats("cpu"),
    "fragmentation": lambda: brim.fragmentation("cpu"),
    "cause": lambda: brim.classify_error(OUT_OF_MEMORY),
    "attempts": attempts,
    "plan_report": plan_report,
    "estimate": estimate,
    "peaks": lambda: brim.collect_peaks(lambda n: torch.zeros(n).numel(), [10, 20], "cpu"),
    "memory_model": lambda: brim.MemoryModel().fit([1, 2, 3], [100, 200, 310]),
    "samples": lambda: brim.MemoryModel().fit([1, 2, 3], [100, 200, 310]).samples,
    "error": lambda: brim.MemoryModel().fit([1, 2, 3, 4], [100, 200, 310, 400]).error,
    "regression": lambda: brim.PolynomialRegression(2).fit([1, 2, 3, 5], [1, 4, 9, 26]),
}


def public(value: object) -> dict[str, object]:
    names = [name for name in dir(value) if not name.startswith("_")]
    return {
        name: repr(getattr(value, name)) for name in names if not callable(getattr(value, name))
    }


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_copy_says_the_same(name: str, through: Callable[[Any], Any]) -> None:
    made = MAKERS[name]()
    copied = through(made)
    assert type(copied) is type(made)
    assert repr(copied) == repr(made)
    items = zip(made, copied, strict=True) if isinstance(made, list) else [(made, copied)]
    for one, other in items:
        assert public(other) == public(one)


def test_a_copied_regression_predicts_the_same_and_keeps_attributes() -> None:
    model = brim.PolynomialRegression(2).fit([1, 2, 3, 5], [1, 4, 9, 26])
    model.note = "mine"  # type: ignore[attr-defined]
    copied = pickle.loads(pickle.dumps(model))
    assert copied.predict(7) == model.predict(7)
    assert copied.note == "mine"
    assert copied.fit([1, 2, 3], [1, 1, 1]).predict(2) == pytest.approx(1)
    assert model.predict(7) != pytest.approx(1)
    assert not copy.deepcopy(brim.PolynomialRegression(2)).fitted


def test_a_copied_estimate_has_its_timeline() -> None:
    made = estimate()
    copied = pickle.loads(pickle.dumps(made))
    assert copied.to_html() == made.to_html()
    assert copied.to_dict() == made.to_dict()
