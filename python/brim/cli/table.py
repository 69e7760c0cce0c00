"""A table that is printed row by row, as the rows become known."""

from __future__ import annotations

import sys

_WIDTH = 15


class Table:
    """Prints its head when it is made and each row when it is added.

    Example:
        >>> table = Table("device", "free")
        device                    free
        ------------------------------
        >>> table.add("cpu", "1.00 GiB")
        cpu                   1.00 GiB
    """

    def __init__(self, *names: str) -> None:
        """Print the head: the first column is aligned left, the others right."""
        self.add(*names)
        print("-" * (_WIDTH * len(names)))

    def add(self, *cells: str) -> None:
        """Print one row at once, also into a pipe."""
        first, *rest = cells
        print(first.ljust(_WIDTH) + "".join(cell.rjust(_WIDTH) for cell in rest))
        sys.stdout.flush()
