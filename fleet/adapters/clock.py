"""The system's clocks: the only caller of `time.monotonic_ns` and `time.time`."""

import time

from fleet.clock import Nanos


class SystemClock:
    """Implements `fleet.clock.Clock`."""

    def now(self) -> Nanos:
        return Nanos(time.monotonic_ns())


def unix_seconds() -> int:
    """Wall-clock time, for what people and other programs read; never for spans, since it may jump."""
    return int(time.time())
