"""Ctrl-C at any line of any public call leaves nothing on, open or locked, and the next call works.

The default run interrupts each call in a few places, spread over its lines; the slow one in more;
`./dev prove interrupts` in all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pytest
import torch

import brim

from . import (  # noqa: F401  add theirs
    interrupt_cases_integrations,
    interrupt_cases_ranks,
    interrupt_cases_tools,
)
from .interrupt_cases import CASES
from .interrupts import interrupted, lines_of

pytestmark = pytest.mark.filterwarnings("ignore:GPU available but not used")  # Lightning's

# A second per call and more, or per import.
LONG = {
    *("explain_a_decorated_call", "explain_a_function", "microbatches_that_foresee"),
    *("cli_info", "cli_plan", "cli_plan_with_a_picture", "cli_run_of_what_fails", "cli_probe"),
    *("cli_audit", "cli_estimate", "cli_estimate_of_a_config", "cli_demo", "pages"),
    *("page_of_an_explanation", "arrow_files", "streamed_dataset", "batches_of_graphs"),
    *("lightning_steps", "lightning_finder", "transformers_trainer", "ranks_that_iterate"),
}
QUICK = [each for each in CASES if each not in LONG and not each.startswith("picture_")]

# -- The test --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    brim.install_cpu_allocator()
    with brim._C.Undoing() as undo:  # what one case leaves must not fail the next
        undo.callback(functools.partial(torch.set_rng_state, torch.get_rng_state()))
        yield


def some(numbers: Sequence[int], count: int) -> list[int]:
    """So many of them, spread evenly, the first and the last included."""
    if len(numbers) <= count:
        return list(numbers)
    return [numbers[i * (len(numbers) - 1) // (count - 1)] for i in range(count)]


@pytest.mark.parametrize("name", QUICK)
def test_an_interrupt_leaves_nothing_behind(name: str) -> None:
    made = CASES[name]()
    lines, expected = lines_of(made)
    spread = some(range(1, lines.lines + 1), 3)
    for at in sorted({*spread, *some(lines.critical, 8)}):
        interrupted(made, at)
        assert made.result(made.call()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_in_many_places_leaves_nothing_behind(name: str) -> None:
    made = CASES[name]()
    lines, expected = lines_of(made)
    # Some calls run a thousand lines, and take a second: all of them would take an hour.
    for at in sorted({*some(range(1, lines.lines + 1), 60), *some(lines.critical, 60)}):
        interrupted(made, at)
        assert made.result(made.call()) == expected
