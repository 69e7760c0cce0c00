"""Items divided into parts of nearly equal cost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from brim.data import balance, flops


@pytest.mark.parametrize("equal_count", [False, True])
def test_the_best_division_of_few_items_is_hardly_better(equal_count: bool) -> None:
    random = np.random.default_rng(0)
    for _ in range(40):
        costs = random.integers(1, 40, random.integers(3, 8))
        parts = int(random.integers(2, 4))
        possible = [
            max(np.bincount(choice, costs, parts))
            for choice in itertools.product(range(parts), repeat=len(costs))
            if not equal_count or np.ptp(np.bincount(choice, minlength=parts)) <= 1
        ]
        found = balance(costs, parts, equal_count)
        assert sorted(itertools.chain(*found)) == list(range(len(costs)))
        assert len(found) == parts
        assert not equal_count or len({len(part) for part in found}) <= 2
        largest = max(sum(costs[part]) for part in found if part)
        assert min(possible) <= largest <= 4 / 3 * min(possible)


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda costs: np.array(costs, dtype=np.float32)]
)
def test_costs_of_any_kind(kind: Any) -> None:
    parts = balance(kind([3, 1, 1, 1]), 2)
    assert parts in ([[0], [1, 2, 3]], [[1, 2, 3], [0]])
    assert all(type(index) is int for part in parts for index in part)


def test_flops_balance_what_tokens_do_not() -> None:
    lengths = [16_000, *[1000] * 16]
    by_tokens = balance(lengths, 2, equal_count=False)
    by_work = balance(flops(lengths, linear=1000, squared=1), 2)

    def imbalance(parts: list[list[int]]) -> float:
        work = [float(flops([lengths[i] for i in part], 1000, 1).sum()) for part in parts]
        return max(work) / (sum(work) / len(work)) - 1

    assert imbalance(by_work) == imbalance([[0], list(range(1, 17))]) == imbalance(by_tokens)
    lengths = [8000, *[1000] * 40]
    assert imbalance(balance(flops(lengths, 1000, 1), 2)) < 0.02
    assert imbalance(balance(lengths, 2)) > 0.2


def test_parts_beyond_the_items_are_empty() -> None:
    parts = balance([1, 2], 100_000)
    assert sorted(parts[:2]) == [[0], [1]]
    assert parts[2:] == [[]] * 99_998
    assert balance([], 3) == [[], [], []]


@pytest.mark.parametrize("length", [-1, -0.5, float("nan"), float("inf")])
def test_flops_of_a_wrong_length(length: float) -> None:
    with pytest.raises(ValueError, match=f"not negative, got {length} at index 1"):
        flops([1, length])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1, -1], 2), ValueError, "costs must be finite and not negative, got -1 at index 1"),
        (([1.0, float("nan")], 2), ValueError, "got nan at index 1"),
        (([1], 0), ValueError, r"parts must be from 1 to 2\^24, got 0"),
        (([1], 1.5), TypeError, "parts"),
        (([[1]], 1), (ValueError, TypeError), "costs"),
        (("12", 1), TypeError, "costs must be a tensor"),
        (([1], 1, 1), TypeError, "equal_count must be True or False, got 1"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        balance(*arguments)
