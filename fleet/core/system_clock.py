"""System clocks: the monotonic clock of the store, and the only calls of `time.time`."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from kvstore.system_clock import MonotonicClock as SystemClock

__all__ = ["SystemClock", "process_age", "unix_milliseconds", "unix_nanoseconds", "unix_seconds", "utc_now"]


def unix_seconds() -> int:
    """Return the wall-clock time in seconds. It may jump, so do not measure durations with it."""
    return int(time.time())


def unix_milliseconds() -> int:
    """Return the wall-clock time in milliseconds."""
    return unix_nanoseconds() // 1_000_000


def unix_nanoseconds() -> int:
    """Return the wall-clock time in nanoseconds."""
    return time.time_ns()


def utc_now() -> datetime:
    """Return the wall-clock time as a datetime."""
    return datetime.fromtimestamp(time.time(), UTC)


def process_age() -> float:
    """Return the seconds since this process was started, start-up of the interpreter included; 0 if the system is not Linux."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return 0.0
    # Field 22 of /proc/PID/stat: start of the process, in ticks since the system's boot.
    began = int(stat[stat.rindex(")") + 2 :].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
