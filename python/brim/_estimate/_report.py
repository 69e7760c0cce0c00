"""What `brim.estimate` returns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from brim import _C
from brim._plots import draw
from brim._table import Part, Table, text_of


class GivenUp(NamedTuple):
    """What a traced call with `recompute="auto"` gave up to fit the capacity, in all its calls.

    Attributes:
        bytes: that this freed.
        values: how many tensors, those of blocks included.
        blocks: blocks of layers that ran again as a whole.
        extra_work: what ran again, as a share of the call's floating-point operations without it.
            Counted by the formulas of `torch.utils.flop_counter`: products, convolutions and
            attention count, element-wise work does not.
        peak_without: the peak of a call that gives nothing up.

    Example:
        >>> import brim
        >>> print(brim.GivenUp(3 << 30, 40, 2, 0.125, 9 << 30))
        gives up 40 values (3.00 GiB) and runs 2 blocks again: 12.5% more floating-point \
operations. With all values kept, the peak is 9.00 GiB
    """

    bytes: int
    values: int
    blocks: int
    extra_work: float = 0.0
    peak_without: int = 0

    def __str__(self) -> str:
        size = _C.format_bytes
        values = f"{self.values} value{'s' * (self.values != 1)}"
        blocks = f"{self.blocks} block{'s' * (self.blocks != 1)}"
        return (
            f"gives up {values} ({size(self.bytes)}) and runs {blocks} again: "
            f"{self.extra_work:.1%} more floating-point operations. With all values kept, the peak "
            f"is {size(self.peak_without)}"
        )


class Estimate:
    """The memory of a call that was traced, not run. All figures are bytes.

    Attributes:
        device: whose memory it is.
        peak: the most that the call holds above what was held before: what `PeakMeter` would show.
        held_before: held by the call's tensors before: parameters, inputs, existing state.
        left: what it leaves behind; negative if it releases more than it keeps.
        reserved: the most that the device's allocator takes from the device in all.
        by_kind: held at the peak, for each kind of memory, what was held before included.
        largest: the ten largest allocations held at the peak: `bytes`, `kind` and `place`.
        fragmentation: share of the reserved bytes that hold no tensor at the peak.
        capacity: what the allocator may take, or None if that is not known.
        fits: whether the call stays within the capacity; None if there is none to compare with.
        given_up: what layers with `recompute="auto"` gave up to stay within the capacity, see
            `GivenUp`; None if nothing.
        assumptions: what was assumed, in sentences.

    Example:
        >>> import brim, torch
        >>> estimate = brim.estimate(lambda x: x + 1, torch.ones(1024), device="cpu")
        >>> estimate.peak, estimate.held_before, estimate.fits
        (4096, 4096, True)
    """

    def __init__(
        self,
        trace: _C.MemoryTrace,
        options: _C.AllocatorOptions,
        begins: Sequence[int],
        device: torch.device,
        capacity: int | None,
        assumptions: tuple[str, ...],
        given_up: GivenUp | None = None,
    ) -> None:
        """Replay a trace, whose calls begin at these events."""
        report = _C.replay(trace, options, begins[0])
        self._replayed = (trace, options, begins[0])
        self._begins = tuple(begins)
        self.device = device
        self.capacity = capacity
        self.assumptions = assumptions
        self.given_up = given_up
        self.peak = report.peak
        self.held_before = report.held_before
        self.left = report.left
        self.reserved = report.reserved
        self.largest = report.largest
        self.fragmentation = report.fragmentation
        self.fits: bool | None = None if capacity is None else report.fits
        self.by_kind = {
            kind.name.replace("_", " "): held for kind, held in report.held.items() if held
        }

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain Python, for JSON."""
        figures = "peak held_before left reserved fragmentation capacity fits by_kind"
        return {
            "device": str(self.device),
            **{name: getattr(self, name) for name in figures.split()},
            "largest": [
                {"bytes": one.bytes, "kind": one.kind.name, "place": one.place}
                for one in self.largest
            ],
            "given_up": self.given_up and self.given_up._asdict(),
            "assumptions": list(self.assumptions),
        }

    def plot(self, where: Any = None, *, beside: Mapping[str, Estimate] | None = None) -> Any:
        """Draw what is held while the call runs; see `brim.plot.estimate`.

        Args:
            where: an Axes of matplotlib, a file to write, or None for a new Figure.
            beside: other estimates to compare with, by name, such as that of a converted model.
        """
        return draw("estimate", self, where, beside=beside)

    def to_html(self, *, beside: Mapping[str, Estimate] | None = None) -> str:
        """A page for the browser: what is held while the call runs, and by whom at the peak.

        Args:
            beside: other estimates to compare with, by name, as in `plot`.

        Example:
            >>> import brim, torch
            >>> page = brim.estimate(torch.exp, torch.ones(1024), device="cpu").to_html()
            >>> page.startswith("<!doctype html>")
            True
        """
        page: str = draw("estimate_page", self, beside or {})
        return page

    def _timeline(self, points: int = 1000) -> tuple[list[_C.HeldMoment], list[float]]:
        """What is held, at no more than `points` moments, and when each of them begins and ends.

        The time 1.5 is the middle of the second call's events.
        """
        trace, options, start = self._replayed
        moments = _C.timeline(trace, options, start, points)
        events = [moment.event for moment in moments]
        firsts = [0, *(bisect_right(events, begin) for begin in self._begins[1:]), len(events)]
        times = [
            call + place / (end - first)
            for call, (first, end) in enumerate(pairwise(firsts))
            for place in range(end - first)
        ]
        return moments, [*times, len(self._begins)]

    def _place(self, allocation: int) -> str:
        return self._replayed[0].place_of(allocation) if allocation >= 0 else ""

    def _holders(self) -> list[_C.TracedAllocation]:
        """Everything that is held at the peak, largest first."""
        trace, options, start = self._replayed
        return _C.replay(trace, options, start, len(trace)).largest

    def __repr__(self) -> str:
        """Tables for people."""
        return text_of(self._parts())

    def _head(self) -> list[str]:
        size = _C.format_bytes
        lines = [
            f"peak {size(self.peak)} above the {size(self.held_before)} held before, "
            f"on {self.device}",
            f"reserved {size(self.reserved)}, {self.fragmentation:.1%} of it unused at the peak",
        ]
        if self.capacity is not None:
            fits = "fits" if self.fits else "does not fit"
            lines.append(f"{fits} the capacity of {size(self.capacity)}")
        else:
            lines.append(
                f"whether it fits is not known: {self.device} is not there, and no capacity is "
                "given"
            )
        return [*lines, str(self.given_up)] if self.given_up else lines

    def _parts(self) -> list[Part]:
        size = _C.format_bytes
        kinds = sorted(self.by_kind.items(), key=lambda item: -item[1])
        lines: list[Part] = [
            *self._head(),
            "",
            Table(["held at the peak", "bytes"], [[kind, size(held)] for kind, held in kinds]),
        ]
        rows = [
            [one.place, one.kind.name.replace("_", " "), size(one.bytes)] for one in self.largest
        ]
        lines += ["", Table(["largest", "kind", "bytes"], rows, left=2)]
        if self.assumptions:
            lines += ["", "assumed:", *(f"- {text}" for text in self.assumptions)]
        return lines
