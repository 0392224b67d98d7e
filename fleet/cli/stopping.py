"""Being told to stop: a SIGTERM ends a command as Ctrl-C does, so that whatever it has begun is cleared away."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def as_interrupt() -> Iterator[None]:
    """Within, SIGTERM raises `KeyboardInterrupt`; in the main thread only, which is the one that signals reach."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler of signals
    raise KeyboardInterrupt
