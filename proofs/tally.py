"""What the proofs count: how many cases ran, how many of them went wrong, and how long they took.

A proof is a program `prove_*.py` that `./dev prove` runs. It makes one `Tally`, adds a row per kind
of case, prints each wrong case as it turns up (with its seed, so that it can be had again), and
ends with `finish()`. With `--report` the rows go into docs/explanation/reliability.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # for tests.python, and results

from results import Table  # noqa: E402


class Tally:
    """Rows of a proof, printed as they are counted.

    Args:
        title: what is proved, in one line.
    """

    def __init__(self, title: str, device: str = "cpu") -> None:
        self._table = Table(title, ("what", "cases", "wrong", "seconds"), device=device)
        self._wrong = 0
        self._begin = time.perf_counter()

    def row(self, what: str, cases: int, wrong: Iterable[str] = ()) -> None:
        """Count the cases of one kind, since the last row; `wrong` describes those that failed."""
        found = list(wrong)
        for each in found:
            print(f"  WRONG, {what}: {each}", flush=True)
        self._wrong += len(found)
        now = time.perf_counter()
        self._table.row(what, f"{cases:,}", str(len(found)), f"{now - self._begin:.0f}")
        self._begin = now

    def finish(self) -> None:
        """End the program: with 1 if a case went wrong, else with 0."""
        sys.exit(self._wrong > 0)
