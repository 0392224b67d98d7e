"""Time as integers, and the port of clocks. The rest of Fleet imports them from `fleet.core.clock`."""

from typing import NewType, Protocol

Nanos = NewType("Nanos", int)
"""Nanoseconds: an instant of a monotonic clock, or the time between two instants. Integers, because floats do not replay
exactly.
"""

MILLISECOND = Nanos(1_000_000)
SECOND = Nanos(1_000_000_000)


class Clock(Protocol):
    """Source of time for servers and clients; machines are given `now` instead."""

    def now(self) -> Nanos: ...


def nanos(seconds: float) -> Nanos:
    """Convert seconds to nanoseconds."""
    return Nanos(round(seconds * SECOND))


def seconds(span: int) -> float:
    """Convert nanoseconds to seconds, for sockets and RPCs."""
    return span / SECOND
