"""Integer time, and the protocol of clocks. `fleet.core.clock` exports the types and units for the package `fleet`."""

from typing import NewType, Protocol

Nanos = NewType("Nanos", int)
"""Nanoseconds: an instant of a monotonic clock, or a duration. It is an integer because a replay must give exactly the
same results, and sums of floats depend on rounding."""

MILLISECOND = Nanos(1_000_000)
SECOND = Nanos(1_000_000_000)


class Clock(Protocol):
    """Source of time for servers and clients.

    Machines have no clock: each call passes them the current instant as `now`.
    """

    def now(self) -> Nanos: ...


def nanos(seconds: float) -> Nanos:
    """Convert seconds to nanoseconds."""
    return Nanos(round(seconds * SECOND))


def seconds(span: int) -> float:
    """Convert nanoseconds to seconds."""
    return span / SECOND
