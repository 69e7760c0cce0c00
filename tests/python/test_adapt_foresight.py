"""The promise of the size search, held on real works.

Never worse than halving, and near the largest size from the third call on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import brim

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from adaptive_works import MIB, WORKS, largest_that_fits

pytestmark = [
    # A try that fails in backward leaves gradients, which the works release when they begin.
    pytest.mark.filterwarnings("ignore:.*did not come back"),
]

# With 16 MiB these take a quarter of the time, and their sizes are still some hundred items.
COSTLY = {
    *("training, MLP", "training, MLP, Adam", "training, CNN", "training, LSTM"),
    *("training, transformer", "zero_grad first, CNN", "zero_grad first, transformer"),
    *("attention", "attention, masked", "topk"),
}

# A size of a few hundred items is known to a third of a percent only, and padded sizes to a step.
NEAR = dict.fromkeys(("in parts, results kept", "in parts, concatenated"), 0.96)
NEAR |= {"padded to 64": 0.9, "constant 95 %": 0.95}

# A square looks like a line until it has failed, two close sizes of a need that is nearly constant
# look like padding, and parts that are the last ones have requests of their own: it takes one more
# call until the growth is known.
LATE = {"square", "linear and square", "in parts, results kept", "in parts, concatenated"}
LATE |= {"constant 90 %", "constant 95 %"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels take scratch memory per thread
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("budget", "firsts"),
    [
        pytest.param(None, (10,), id="one"),
        pytest.param(64, (1.2, 1.9, 3.3, 10, 100), id="64", marks=pytest.mark.slow),
        pytest.param(96, (1.2, 1.9, 3.3, 10, 100), id="96", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name",
    [  # a second each: every third one
        pytest.param(name, marks=pytest.mark.slow if number % 3 else ())
        for number, name in enumerate(WORKS)
    ],
)
def test_never_worse_than_halving_and_near_the_largest(
    name: str, budget: int | None, firsts: tuple[float, ...], held: int
) -> None:
    run = WORKS[name](torch.device("cpu"))
    run(1)
    near = NEAR.get(name, 0.97)
    budget = budget or (16 if name in COSTLY else 64)
    with brim.budget(brim.memory_stats("cpu").allocated + budget * MIB, device="cpu"):
        largest = largest_that_fits(run, 10**6, torch.device("cpu"))
        assert largest > 0
        for first in (max(int(largest * times), largest + 1) for times in firsts):
            halving = brim.maximize("n", strategy="halving")(lambda n: run(n)).record(first)[1]
            ours = brim.maximize("n")(lambda n: run(n))
            calls = [ours.record(first)[1] for _ in range(5)]
            told = [[(a.size, a.fitted) for a in call] for call in calls]
            where = f"{first} of {largest}: {told}, halving {[a.size for a in halving]}"
            assert len(calls[0]) <= len(halving) + 1, where
            assert calls[0][-1].size >= halving[-1].size, where
            # A square looks like a line until it has failed.
            assert len(calls[1]) <= 2, where
            assert all(len(call) == 1 for call in calls[2:]), where
            # One item may be more than three percent.
            later = calls[3 if name in LATE else 2 :]
            assert all(call[0].size >= min(near * largest, largest - 1) for call in later), where


@pytest.mark.parametrize("spare", [0.05, 0.15, 0.45, 1.15, 4.15])
def test_a_first_call_that_makes_an_optimizers_state_does_not_hold_back_later_ones(
    spare: float, held: int
) -> None:
    model = torch.nn.Sequential(
        *(layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU()))
    )
    optimizer = torch.optim.Adam(model.parameters())
    weights = sum(parameter.nbytes for parameter in model.parameters())

    def run(n: int) -> None:
        optimizer.zero_grad()
        model(torch.zeros(n, 256)).square().mean().backward()
        optimizer.step()

    step = brim.maximize("n")(lambda n: run(n))
    # Weights, gradients, states, and what the optimizer needs for a moment: five times. A step of
    # few rows needs most there, so its need is constant at first; if little is spare, up to nearly
    # the largest size.
    with brim.budget(held + int((5.05 + spare) * weights), device="cpu"):
        calls = [step.record(20_000)[1] for _ in range(6)]
        largest = largest_that_fits(run, 10**4, torch.device("cpu"))
    told = [[(a.size, a.fitted) for a in call] for call in calls]
    # Nothing shows after one call when it frees its gradients: the second tries the same size.
    assert len(calls[1]) <= 2, (told, largest)
    assert all(len(call) == 1 for call in calls[2:]), (told, largest)
    assert all(call[0].size >= 0.97 * largest for call in calls[3:]), (told, largest)
