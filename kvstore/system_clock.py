"""The system's clock: the only module of this package that asks what time it is."""

import time
from collections.abc import Callable
from typing import cast

from kvstore.clock import Nanos


class MonotonicClock:
    """Never goes back; equal in all processes of a host."""

    # The system's own function, without one of ours around it: this is asked several times for each request.
    now = staticmethod(cast("Callable[[], Nanos]", time.monotonic_ns))  # noqa: TID251 - this is the Clock


def unix_seconds() -> int:
    """What the calendar says, for what several hosts compare; it may jump."""
    return int(time.time())  # noqa: TID251 - likewise
