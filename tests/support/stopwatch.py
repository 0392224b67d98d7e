"""Stopwatch for deadlines on busy machines: it counts only time in which this process could run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_SECONDS = 0.02


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if the body takes longer than `seconds`.

    A thread sleeps for short times and counts them. The count grows also while the body waits for an answer. It does not
    grow while the machine does not run this process.
    """
    through = threading.Event()
    ticks = 0

    def count() -> None:
        nonlocal ticks
        while not through.wait(TICK_SECONDS):
            ticks += 1

    counter = threading.Thread(target=count, name="stopwatch", daemon=True)
    counter.start()
    try:
        yield
    finally:
        through.set()
        counter.join()
    assert ticks * TICK_SECONDS <= seconds, f"took {ticks * TICK_SECONDS:.2f} s, {seconds} were allowed"
