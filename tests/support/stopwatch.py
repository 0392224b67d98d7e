"""Time that a process has really had: what a deadline is held against on a machine that may be busy with something else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_SECONDS = 0.02


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What is done inside has to be through within that time, or it is an AssertionError.

    Short sleeps are counted, not the clock: where the machine stands still or gives its time to others, so does the count, while a
    call that waits for an answer is counted in full.
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
