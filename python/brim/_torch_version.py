"""Checks that the torch of this process is the one that the C++ core was built for."""

import torch

from brim._build_info import TORCH_VERSION


def check(found: str = torch.__version__, built: str = TORCH_VERSION) -> None:
    """Raise an ImportError if torch is not of the minor version that brim was built with.

    torch keeps its C++ binary interface only within one: symbols would be missing.

    Example:
        >>> check("2.13.1+cpu", "2.13.0")
    """
    if found.split(".")[:2] != built.split(".")[:2]:
        raise ImportError(
            f"brim was built for torch {built} and cannot be used with torch {found}: "
            "build it again with `pip install --no-build-isolation --no-cache-dir "
            "--force-reinstall --no-deps brim`, "
            f"or install torch {built}."
        )
