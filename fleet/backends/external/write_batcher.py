"""The end of a turn of the event loop: first everything is sent, then books are kept.

Rules:

1. What is to leave in a turn waits for its end, but no more than `MAX_BATCHED_MESSAGES` messages do. A message that is sent by itself wakes
   its receiver by itself, and sending and deciding in turns push each other out of the processor's caches: together they take a
   quarter off a short request here, and half of what its server takes.
2. Where turns have but one message it goes at once. So the first one does, unless the turn before that had any had several.
3. What a turn brings about besides (bookings, counters, the next use of a connection) comes after all that is sent: nobody should
   wait for books to be kept.
4. One that fails at the end is reported by the event loop, as a callback of its own would be, and the others go on. What goes at once
   fails for who has it sent, as a transport's `write` would; then what waits still goes at the end.
"""

import asyncio
from collections import deque
from collections.abc import Callable

MAX_BATCHED_MESSAGES = 16  # some milliseconds at most, with the longest prompts that are tokenised in the event loop


class WriteBatcher:
    """Of one event loop."""

    def __init__(self) -> None:
        self._sending: deque[Callable[[], None]] = deque()
        self._afterwards: deque[Callable[[], None]] = deque()
        self._messages = 0  # in this turn
        self._several = False  # in the latest turn that had any
        self._due = False

    def send(self, send: Callable[[], None]) -> None:
        """Have it called before anything of `afterwards`, in this order."""
        self._messages += 1
        if self._messages == 1 and not self._several:
            send()
        else:
            self._sending.append(send)
            if len(self._sending) >= MAX_BATCHED_MESSAGES:
                while self._sending:
                    self._sending.popleft()()
        if not self._due:
            self._arm()

    def afterwards(self, keep: Callable[[], None]) -> None:
        """Have it called once nothing waits to be sent."""
        self._afterwards.append(keep)
        if not self._due:
            self._arm()

    def _arm(self) -> None:
        self._due = True
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        if self._messages:
            self._messages, self._several = 0, self._messages > 1
        try:
            while waiting := self._sending or self._afterwards:
                waiting.popleft()()
        finally:
            self._due = False
            if self._sending or self._afterwards or self._messages:
                self._arm()
