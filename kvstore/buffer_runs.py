"""Buffer run: several buffers that are filled or emptied from the front, for vectored reads and writes."""

from collections.abc import Iterable

IOV_MAX = 1024
"""Most buffers per call on Linux (limits.h)."""


class BufferRun:
    """Consecutive buffers, and how many of their bytes are done."""

    def __init__(self, buffers: Iterable[memoryview]):
        """Take contiguous buffers of single bytes."""
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._next = 0  # index of the first buffer that is not finished
        self._start = 0  # bytes of that buffer that are finished
        self.left = sum(len(buffer) for buffer in self._buffers)

    def front(self, limit_bytes: int) -> list[memoryview]:
        """Return the next buffers, at most `limit_bytes` and at most as many buffers as the system takes."""
        if not self._start and self.left <= limit_bytes:  # the usual case: nothing to cut
            return self._buffers[self._next : self._next + IOV_MAX]
        taken: list[memoryview] = []
        start = self._start
        for buffer in self._buffers[self._next : self._next + IOV_MAX]:
            view = buffer[start : start + limit_bytes]
            taken.append(view)
            limit_bytes -= len(view)
            if not limit_bytes:
                break
            start = 0
        return taken

    def advance(self, count: int) -> None:
        """Mark so many bytes as done."""
        assert 0 <= count <= self.left, (count, self.left)
        self.left -= count
        if not self.left:
            self._next, self._start = len(self._buffers), 0
            return
        self._start += count
        while self._next < len(self._buffers) and self._start >= len(self._buffers[self._next]):
            self._start -= len(self._buffers[self._next])
            self._next += 1
