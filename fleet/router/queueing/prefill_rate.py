"""Lane pace: how fast a worker computes the prompts that it was sent, and so how long one more would wait there.

The pace is prompt tokens computed over the seconds in which there were some to compute, recent ones counting more. What has been
computed of the prompts under way is not known, but that they were begun some time ago is, so that time is taken off what they still need.
"""

from math import exp

from fleet.core.clock import SECOND, Nanos

MEMORY_SECONDS = 20.0  # of computing; a prompt of 100,000 tokens takes about as long
EVIDENCE = 3  # prompts after which a pace is believed: the first may have compiled something


class PrefillRate:
    """One worker."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._computed = 0
        self._since: Nanos | None = (
            None  # when it came to compute what it computes now; None: it has nothing to compute
        )

    def busy(self, now: Nanos) -> None:
        """Take in that it has something to compute."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        """Take in that it has nothing to compute."""
        self._since = None

    def computed(self, tokens: int, now: Nanos) -> None:
        """Take in that it has computed a prompt."""
        if self._since is None:
            return
        seconds = max(0, now - self._since) / SECOND
        keep = exp(-seconds / MEMORY_SECONDS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds
        self._computed += 1
        self._since = now

    def seconds_to_wait(self, sent: int, held: int, now: Nanos) -> float | None:
        """Return about how long a prompt would wait until it is computed; None if too little was seen.

        Args:
            sent: Tokens that the worker was sent and has not said to have computed.
            held: Tokens that wait for it and go first.
            now: The instant.
        """
        if self._computed < EVIDENCE or self._seconds <= 0 or self._tokens <= 0:
            return None
        rate = self._tokens / self._seconds
        under_way = sent / rate
        if self._since is not None:
            under_way = max(0.0, under_way - (now - self._since) / SECOND)
        return under_way + held / rate
