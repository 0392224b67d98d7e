"""The system's clocks: the monotonic one, which is the store's, and the only caller of `time.time`."""

import time

from kvstore.monotonic import MonotonicClock as SystemClock

__all__ = ["SystemClock", "unix_seconds"]


def unix_seconds() -> int:
    """Wall-clock time, for what people and other programs read; never for spans, since it may jump."""
    return int(time.time())
