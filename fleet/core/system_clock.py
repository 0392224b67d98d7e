"""System clocks: the monotonic clock, which measures durations, and the wall clock, which `fleet` reads only through this module."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from kvstore.system_clock import MonotonicClock as SystemClock

__all__ = [
    "SystemClock",
    "process_age",
    "process_start",
    "unix_milliseconds",
    "unix_nanoseconds",
    "unix_seconds",
    "utc_now",
]


unix_seconds = time.time
"""Returns the Unix time in seconds, with fractions; the clock may jump, so do not measure durations with it."""


def unix_milliseconds() -> int:
    """Return the Unix time in milliseconds; the clock may jump, so do not measure durations with it."""
    return unix_nanoseconds() // 1_000_000


def unix_nanoseconds() -> int:
    """Return the Unix time in nanoseconds; the clock may jump, so do not measure durations with it."""
    return time.time_ns()


def utc_now() -> datetime:
    """Return the wall-clock time in UTC; the clock may jump, so do not measure durations with it."""
    return datetime.fromtimestamp(time.time(), UTC)


def process_start(pid: int) -> float | None:
    """Return the start of a process in seconds after the boot of the machine.

    Return None if the process has ended, and on systems other than Linux. The number does not change when somebody sets the wall clock.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # field 22 of /proc/PID/stat: start of the process, in clock ticks after the boot of the system
    return int(stat[stat.rindex(b")") + 2 :].split()[19]) / os.sysconf("SC_CLK_TCK")


def process_age(pid: int) -> float:
    """Return the seconds since the start of a process; 0 if the process has ended or the system is not Linux."""
    began = process_start(pid)
    return 0.0 if began is None else max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
