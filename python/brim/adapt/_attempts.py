"""What `record` returns beside the result."""

from __future__ import annotations

import logging
from typing import Any

from brim import _C
from brim._C import Attempt
from brim._plots import draw


class Attempts(list[Attempt]):
    """The attempts of one adaptive call, in order: a list that can be drawn.

    Example:
        >>> import brim, torch
        >>> @brim.maximize("size")
        ... def work(size):
        ...     return torch.zeros(size).numel()
        >>> result, attempts = work.record(size=8)
        >>> [attempt.size for attempt in attempts]
        [8]
    """

    def plot(self, where: Any = None, *, budget: int | None = None) -> Any:
        """Draw memory and time against the sizes that were tried; see `brim.plot.attempts`.

        Args:
            where: an Axes of matplotlib, a file to write, or None for a new Figure.
            budget: bytes, drawn as a line.
        """
        return draw("attempts", self, where, budget=budget)


_C.provide(Attempts=Attempts, logger=logging.getLogger("brim"))
