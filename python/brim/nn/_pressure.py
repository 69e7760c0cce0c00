"""What layers gave up for want of memory, with `recompute="auto"`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from brim import _C
from brim._plots import draw
from brim.memory import DeviceLike

__all__ = [
    "Pressure",
    "PressureMoment",
    "PressureRecord",
    "pressure",
    "record_pressure",
    "reset_pressure",
]


class Pressure(NamedTuple):
    """What was given up and computed again, on all devices, since the process began.

    Attributes:
        values: how many values could be given up now.
        value_bytes: their bytes; memory that others hold, too, counts.
        requests: allocations that were served only because values went.
        dropped: values that went for such a request.
        dropped_bytes: bytes that this freed.
        foreseen: values that were not kept at all, because an earlier step like this one needed it.
        foreseen_bytes: their bytes.
        recomputed: values that backward computed again, without those of blocks.
        blocks: blocks of layers that ran again as a whole.
        seconds: what both took: on the CPU by the clock, on an accelerator the time between begin
            and end in its queue, of the runs that are over there.

    Example:
        >>> import brim
        >>> print(brim.nn.Pressure(0, 0, 2, 3, 3 << 20, 9, 9 << 20, 12, 0, 0.04))
        2 allocations were served by giving up 3 values (3.00 MiB); 9 more (9.00 MiB) were not \
kept, as earlier steps had shown; 12 were computed again, in 0.040 s
    """

    values: int
    value_bytes: int
    requests: int
    dropped: int
    dropped_bytes: int
    foreseen: int
    foreseen_bytes: int
    recomputed: int
    blocks: int
    seconds: float

    def __str__(self) -> str:
        if not self.dropped and not self.foreseen:
            return "memory was never short: nothing was given up"
        ran = f", and {_several(self.blocks, 'block')} run again as a whole" if self.blocks else ""
        return (
            f"{_several(self.requests, 'allocation')} served by giving up {self.dropped} values "
            f"({_C.format_bytes(self.dropped_bytes)}); {self.foreseen} more "
            f"({_C.format_bytes(self.foreseen_bytes)}) were not kept, as earlier steps had shown; "
            f"{self.recomputed} were computed again{ran}, in {self.seconds:.3f} s"
        )


def _several(count: int, what: str) -> str:
    return f"1 {what} was" if count == 1 else f"{count} {what}s were"


def pressure() -> Pressure:
    """What layers with `recompute="auto"` gave up and computed again until now.

    Example:
        >>> import brim
        >>> brim.nn.reset_pressure()
        >>> brim.nn.pressure().dropped
        0
    """
    return Pressure(*_C.pressure())


def reset_pressure() -> None:
    """Count from zero again, and forget what earlier steps needed.

    Example:
        >>> import brim
        >>> brim.nn.reset_pressure()
        >>> str(brim.nn.pressure())
        'memory was never short: nothing was given up'
    """
    _C.reset_pressure()


class PressureMoment(NamedTuple):
    """A moment of a recorded step, in bytes.

    Attributes:
        held: by tensors on the device.
        given_up: what is not kept now, and would be if there were room.
        dropped: of this, what an allocation needed at this moment.
        again: what was given up, and is computed again at this moment.

    Example:
        >>> import torch, brim
        >>> record = brim.nn.record_pressure(torch.ones, 1024, device="cpu")
        >>> record.moments[1].held - record.moments[0].held
        4096
    """

    held: int
    given_up: int
    dropped: int
    again: int


@dataclass(frozen=True)
class PressureRecord:
    """What a step held, gave up and computed again; `record_pressure` makes one.

    Attributes:
        moments: one for the begin, for each allocation and release, and whenever something was
            given up or computed again.
        limit: what the device could hold in all, in bytes; with a budget that was open, its limit.

    Example:
        >>> import torch, brim
        >>> record = brim.nn.record_pressure(lambda: torch.ones(1024).exp(), device="cpu")
        >>> max(moment.held for moment in record.moments) - record.moments[0].held >= 8192
        True
    """

    moments: tuple[PressureMoment, ...]
    limit: int

    def plot(self, where: Any = None) -> Any:
        """Draw what was held over the step, and what was given up; see `brim.plot.pressure`.

        Args:
            where: an Axes of matplotlib, a file to write, or None for a new Figure.

        Returns:
            The Figure.
        """
        return draw("pressure", self, where)


def record_pressure(
    step: Callable[..., object], *args: Any, device: DeviceLike = None, **kwargs: Any
) -> PressureRecord:
    """Run a step once, and record what it holds, gives up and computes again.

    Args:
        step: called once.
        *args: its arguments.
        device: where memory is short: "cpu" or "cuda", the accelerator if there is one by default.
        **kwargs: its arguments.

    Raises:
        NotImplementedError: on devices whose allocations cannot be recorded.
        RuntimeError: if the step makes and frees more than 65,536 tensors, or allocations are
            recorded already.

    Example:
        >>> import torch, brim
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU())
        >>> report = brim.convert(model, recompute="auto")
        >>> step = lambda x: model(x).sum().backward()
        >>> record = brim.nn.record_pressure(step, torch.ones(128, 64), device="cpu")
        >>> record.plot("step.png")  # doctest: +SKIP
    """
    limit = _C.memory_stats(device).limit
    moments = _C.record_pressure(lambda: step(*args, **kwargs), device)
    return PressureRecord(tuple(map(PressureMoment._make, moments)), limit)
