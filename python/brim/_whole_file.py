"""Output files: the old one stays until the new one is whole."""

from __future__ import annotations

import errno
import functools
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import IO

from brim import _C


def write_whole(file: str | PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that takes the old one's place at the end, and not after an error or Ctrl-C.

    Args:
        file: in a folder that is there. A link stays one; a pipe or a device is written directly,
            as is an open file, such as /dev/stdout, from where it stands.
        write: called with what to write into.
    """
    path = Path(file)
    is_open = re.fullmatch(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)", str(path))
    if is_open is not None:
        sys.stdout.flush()
        number = int(is_open[2] or {"stdout": 1, "stderr": 2}[is_open[1]])
        with os.fdopen(os.dup(number), "wb") as out:
            write(out)
        return
    if path.exists() and not path.is_file():
        with path.open("wb") as out:
            write(out)
        return
    path = path.resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    if path.exists():
        path.open("r+b").close()  # an error where it may not be written
    beside = path.with_name(f".{secrets.token_hex(8)}.tmp")  # short: names have a limit
    with _C.Undoing() as undo:
        undo.callback(functools.partial(beside.unlink, missing_ok=True))
        with beside.open("xb") as out:
            write(out)
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
