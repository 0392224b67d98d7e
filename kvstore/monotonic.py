"""The system's clock: the only module of this package that asks what time it is."""

import time

from kvstore.clock import Nanos


class MonotonicClock:
    """Never goes back; equal in all processes of a host."""

    def now(self) -> Nanos:
        return Nanos(time.monotonic_ns())  # noqa: TID251 - this is the Clock


def unix_seconds() -> int:
    """What the calendar says, for what several hosts compare; it may jump."""
    return int(time.time())  # noqa: TID251 - likewise
