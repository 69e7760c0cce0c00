"""What kernels allocate inside and release again, or keep: fake tensors do not show that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Temporaries(Protocol):
    """A table of such allocations on one kind of device."""

    assumptions: Any

    def of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], backward: bool
    ) -> Iterable[tuple[int, bool]]:
        """Bytes, and whether they stay allocated, for one call of an operator."""
        ...
