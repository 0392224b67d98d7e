"""Being told to stop: Ctrl-C and SIGTERM end a command alike, so that whatever it has begun is cleared away.

Neither takes effect in the middle of an import, or while msgspec looks at a type: what C has half built there is not made to be left
(msgspec 0.22 crashes now and then). A moment later it does, or at the end of what is to be ended alike.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
RETRY_SECONDS = 0.01  # seconds
IMPORT_FRAME = "<frozen importlib._bootstrap>"
MSGSPEC_FRAME = "/msgspec/_utils.py"


@contextmanager
def raise_interrupt_on(stopping: Sequence[signal.Signals] = INTERRUPT_SIGNALS) -> Iterator[None]:
    """Within, these raise `KeyboardInterrupt`; in the main thread only, which is the one that signals reach.

    What was ignored before is ignored further on: background jobs of a shell do not hear Ctrl-C. SIGALRM is taken.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler of signals
        nonlocal asked
        asked = True
        if not _in_unsafe_frame(frame):
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)  # asks again

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
