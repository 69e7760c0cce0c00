"""The promises of the size search on real programs, whatever they do with memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from program_parts import VARYING
from programs import MULTIPLIERS, PROGRAMS, Attempt, Case, prepare, run, seed_of

SEED = 32
STEADY = [name for name in PROGRAMS if name not in VARYING]
CHOSEN = random.Random(SEED).sample(STEADY, 12)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # programs warn as users' programs do
@pytest.mark.parametrize("name", CHOSEN)
def test_promises_hold_on_real_programs(name: str, held: int) -> None:
    prepare([name])
    multiplier = random.Random(f"{name} {SEED}").choice(MULTIPLIERS)
    case = run(name, multiplier, seed_of(name, multiplier, SEED))
    if case is None:
        pytest.skip("not even one item fits by halving")
    assert not case.broken_promises(), case.calls


def _case(*calls: list[tuple[int, bool, int]]) -> Case:
    made = Case("", 1.3, 0, upper=64, room=1, halving=16, halving_failures=2)
    made.calls = [[Attempt(*attempt) for attempt in call] for call in calls]
    return made


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([[(64, False, 0), (32, False, 0), (16, True, 0)]], ""),
        ([[(64, False, 0), (8, True, 0)]], "ends at 8"),
        ([[(64, False, 0), (16, True, 0)], [(64, False, 5), (16, True, 5)]], "call 2 tries 64"),
        ([[(64, False, 5), (16, True, 5)], [(64, True, 0)]], ""),
        ([[(64, True, 0)], [(64, False, 5), (32, True, 5)], [(32, True, 5)]], ""),
        ([[(n, n == 20, 0) for n in (64, 50, 40, 30, 20)]], "fails 4 times"),
    ],
)
def test_a_broken_promise_is_told(calls: list[list[tuple[int, bool, int]]], told: str) -> None:
    found = _case(*calls).broken_promises()
    assert bool(found) == bool(told)
    assert told in " ".join(found)
