"""Notices calls that last longer than they may, by a clock that stands still while this process is stopped."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

TICK_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""For threads that wait for a core: the machine is full on purpose."""


class CallWatchdog:
    """One a process, watching all its threads."""

    def __init__(self, late: Callable[[str, float], None]):
        """Starts to watch.

        Args:
            late: Told once of every call that is late: what it was, and how long it has been running, in seconds.
        """
        self._late = late
        self._awake_seconds = 0.0
        self._calls: dict[int, tuple[str, float, float]] = {}  # thread -> call, begun, limit
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextlib.contextmanager
    def call(self, name: str, limit_seconds: float) -> Iterator[None]:
        """The body is one call, which may take that long and some grace."""
        thread = threading.get_ident()
        with self._lock:
            self._calls[thread] = (name, self._awake_seconds, limit_seconds + GRACE_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._calls.pop(thread, None)  # not there any more when it was late

    def _watch(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            with self._lock:
                self._awake_seconds += TICK_SECONDS  # counted and not measured: a stopped process does not count
                for thread, (name, begun, limit) in list(self._calls.items()):
                    if self._awake_seconds - begun > limit:
                        del self._calls[thread]
                        self._late(name, self._awake_seconds - begun)
