"""Time as integers."""

from typing import NewType

Nanos = NewType("Nanos", int)
"""Nanoseconds: an instant of a monotonic clock, or a span between two."""

SECOND = 1_000_000_000  # nanoseconds
MILLISECOND = 1_000_000  # nanoseconds


def nanos(seconds: float) -> Nanos:
    """A span of that many seconds."""
    return Nanos(round(seconds * SECOND))


def seconds(span: int) -> float:
    """That many nanoseconds as seconds, as sockets and RPCs want them."""
    return span / SECOND
