"""What a traced call allocates and releases, in order."""

from __future__ import annotations

from brim import _C

Kind = _C.MemoryKind


class Allocation:
    """One storage: its bytes, and what is known about it so far."""

    __slots__ = ("bytes", "kind", "number", "place", "taken")

    def __init__(self, size: int, kind: Kind, place: str) -> None:
        self.bytes = size
        self.kind = kind
        self.place = place
        self.number = -1  # in the trace
        self.taken = -1  # its number in the rehearsal


class Log:
    """Events of a traced call. What was held before is found while it runs, so it is kept apart.

    Args:
        rehearsal: what the call would have to give up; it follows the same events.
    """

    def __init__(self, rehearsal: _C.Rehearsal) -> None:
        self._rehearsal = rehearsal
        self.held: list[Allocation] = []
        self.events: list[tuple[bool, Allocation | None]] = []  # None: see below

    def hold(self, size: int, kind: Kind, place: str) -> Allocation:
        """Note a storage that existed before the call."""
        allocation = Allocation(size, kind, place)
        allocation.taken = self._rehearsal.hold(size)
        self.held.append(allocation)
        return allocation

    def allocate(self, size: int, kind: Kind, place: str) -> Allocation:
        """Note a new storage."""
        allocation = Allocation(size, kind, place)
        allocation.taken = self._rehearsal.allocate(size)  # what goes for it is noted before
        self.events.append((True, allocation))
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Note that a storage was released."""
        self._rehearsal.free(allocation.taken)
        self.events.append((False, allocation))

    def begin_call(self) -> None:
        """Note that the call is repeated."""
        self.events.append((True, None))

    def empty_cache(self) -> None:
        """Note that free memory went back to the device."""
        self._rehearsal.empty_cache()
        self.events.append((False, None))

    def bytes_held(self) -> int:
        """Of all storages that existed before the call."""
        return sum(held.bytes for held in self.held)

    def hold_workspaces(self, most: int) -> None:
        """Count libraries' workspaces as held before, if they fit what is held by others."""
        freed = {id(one) for made, one in self.events if not made}
        kept = [
            one
            for made, one in self.events
            if made and one is not None and one.kind is Kind.workspace and id(one) not in freed
        ]
        if sum(one.bytes for one in kept) <= most:
            moved = {id(one) for one in kept}
            self.events = [event for event in self.events if id(event[1]) not in moved]
            self.held += kept

    def trace(self) -> tuple[_C.MemoryTrace, list[int]]:
        """The events for the C++ core, and the number of the first one of each call."""
        trace = _C.MemoryTrace()
        for held in self.held:
            held.number = trace.allocate(held.bytes, held.kind, trace.place(held.place))
        begins = [len(trace)]
        for allocates, allocation in self.events:
            if allocation is None and allocates:
                begins.append(len(trace))
                trace.begin_call()
            elif allocation is None:
                trace.empty_cache()
            elif allocates:
                allocation.number = trace.allocate(
                    allocation.bytes, allocation.kind, trace.place(allocation.place)
                )
            else:
                trace.free(allocation.number)
        return trace, begins
