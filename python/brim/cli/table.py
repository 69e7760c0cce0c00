"""Tables that are printed row by row, as soon as each row is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_WIDTH = 15


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print the head, then each row as soon as it is known, also into a pipe.

    Example:
        >>> print_table(["device", "free"], [["cpu", "1.00 GiB"]])
        device                    free
        ------------------------------
        cpu                   1.00 GiB
    """
    _print_row(head)
    print("-" * (_WIDTH * len(head)))
    for row in rows:
        _print_row(row)


def _print_row(cells: Sequence[str]) -> None:
    first, *rest = cells
    print(first.ljust(_WIDTH) + "".join(cell.rjust(_WIDTH) for cell in rest), flush=True)
