"""What the CPU's kernels allocate inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class CpuTemporaries:
    """Nothing beyond outputs for most operators; those that differ are listed with the reason."""

    assumptions: tuple[str, ...] = ()

    def of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], backward: bool
    ) -> Iterable[tuple[int, bool]]:
        """Bytes, and whether they stay allocated, for one call of an operator."""
        return ()
