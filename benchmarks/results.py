"""Tables of results: each row is printed when it is measured.

Where the environment variable BRIM_REPORT names a file, a row is also appended to it as a line of
JSON. `./dev bench --report` sets it, and `tools/report.py` brings the rows into the documentation.
The C++ benchmarks write the same lines (harness.h).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

CASES = ("case", "measured", "note", "target")
PEERS = (
    *("accelerate", "bionemo-size-aware-batching", "sentence-transformers", "toma"),
    *("torch_max_mem", "torchvision", "transformers"),
)


class Panel(NamedTuple):
    """A part of the picture of a table: a point for each row and column.

    Attributes:
        title: what the numbers are; panels that begin alike up to a colon have one scale.
        columns: where they stand.
        part: which of the numbers in cells like "0.52 / 0.60 / 1.10".
        baseline: where a line is drawn, for ratios at 1.
    """

    title: str
    columns: Sequence[str]
    part: int = 0
    baseline: float | None = None


class Table:
    """Rows under a title; the first cell of each is its name, and different from the others.

    Args:
        title: printed above; says everything but the machine that the figures depend on.
        head: the names of the columns, all different; those of `CASES` are not printed.
        device: where the work ran: the machine of these rows is named by it.
        width: of the first column.
        column: the width of the others.
        panels: what is drawn of it, if anything.
    """

    def __init__(
        self,
        title: str,
        head: Sequence[str] = CASES,
        *,
        device: str | torch.device = "cpu",
        width: int = 58,
        column: int = 14,
        panels: Sequence[Panel] = (),
    ) -> None:
        self.title, self.head, self.panels = title, head, panels
        self.width, self.column = width, column
        self.device = str(device).partition(":")[0]
        print(title)
        if head is not CASES:
            self._print(head)

    def row(self, *cells: str) -> None:
        """A cell for each column; trailing ones may be left out."""
        self._print(cells)
        if file := os.environ.get("BRIM_REPORT"):
            line = {
                "title": self.title,
                "device": self.device,
                "panels": self.panels,
                "cells": {name: cell.strip() for name, cell in zip(self.head, cells, strict=False)},
                "peers": _peers(),
            }
            with open(file, "a") as report:
                print(json.dumps(line), file=report)

    def _print(self, cells: Sequence[str]) -> None:
        line = "  " + cells[0].ljust(self.width)
        for name, cell in zip(self.head[1:], cells[1:], strict=False):
            is_text = name in ("note", "target")
            line += f"   {cell:<27}" if is_text else cell.replace("**", "").rjust(self.column)
        print(line.rstrip(), flush=True)


def _peers() -> dict[str, str]:
    """The versions of the libraries beside brim that this benchmark has imported."""
    imported = [name for name in PEERS if name.partition("-")[0] in sys.modules]
    return {name: importlib.metadata.version(name) for name in imported}
