"""Output files: the old one stays until the new one is whole."""

from __future__ import annotations

import functools
import secrets
import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import IO

from brim import _C


def write_whole(file: str | PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that takes the old one's place at the end, and not after an error or Ctrl-C.

    Args:
        file: in a folder that is there. A link stays one; a pipe or a device is written directly.
        write: called with what to write into.
    """
    path = Path(file)
    if path.exists() and not path.is_file():
        with path.open("wb") as out:
            write(out)
        return
    path = path.resolve()
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    with _C.Undoing() as undo:
        undo.callback(functools.partial(beside.unlink, missing_ok=True))
        with beside.open("xb") as out:
            write(out)
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
