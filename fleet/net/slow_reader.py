"""Slow reader limit: decides when a client that reads too slowly must be disconnected.

In each period a client must read all bytes that waited at its beginning, or at least a minimum number of bytes. A
client that reads one byte now and then is therefore disconnected like one that reads nothing. A client that reads a
long answer over a slow network is not.
"""

from typing import Protocol


class _Buffer(Protocol):
    """The part of a transport that the counter needs."""

    def get_write_buffer_size(self) -> int: ...


class WriteBufferCounter:
    """Counts the bytes that pass through a transport's write buffer, only at its two water marks."""

    __slots__ = ("_left", "written")

    def __init__(self) -> None:
        self.written = 0
        """All bytes that ever had to wait for the client, including those that wait now."""
        self._left = 0  # the buffer size when writing was last resumed

    def paused(self, transport: _Buffer) -> None:
        """Note that the transport has paused writing."""
        self.written += transport.get_write_buffer_size() - self._left

    def resumed(self, transport: _Buffer) -> None:
        """Note that the transport has resumed writing."""
        self._left = transport.get_write_buffer_size()


class SlowReader:
    """Reading speed of one client. The owner calls `overdue` regularly with increasing times."""

    __slots__ = ("_began", "_goal", "_min_bytes", "_period")

    def __init__(self, period: float, min_bytes: int) -> None:
        """Create the limit for a client that has nothing to read.

        In each `period`, in the unit of the times given to `overdue`, the client must read `min_bytes` if so many wait.
        """
        self._period = period
        self._min_bytes = min_bytes
        self._began: float | None = None  # start of the present period; None while nothing waits
        self._goal = 0

    def overdue(self, now: float, waiting: int, written: int) -> bool:
        """Return whether the client has read too little.

        Args:
            now: The present time.
            waiting: Bytes that the client could read and has not; 0 means that it reads.
            written: All bytes ever given to the client. Bytes that never had to wait may be left out.
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
