"""Time as integers, and who may tell it."""

from typing import NewType, Protocol

Nanos = NewType("Nanos", int)
"""Nanoseconds: an instant of a monotonic clock, or a span between two. Integers, because floats do not replay."""

MILLISECOND = Nanos(1_000_000)
SECOND = Nanos(1_000_000_000)


class Clock(Protocol):
    """The only source of time for servers; machines are handed `now` instead."""

    def now(self) -> Nanos: ...
