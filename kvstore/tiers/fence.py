"""Fence around a server whose answers are damaged on their way: it is left alone for a while, and then tried again. Pure.

Rules:

1. A score rises by `DAMAGE` with each damaged block, falls by one with each sound one, and is never below zero. At `LIMIT` the
   fence closes. So four damaged blocks in a row close it, and a server of which less than one block in seventeen is
   damaged stays in use.
2. A closed fence opens after a pause, with a score that one more damaged block brings to the limit.
3. The pause is doubled, up to `LONGEST_PAUSE`, where the fence closes again before the score has fallen to zero.
"""

from kvstore.clock import SECOND, Nanos

DAMAGE = 16
LIMIT = 4 * DAMAGE
FIRST_PAUSE = Nanos(1 * SECOND)
LONGEST_PAUSE = Nanos(60 * SECOND)


class Fence:
    """Judges by what was read from a server whether to leave it alone. Not thread-safe."""

    def __init__(self) -> None:
        self._score = 0
        self._pause = Nanos(0)  # the last one; zero once the server has done well since
        self._closed_until: Nanos | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_until is not None

    def reopen(self, now: Nanos) -> bool:
        """Open a closed fence whose pause is over; returns whether that was done."""
        if self._closed_until is None or now < self._closed_until:
            return False
        self._closed_until = None
        self._score = LIMIT - DAMAGE
        return True

    def record(self, *, sound: int, damaged: int, now: Nanos) -> bool:
        """Note blocks that were read; returns whether the fence closes because of them."""
        self._score = max(0, self._score - sound)
        if not self._score:
            self._pause = Nanos(0)
        self._score += DAMAGE * damaged
        if self._score < LIMIT or self._closed_until is not None:
            return False
        self._pause = Nanos(min(2 * self._pause, LONGEST_PAUSE)) if self._pause else FIRST_PAUSE
        self._closed_until = Nanos(now + self._pause)
        return True
