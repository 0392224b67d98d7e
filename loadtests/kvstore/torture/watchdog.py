"""Watchdog: it reports calls that last too long; its clock does not run while this process is stopped."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

TICK_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""Seconds that a call may take in addition to its limit. The test overloads the machine, so threads wait for a core."""


class CallWatchdog:
    """Watches the calls of all threads of a process."""

    def __init__(self, late: Callable[[str, float], None]):
        """Start to watch.

        Args:
            late: Called once for every call that exceeds its limit, with the call's name and the seconds since its start.
        """
        self._late = late
        self._awake_seconds = 0.0
        # By thread: the name of the call, its begin, and its time limit, both in seconds.
        self._calls: dict[int, tuple[str, float, float]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextlib.contextmanager
    def call(self, name: str, limit_seconds: float) -> Iterator[None]:
        """Watch the body as one call, which may take `limit_seconds` and the grace time."""
        thread = threading.get_ident()
        with self._lock:
            self._calls[thread] = (name, self._awake_seconds, limit_seconds + GRACE_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._calls.pop(thread, None)  # a late call was removed already

    def _watch(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            with self._lock:
                self._awake_seconds += TICK_SECONDS  # counted instead of measured, so that stopped time does not count
                for thread, (name, begun, limit) in list(self._calls.items()):
                    if self._awake_seconds - begun > limit:
                        del self._calls[thread]
                        self._late(name, self._awake_seconds - begun)
