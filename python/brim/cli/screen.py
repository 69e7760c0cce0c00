"""What a command prints: drawn by rich on a terminal, plain text in a pipe or without rich."""

from __future__ import annotations

import sys
from typing import Any

from brim._table import Part, Table


def show(part: Part) -> None:
    """Print a line or a table, at once also into a pipe."""
    console = _console()
    if console is None:
        print(part, flush=True)
    elif isinstance(part, Table):
        console.print(_drawn(part))
    else:
        console.print(part, markup=False)


def _console() -> Any:
    """Rich's, or None where plain text is wanted."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(emoji=False, highlight=False)  # else it colours names and numbers in sentences


def _drawn(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, show_footer=bool(table.last)
    )
    for column, name in enumerate(table.head):
        is_text = column < table.left
        drawn.add_column(
            Text(name),
            Text(table.last[column]) if table.last else "",
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not is_text,
            style="" if is_text else "cyan",
            footer_style="bold",
        )
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
