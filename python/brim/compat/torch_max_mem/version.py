"""Which version of torch_max_mem this face stands for.

`python -m brim.compat.torch_max_mem.version` prints it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["VERSION", "get_git_hash", "get_version"]

VERSION = "0.1.6"


def get_git_hash() -> str:
    """The first eight digits of the commit this file is in, or `"UNHASHED"` where there is none."""
    try:
        run = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git on this machine
        return "UNHASHED"
    return run.stdout.strip()[:8] if run.returncode == 0 else "UNHASHED"


def get_version(with_git_hash: bool = False) -> str:
    """The version, with `-` and the commit behind it where asked for.

    Example:
        >>> get_version()
        '0.1.6'
    """
    return f"{VERSION}-{get_git_hash()}" if with_git_hash else VERSION


if __name__ == "__main__":
    print(get_version(with_git_hash=True))
