"""Tables as data: text for a file, and something better for a terminal that can draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from brim import _C


class Table(NamedTuple):
    """A head, rows of cells, and perhaps a last row that is set apart; `str` gives plain text.

    Attributes:
        head: one cell per column.
        rows: the cells.
        left: how many columns are aligned left, counted from the first; the others are numbers.
        last: a row of totals.

    Example:
        >>> print(Table(["device", "free"], [["cpu", "1.00 GiB"]]))
        device      free
        ----------------
        cpu     1.00 GiB
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    last: Sequence[str] = ()

    def __str__(self) -> str:
        """Plain text, aligned by spaces."""
        return _C.text_table(self.head, self.rows, self.left, self.last)


Part = str | Table
"""What a report consists of."""


def text_of(parts: Sequence[Part]) -> str:
    """The parts below each other, as plain text."""
    return "\n".join(map(str, parts))
