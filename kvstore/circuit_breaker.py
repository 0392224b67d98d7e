"""Circuit breaker: stops calls to a node or tier that fails, so that callers lose little time while it is dead."""

from kvstore.clock import SECOND, Nanos

FIRST_PAUSE = Nanos(SECOND // 10)
LONGEST_PAUSE = Nanos(1 * SECOND)
"""Maximum pause after a failed attempt, unless the attempt was so slow that `COST_FACTOR` demands a longer pause. If
failures are fast, the first call after this time therefore reaches a node that has restarted."""
COST_FACTOR = 4
"""A pause lasts at least this many times as long as the failed attempt before it. If a node hangs, callers therefore
spend at most a fifth of their time on attempts."""


class CircuitBreaker:
    """Stops calls after a failure and allows one attempt after a pause.

    The breaker is closed while calls succeed. Each failure opens it and doubles the pause, up to `LONGEST_PAUSE`; after a slow
    attempt, the pause is longer (`COST_FACTOR`). When the pause has passed, `allows` permits one caller to try a call.
    """

    def __init__(self) -> None:
        self._pause = Nanos(0)
        self._retry_at = Nanos(0)
        self.failures = 0
        """Number of failures since the last success."""

    @property
    def closed(self) -> bool:
        return self._pause == 0

    def would_allow(self, now: Nanos) -> bool:
        """Return what `allows` would return, without using up the one attempt that is allowed after the pause."""
        return self.closed or now >= self._retry_at

    def allows(self, now: Nanos) -> bool:
        """Return whether the caller may make a call.

        While the breaker is open, the result is True for one caller after each pause, and False for all others.
        """
        if not self.would_allow(now):
            return False
        if not self.closed:
            self._retry_at = Nanos(now + self._pause)
        return True

    def succeeded(self) -> None:
        self._pause = Nanos(0)
        self.failures = 0

    def failed(self, started: Nanos, now: Nanos) -> None:
        """Record that an attempt, which began at `started`, has failed."""
        self.failures += 1
        doubled = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
        self._pause = Nanos(max(doubled, COST_FACTOR * (now - started)))
        self._retry_at = Nanos(now + self._pause)
