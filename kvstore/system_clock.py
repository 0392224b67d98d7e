"""System clock: the only module of this package that uses Python's module `time`."""

import time
from collections.abc import Callable
from typing import cast

from kvstore.clock import Nanos


class MonotonicClock:
    """Clock that never goes back and shows the same time in all processes of a host."""

    # `now` is the system's function itself. A Python function around it would be slow, and each request calls it often.
    now = staticmethod(cast("Callable[[], Nanos]", time.monotonic_ns))  # noqa: TID251 - this is the Clock


def unix_seconds() -> int:
    """Return the calendar time in seconds, for comparison between hosts. It may jump forwards or backwards."""
    return int(time.time())  # noqa: TID251 - this is the clock


def unix_nanoseconds() -> int:
    """Return the calendar time in nanoseconds. It may jump forwards or backwards."""
    return time.time_ns()
