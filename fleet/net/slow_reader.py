"""Slow reader limit: when a client that takes too little of what waits for it has to be cut.

In each period a client has to take all that waited at its beginning, or at least so many bytes. So a client that takes a byte
now and then is cut as surely as one that takes nothing, and one that reads a long answer over a slow link is not.
"""

from typing import Protocol


class _Buffer(Protocol):
    """What is needed of a transport."""

    def get_write_buffer_size(self) -> int: ...


class WriteBufferCounter:
    """Counts what passes through a transport's write buffer, at its two water marks only, so that it costs nothing for a write."""

    __slots__ = ("_left", "written")

    def __init__(self) -> None:
        self.written = 0
        """Bytes that had to wait for the client, ever, with those that wait."""
        self._left = 0  # when writing was last resumed

    def paused(self, transport: _Buffer) -> None:
        """Note that the transport takes no more."""
        self.written += transport.get_write_buffer_size() - self._left

    def resumed(self, transport: _Buffer) -> None:
        """Note that the transport takes more again."""
        self._left = transport.get_write_buffer_size()


class SlowReader:
    """Reading speed of one client; `overdue` is called from time to time, with times that grow."""

    __slots__ = ("_began", "_goal", "_min_bytes", "_period")

    def __init__(self, period: float, min_bytes: int) -> None:
        """Begin with nothing that waits.

        Args:
            period: How long the client has, in the unit of the times given to `overdue`.
            min_bytes: What the client has to take in that time at least, where more is waiting.
        """
        self._period = period
        self._min_bytes = min_bytes
        self._began: float | None = None  # when the present period did; None: nothing waits
        self._goal = 0

    def overdue(self, now: float, waiting: int, written: int) -> bool:
        """Return whether the client has taken too little.

        Args:
            now: The present time.
            waiting: Bytes that the client could read and has not; 0: it reads.
            written: Bytes that were ever given to it, with those that wait. Bytes that never had to wait may be left out.
        """
        if not waiting:
            self._began = None
            return False
        taken = written - waiting
        if self._began is None or taken >= self._goal:
            self._began = now
            self._goal = taken + min(waiting, self._min_bytes)
            return False
        return now - self._began > self._period
