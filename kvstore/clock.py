"""Time as integers, and who may tell it. The rest of Fleet has the same under `fleet.core.clock`."""

from typing import NewType, Protocol

Nanos = NewType("Nanos", int)
"""Nanoseconds: an instant of a monotonic clock, or a span between two. Integers, because floats do not replay."""

MILLISECOND = Nanos(1_000_000)
SECOND = Nanos(1_000_000_000)


class Clock(Protocol):
    """The only source of time for servers and clients; machines are handed `now` instead."""

    def now(self) -> Nanos: ...


def nanos(seconds: float) -> Nanos:
    """A span of that many seconds."""
    return Nanos(round(seconds * SECOND))


def seconds(span: int) -> float:
    """That many nanoseconds as seconds, as sockets and RPCs want them."""
    return span / SECOND
