"""Sixty seeded failures of ten kinds: `brim.explain` names the right cause."""

from __future__ import annotations

import contextlib

import pytest

import brim

from .explained_failures import KINDS, DiagnosedError, failure


def explained(kind: int, seed: int) -> tuple[str, str | None, brim.Explanation | None]:
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


@pytest.mark.parametrize("kind", range(KINDS))
def test_the_right_cause_comes_first(kind: int) -> None:
    for seed in range(6):
        right, named, explanation = explained(kind, seed)
        assert named == right, f"seed {seed}:\n{explanation}"


def test_growth_is_named_by_the_line_that_made_it() -> None:
    for kind in (3, 4, 6):
        _, _, explanation = explained(kind, 0)
        assert explanation is not None
        growing = [one.where for one in explanation.held if one.grows]
        assert any("explained_failures.py" in where or "linear.py" in where for where in growing), (
            explanation
        )
