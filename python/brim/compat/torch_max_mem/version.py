"""The version of torch_max_mem that this face matches; run as a module, it prints it."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["VERSION", "get_git_hash", "get_version"]

VERSION = "0.1.6"


def get_git_hash() -> str:
    """The first eight digits of the commit of this file, or `"UNHASHED"` if there is none.

    Example:
        >>> len(get_git_hash())
        8
    """
    command = ["git", "rev-parse", "HEAD"]
    try:
        text = subprocess.check_output(
            command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "UNHASHED"
    return text.strip()[:8]


def get_version(with_git_hash: bool = False) -> str:
    """The version, followed by `-` and the commit if asked for.

    Example:
        >>> get_version()
        '0.1.6'
    """
    return f"{VERSION}-{get_git_hash()}" if with_git_hash else VERSION


if __name__ == "__main__":
    print(get_version(with_git_hash=True))
