"""What layers gave up for want of memory, with `recompute="auto"`."""

from __future__ import annotations

from typing import NamedTuple

from brim import _C

__all__ = ["Pressure", "pressure", "reset_pressure"]


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
