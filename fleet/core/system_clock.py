"""The system's clocks: the monotonic one, which is the store's, and the only caller of `time.time`."""

import time
from datetime import UTC, datetime

from kvstore.system_clock import MonotonicClock as SystemClock

__all__ = ["SystemClock", "unix_milliseconds", "unix_seconds", "utc_now"]


def unix_seconds() -> int:
    """Wall-clock time, for what people and other programs read; never for spans, since it may jump."""
    return int(time.time())


def unix_milliseconds() -> int:
    """Likewise; to say which of two things was done last."""
    return time.time_ns() // 1_000_000


def utc_now() -> datetime:
    """Likewise, as Kubernetes' objects have it."""
    return datetime.fromtimestamp(time.time(), UTC)
