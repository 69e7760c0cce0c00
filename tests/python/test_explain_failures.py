"""Sixty seeded failures of ten kinds: `brim.explain` names the right cause."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import brim

from .explained_failures import KINDS, DiagnosedError, failure


def explained(kind: int, seed: int) -> tuple[str, str | None, Any]:
    """The right cause, the one that was named, and the explanation."""
    failed = failure(kind, seed)
    limit = brim.budget(failed.budget, device="cpu") if failed.budget else contextlib.nullcontext()
    try:
        with limit, brim.explain(device="cpu") as told:
            failed.run()
    except DiagnosedError as found:
        return failed.cause, str(found), None
    except RuntimeError:  # torch.OutOfMemoryError is one
        assert told.explanation is not None
        return failed.cause, told.explanation.cause, told.explanation
    raise AssertionError(f"kind {kind}, seed {seed} did not fail")


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
NAMED = (3, 4, 6)  # kinds whose growth has a line; what is added up in a graph has none of its own


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", range(KINDS))
def test_the_right_cause_comes_first(kind: int, seed: int) -> None:
    right, named, explanation = explained(kind, seed)
    assert named == right, explanation
    if kind in NAMED:
        growing = [one.where for one in explanation.held if one.grows]
        assert any("explained_failures.py" in where for where in growing), explanation
