"""Tables as text, with columns as wide as their cells."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, last: Sequence[str] = ()
) -> str:
    """The rows under their head.

    Args:
        head: a name a column.
        rows: a cell a column.
        left: how many columns are aligned left; the others are aligned right.
        last: one more row, under a line of its own.

    Example:
        >>> print(text_table(["layer", "bytes"], [["conv", "12"], ["relu", "4"]], last=["", "16"]))
        layer  bytes
        ------------
        conv      12
        relu       4
        ------------
                  16
    """
    lines = [head, *rows, *([last] if last else [])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    texts = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    texts.insert(1, rule)
    if last:
        texts.insert(len(texts) - 1, rule)
    return "\n".join(texts)
