"""Fence: decides to stop the use of a server for a while if its answers are often damaged in transit. Does no I/O.

Rules:

1. A server has a score. It rises by `DAMAGE` for each damaged block and falls by one for each undamaged block, but
   never below zero. The fence closes when the score reaches `LIMIT`. Four damaged blocks in a row therefore close it,
   and a server stays in use while less than one block in seventeen is damaged. While the fence is closed, the server is
   not used.
2. A closed fence opens after a pause, at first `FIRST_PAUSE`. The score is then `LIMIT` - `DAMAGE`, so the fence
   closes again if the next block is damaged.
3. If the fence closes again before the score has fallen to zero, the new pause is twice the last one, but at most
   `LONGEST_PAUSE`.
"""

from kvstore.clock import SECOND, Nanos

DAMAGE = 16
LIMIT = 4 * DAMAGE
FIRST_PAUSE = Nanos(1 * SECOND)
LONGEST_PAUSE = Nanos(60 * SECOND)


class Fence:
    """Counts damaged blocks of one server, and decides whether the server may be used now. Not thread-safe."""

    def __init__(self) -> None:
        self._score = 0
        self._pause = Nanos(0)  # length of the last pause (rule 3); zero if there was none since the score was zero
        self._closed_until: Nanos | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_until is not None

    def reopen(self, now: Nanos) -> bool:
        """Open the fence if it is closed and its pause is over. Return whether this call has opened it."""
        if self._closed_until is None or now < self._closed_until:
            return False
        self._closed_until = None
        self._score = LIMIT - DAMAGE
        return True

    def record(self, *, sound: int, damaged: int, now: Nanos) -> bool:
        """Count blocks that were read: undamaged ones (`sound`), and ones that were damaged in transit (`damaged`).

        Return whether this call has closed the fence.
        """
        self._score = max(0, self._score - sound)
        if not self._score:
            self._pause = Nanos(0)
        self._score += DAMAGE * damaged
        if self._score < LIMIT or self._closed_until is not None:
            return False
        self._pause = Nanos(min(2 * self._pause, LONGEST_PAUSE)) if self._pause else FIRST_PAUSE
        self._closed_until = Nanos(now + self._pause)
        return True
