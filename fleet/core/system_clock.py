"""System clocks: the monotonic clock of the store, and the only calls of `time.time`."""

import time
from datetime import UTC, datetime

from kvstore.system_clock import MonotonicClock as SystemClock

__all__ = ["SystemClock", "unix_milliseconds", "unix_seconds", "utc_now"]


def unix_seconds() -> int:
    """Return the wall-clock time in seconds. It may jump, so do not measure durations with it."""
    return int(time.time())


def unix_milliseconds() -> int:
    """Return the wall-clock time in milliseconds."""
    return time.time_ns() // 1_000_000


def utc_now() -> datetime:
    """Return the wall-clock time as a datetime."""
    return datetime.fromtimestamp(time.time(), UTC)
