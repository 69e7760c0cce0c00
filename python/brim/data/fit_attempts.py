"""What `fit` tells an observer while it measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from brim import _C
from brim.memory import PeakMeter, is_out_of_memory


@dataclass(frozen=True)
class FitAttempt:
    """A batch that `fit` ran: what was tried and how it ended, as `Attempt` of an adaptive call.

    Attributes:
        number: 1 for the first batch.
        indices: of the samples.
        fitted: whether memory sufficed. `fit` also measures batches beyond the budget.
        peak: the most bytes above `held`; of a failure, when it failed.
        held: bytes in use when it began.
        seconds: how long it took.

    Example:
        >>> FitAttempt(3, [7, 1, 4], True, 2**20, 0, 0.125)
        FitAttempt(number=3, size=3, fitted, peak 1.00 MiB, 0.125 s)
    """

    number: int
    indices: list[int]
    fitted: bool
    peak: int
    held: int
    seconds: float

    @property
    def size(self) -> int:
        """How many samples the batch has."""
        return len(self.indices)

    def __repr__(self) -> str:
        outcome = "fitted" if self.fitted else "out of memory"
        return (
            f"FitAttempt(number={self.number}, size={self.size}, {outcome}, "
            f"peak {_C.format_bytes(self.peak)}, {self.seconds:.3f} s)"
        )


class Observed:
    """Runs batches, and tells an observer of each: of a failed one when its memory is free again.

    Args:
        run: runs a batch of samples.
        observer: called with each `FitAttempt`; None for nobody.
        device: whose memory counts.
    """

    def __init__(
        self,
        run: Callable[[list[int]], object],
        observer: Callable[[FitAttempt], object] | None,
        device: str | torch.device | int | None,
    ) -> None:
        self._run, self._observer, self._device = run, observer, device
        self._number = 0
        self._untold: FitAttempt | None = None

    def __call__(self, indices: list[int]) -> None:
        """Run a batch."""
        if self._observer is None:
            self._run(indices)
            return
        self.tell()
        self._number += 1
        number, meter, begin = self._number, PeakMeter(self._device), time.perf_counter()

        def ended(*, fitted: bool) -> FitAttempt:
            seconds = time.perf_counter() - begin
            return FitAttempt(number, indices, fitted, meter.peak, meter.start, seconds)

        try:
            with meter:
                self._run(indices)
        except Exception as error:
            if is_out_of_memory(error):
                self._untold = ended(fitted=False)
            raise
        self._observer(ended(fitted=True))

    def tell(self) -> None:
        """Tell of the last batch, if that has not been done."""
        untold, self._untold = self._untold, None
        if untold is not None and self._observer is not None:
            self._observer(untold)
