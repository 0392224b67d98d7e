"""Stopwatch for deadlines on busy machines: it counts only time in which this process could run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_SECONDS = 0.02


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if the body takes longer than `seconds`.

    The time is measured by short sleeps that a thread counts. While the machine does not run this process, the count
    does not grow. While the body waits for an answer, it does.
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
