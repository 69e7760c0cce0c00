"""Progress bars, drawn by tqdm: for work that takes more than a moment, and where asked for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

_DELAY = 1.0  # seconds: faster work shows no bar
_OFF = ("0", "off", "false", "no")


def _nothing(note: str = "") -> None:
    """A step that shows nothing."""


@contextlib.contextmanager
def progress(
    name: str, unit: str, total: int | None = None, *, enabled: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr inside a `with` block, if stderr is a terminal.

    Nothing is drawn in a pipe, without tqdm, for work that is done within a second, with
    `enabled=False`, or if the environment variable `BRIM_PROGRESS` is 0.

    Yields:
        a function to call after each step, which takes an optional note such as "size 64".

    Example:
        >>> with progress("probe", "call", 3) as step:
        ...     step("size 1")
    """
    if not enabled or _is_off() or sys.stderr is None or not sys.stderr.isatty():
        yield _nothing
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield _nothing
        return
    with tqdm(desc=name, unit=f" {unit}s", total=total, delay=_DELAY, leave=False) as bar:

        def step(note: str = "") -> None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update()

        yield step


def asked_for(name: str) -> Callable[[int], Any]:
    """A function that makes a bar for a total, for `progress=True`: drawn at once, in pipes too.

    Only `BRIM_PROGRESS=0` turns it off.

    Raises:
        ImportError: if tqdm is not installed.

    Example:
        >>> bar = asked_for("chunks")(3)
        >>> _ = bar.update(3)
        >>> bar.close()
    """
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    return lambda total: tqdm(total=total, desc=name, leave=False, disable=_is_off())


def _is_off() -> bool:
    return os.environ.get("BRIM_PROGRESS", "").strip().lower() in _OFF
