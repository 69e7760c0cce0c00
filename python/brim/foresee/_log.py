"""What a traced call allocates and releases, in order."""

from __future__ import annotations

from brim import _C

Kind = _C.MemoryKind


class Allocation:
    """One storage: its bytes, and what is known about it so far."""

    __slots__ = ("bytes", "kind", "number", "place")

    def __init__(self, size: int, kind: Kind, place: str) -> None:
        self.bytes = size
        self.kind = kind
        self.place = place
        self.number = -1  # in the trace


class Log:
    """Events of a traced call. What was held before is found out while it runs, so it is apart."""

    def __init__(self) -> None:
        """Start with nothing held."""
        self.held: list[Allocation] = []
        self.events: list[tuple[bool, Allocation]] = []

    def hold(self, size: int, kind: Kind, place: str) -> Allocation:
        """Note a storage that existed before the call."""
        allocation = Allocation(size, kind, place)
        self.held.append(allocation)
        return allocation

    def allocate(self, size: int, kind: Kind, place: str) -> Allocation:
        """Note a new storage."""
        allocation = Allocation(size, kind, place)
        self.events.append((True, allocation))
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Note that a storage was released."""
        self.events.append((False, allocation))

    def hold_workspaces(self, most: int) -> None:
        """Count libraries' workspaces as held before, if they fit what is held by others."""
        kept = {id(one) for made, one in self.events if made and one.kind is Kind.workspace}
        kept -= {id(one) for made, one in self.events if not made}
        found = [event for event in self.events if id(event[1]) in kept]
        if sum(one.bytes for _, one in found) <= most:
            self.events = [event for event in self.events if id(event[1]) not in kept]
            self.held += [one for _, one in found]

    def trace(self) -> tuple[_C.MemoryTrace, int]:
        """The events for the C++ core, and the number of the first one of the call."""
        trace = _C.MemoryTrace()
        for allocation in self.held:
            allocation.number = trace.allocate(
                allocation.bytes, allocation.kind, trace.place(allocation.place)
            )
        start = len(trace)
        for allocates, allocation in self.events:
            if allocates:
                allocation.number = trace.allocate(
                    allocation.bytes, allocation.kind, trace.place(allocation.place)
                )
            else:
                trace.free(allocation.number)
        return trace, start
