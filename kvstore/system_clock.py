"""System clock: the only module of this package that asks for the time."""

import time
from collections.abc import Callable
from typing import cast

from kvstore.clock import Nanos


class MonotonicClock:
    """Clock that never goes back and is equal in all processes of a host."""

    # The system's function itself, without a wrapper: it is called several times for each request.
    now = staticmethod(cast("Callable[[], Nanos]", time.monotonic_ns))  # noqa: TID251 - this is the Clock


def unix_seconds() -> int:
    """Return the calendar time in seconds, for comparison between hosts; it may jump."""
    return int(time.time())  # noqa: TID251 - this is the clock
