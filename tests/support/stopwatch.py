"""Stopwatch that counts the time that this process really got, for deadlines on busy machines."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_SECONDS = 0.02


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if the body takes longer than `seconds`.

    It counts short sleeps instead of the clock. Where the machine stands still, the count does too, but a call that
    waits for an answer is counted in full.
    """
    through = threading.Event()
    ticks = 0

    def count() -> None:
        nonlocal ticks
        while not through.wait(TICK_SECONDS):
            ticks += 1

    counter = threading.Thread(target=count, name="stopwatch")
    counter.start()
    try:
        yield
    finally:
        through.set()
        counter.join()
    assert ticks * TICK_SECONDS <= seconds, f"took {ticks * TICK_SECONDS:.2f} s, {seconds} were allowed"
