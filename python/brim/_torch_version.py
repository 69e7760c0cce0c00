"""Checks that the torch of this process is the one that the C++ core was built for."""

import torch

from brim._build_info import TORCH_VERSION


def check(found: str = torch.__version__, built: str = TORCH_VERSION) -> None:
    """Raise where loading the core would end in missing symbols or worse.

    torch keeps its C++ binary interface within a minor version only.

    Args:
        found: version of the torch that is imported.
        built: version of the torch that brim was built with.

    Raises:
        ImportError: if they differ in more than the patch number.

    Example:
        >>> check("2.13.1+cpu", "2.13.0")
    """
    if found.split(".")[:2] != built.split(".")[:2]:
        raise ImportError(
            f"brim was built for torch {built} and cannot be used with torch {found}: "
            "build it again with `pip install --no-build-isolation --force-reinstall "
            "--no-deps brim`, "
            f"or install torch {built}."
        )
