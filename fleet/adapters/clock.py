"""The system's clocks: the monotonic one, which is the store's, and the only caller of `time.time`."""

import time

from kvstore.monotonic import MonotonicClock as SystemClock

__all__ = ["SystemClock", "unix_milliseconds", "unix_seconds"]


def unix_seconds() -> int:
    """Wall-clock time, for what people and other programs read; never for spans, since it may jump."""
    return int(time.time())


def unix_milliseconds() -> int:
    """Likewise; to say which of two things was done last."""
    return time.time_ns() // 1_000_000
