"""Prefill break-even: from how many uncached tokens another worker should compute the prompt; learned instead of a constant.

`fleet.router.placement.decision` uses it if the setting `learn_remote_prefill` is on, and `remote_prefill_min_tokens` otherwise.

Rules:

1. A prompt of n uncached tokens that the decode worker computes itself delays each of its r requests by n × s seconds.
   A handoff delays one request by h seconds. Both are equal at n = h / (s × r).
2. h is learned from handoffs: the time from the prefill worker's end to the decode worker's first token. s is the recent time per
   prompt token on the decode worker or, if it has computed none, on the workers of its pool that have.
3. Until `MIN_SAMPLES` handoffs have been measured, prompts from `MIN_TOKENS` on are handed over, because with a constant that is
   too high nothing would be measured. External requests (`Arrived.external`) teach nothing, so the constant applies to them
   until then. While s is unknown the constant applies as well. After that the estimate stays between `MIN_TOKENS` and `MAX_TOKENS`, so
   that both ways go on being measured.
"""

from fleet.core.clock import SECOND, Nanos

MIN_SAMPLES = 8
WEIGHT = 0.1  # weight of the newest handoff, with which mostly the last ten count
MIN_TOKENS = 64  # with fewer tokens, a handoff moves only one or two blocks
MAX_TOKENS = 16_384


class PrefillBreakEven:
    """The handoff times that one router has measured."""

    def __init__(self) -> None:
        self.samples = 0
        self.handoff_seconds = 0.0

    @property
    def measured(self) -> bool:
        """True if enough handoffs were measured."""
        return self.samples >= MIN_SAMPLES

    def handed_over(self, taken: Nanos) -> None:
        """Learn the duration of one handoff."""
        seconds = taken / SECOND
        self.samples += 1
        weight = max(WEIGHT, 1 / self.samples)
        self.handoff_seconds += weight * (seconds - self.handoff_seconds)

    def min_tokens(self, token_seconds: float, requests: int, constant: int) -> int:
        """Return the number of uncached tokens from which on a handoff is cheaper.

        Args:
            token_seconds: Seconds per prompt token; 0: unknown.
            requests: Requests on the decode worker.
            constant: The value to use until enough was measured.
        """
        if not self.measured:
            return min(constant, MIN_TOKENS)
        even = self.even_tokens(token_seconds, requests)
        return constant if even is None else even

    def even_tokens(self, token_seconds: float, requests: int) -> int | None:
        """Return where a handoff and a prefill on the decode worker cost the same; None if too little was measured."""
        if not self.measured or token_seconds == 0:
            return None
        even = self.handoff_seconds / (token_seconds * max(1, requests))
        return int(min(max(even, MIN_TOKENS), MAX_TOKENS))
