"""Allocations of public calls fail in turn: some of those that proofs/prove_faults.py sweeps."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import brim

sys.path.append(str(Path(__file__).parents[2] / "proofs"))

import fault_cases as cases
from prove_faults import Sweep, swept_call

from . import nn_cases

#: Something of each kind, of calls that take milliseconds.
SOME = (
    *("adapt: batch of tensors", "adapt: chunks", "adapt: two names"),
    "adapt: restores SGD after 0 steps, gradients: some",
    *("microbatches: dropout", "microbatches: scaler", "microbatches: packed"),
    *("microbatches: joint, in parts of 4", "models: auto, several_calls", "models: gated auto"),
    *("reports: audit", "reports: explain, with", "data: fit, packed, padded", "data: stream"),
    "memory: nested budgets and meters",
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    brim.install_cpu_allocator()
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)
    torch.set_grad_enabled(True)  # what one of the planted faults leaves


def found(name: str) -> cases.Make:
    return next(make for kind, each, make in cases.calls() if f"{kind}: {each}" == name)


@pytest.mark.parametrize("name", SOME)
def test_a_failed_allocation_leaves_nothing_wrong(name: str) -> None:
    allocations, swept = swept_call(found(name), places=2)
    assert swept.wrong == []
    assert swept.runs >= 3 * min(allocations, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("case", nn_cases.ONE_OF_EACH, ids=str)
def test_every_allocation_of_a_layer_may_fail(case: nn_cases.Case, mode: str | None) -> None:
    for needs in cases.some_needs(case):
        made = cases.layer(case, torch.float32, mode, needs, "contiguous", "cpu")
        allocations, swept = swept_call(lambda made=made: made)
        assert swept.wrong == []
        assert swept.runs == 3 * allocations


# -- The sweep sees what goes wrong ----------------------------------------------------------------


def other_error(kept: list[Any]) -> None:
    try:
        torch.empty(8)
    except torch.OutOfMemoryError as error:
        raise RuntimeError("no") from error


def wrong_result(kept: list[Any]) -> int:
    try:
        return torch.empty(8).numel()
    except torch.OutOfMemoryError:
        return 0


def keeps_bytes(kept: list[Any]) -> None:
    first = torch.empty(8)
    try:
        torch.empty(8)
    except torch.OutOfMemoryError:
        kept.append(first)
        raise


def leaves_a_mode(kept: list[Any]) -> None:
    torch.set_grad_enabled(False)
    torch.empty(8)
    torch.set_grad_enabled(True)


def leaves_a_fake(kept: list[Any]) -> None:
    try:
        torch.empty(8)
    except torch.OutOfMemoryError:
        with torch._subclasses.FakeTensorMode():
            kept.append(torch.empty(8))
        raise


def breaks_the_next(kept: list[Any]) -> int:
    count = len(kept)
    try:
        torch.empty(8)
    except torch.OutOfMemoryError:
        kept.append(None)
        raise
    return count


def warns(kept: list[Any]) -> None:
    try:
        torch.empty(8)
    except torch.OutOfMemoryError:
        warnings.warn("memory did not come back", stacklevel=1)


def changes_what_it_promised(kept: list[Any]) -> None:
    kept.append(None)
    torch.empty(8)
    kept.clear()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (other_error, "another error"),
        (wrong_result, "a wrong result"),
        (keeps_bytes, "32 bytes left"),
        (leaves_a_mode, "gradients are recorded"),
        (leaves_a_fake, "fake tensors left"),
        (breaks_the_next, "the next call: a wrong result"),
        (warns, "warns: memory did not come back"),
        (changes_what_it_promised, ": length"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_sweep_sees(call: Callable[[list[Any]], Any], told: str) -> None:
    kept: list[Any] = []
    made = cases.Call(lambda: call(kept), leaves=lambda: {"length": len(kept)})
    sweep = Sweep(made)
    swept = sweep.run(range(1, sweep.allocations + 1))
    assert swept.wrong
    assert any(told in each for each in swept.wrong), swept.wrong


def test_the_sweep_ends_a_call_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    monkeypatch.setattr("prove_faults.ENDLESS", 1)

    def never() -> None:
        while True:
            try:
                torch.empty(8)
                return
            except torch.OutOfMemoryError:
                pass

    swept = Sweep(cases.Call(never)).run([1])
    assert ["still running" in each for each in swept.wrong] == [True]
    assert swept.served == 2
