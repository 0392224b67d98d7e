"""Interrupts: Ctrl-C and SIGTERM end a command in the same way, so that it always cleans up.

During an import, or while msgspec inspects a type, an exception can crash C code (msgspec 0.22). A signal that arrives
in this time takes effect a moment later, or at the end of the `with` block of `raise_interrupt_on`.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
RETRY_SECONDS = 0.01
IMPORT_FRAME = "<frozen importlib._bootstrap>"
MSGSPEC_FRAME = "/msgspec/_utils.py"


@contextmanager
def raise_interrupt_on(stopping: Sequence[signal.Signals] = INTERRUPT_SIGNALS) -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the `with` block if one of these signals arrives.

    Do nothing in other threads than the main one, because only the main thread handles signals.

    Signals that the process ignores stay ignored, because background jobs of a shell must not react to Ctrl-C. If an
    exception is not safe at once, the function uses SIGALRM to raise it a moment later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler
        nonlocal asked
        asked = True
        if not _in_unsafe_frame(frame):
            raise KeyboardInterrupt
        # an exception is not safe now, so the alarm tries again a moment later
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)

    before = {number: signal.getsignal(number) for number in (*stopping, signal.SIGALRM)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN or number == signal.SIGALRM:
                signal.signal(number, interrupt)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt


def _in_unsafe_frame(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if name == IMPORT_FRAME or name.endswith(MSGSPEC_FRAME):
            return True
        frame = frame.f_back
    return False
