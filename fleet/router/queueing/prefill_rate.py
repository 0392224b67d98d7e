"""Prefill rate: how fast a worker computes the prompts that it was sent, and how long one more would wait there.

The rate is the number of computed prompt tokens over the seconds in which there were any to compute; recent ones count more. The
progress of the current prompts is not known, but their beginning is, so that time is subtracted from what they still need.
"""

from math import exp

from fleet.core.clock import SECOND, Nanos

MEMORY_SECONDS = 20.0  # memory in seconds of computing; a prompt of 100,000 tokens takes about as long
EVIDENCE = 3  # prompts before the rate is used; the first may include a compilation


class PrefillRate:
    """The prefill rate of one worker."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._computed = 0
        self._since: Nanos | None = None  # when the worker began with its current prompts; None: it has none

    def busy(self, now: Nanos) -> None:
        """Note that the worker has something to compute."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        """Note that the worker has nothing to compute."""
        self._since = None

    def computed(self, tokens: int, now: Nanos) -> None:
        """Note that the worker has computed a prompt."""
        if self._since is None:
            return
        seconds = max(0, now - self._since) / SECOND
        keep = exp(-seconds / MEMORY_SECONDS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds
        self._computed += 1
        self._since = now

    def seconds_to_wait(self, sent: int, held: int, now: Nanos) -> float | None:
        """Return about how long a prompt would wait until it is computed; None if too little was measured.

        Args:
            sent: Tokens that the worker was sent and has not reported as computed.
            held: Waiting tokens that go first.
            now: The instant.
        """
        if self._computed < EVIDENCE or self._seconds <= 0 or self._tokens <= 0:
            return None
        rate = self._tokens / self._seconds
        under_way = sent / rate
        if self._since is not None:
            under_way = max(0.0, under_way - (now - self._since) / SECOND)
        return under_way + held / rate
