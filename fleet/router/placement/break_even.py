"""Prefill break-even: learns how many uncached tokens a prompt must have before a prefill worker should compute it.

`fleet.router.placement.decision` uses the learned number if the setting `learn_remote_prefill` is on. Otherwise it uses
`remote_prefill_min_tokens`, the constant of the rules below.

Rules:

1. If the decode worker itself computes the n uncached tokens of a prompt, at s seconds for each token, each of the r requests on this
   worker is delayed by n × s seconds. A handoff delays only the new request, by h seconds. The total delays are equal at n = h / (s × r).
2. h is learned from handoffs: the time from the prefill worker's end to the decode worker's first token. s is the recent time per
   prompt token on the decode worker. If this worker has computed no prompt, s is taken from the workers of its pool that have computed one.
3. Until `MIN_SAMPLES` handoffs have been measured, every prompt of `MIN_TOKENS` or more uncached tokens is handed over. If the constant
   applied from the start and were too high, no handoff would ever be measured. External requests (`Arrived.external`) are the exception:
   their timing is not measured, so the constant applies to them at first. Once `MIN_SAMPLES` handoffs have been measured, the constant
   applies to a request only while s is unknown. The learned number is always between `MIN_TOKENS` and `MAX_TOKENS`, so that some prompts
   are handed over and others are not, and both delays can be measured.
"""

from fleet.core.clock import SECOND, Nanos

MIN_SAMPLES = 8
WEIGHT = 0.1  # weight of the newest handoff in the average duration; so mostly the last ten handoffs count
MIN_TOKENS = 64  # lowest number that is learned (rule 3); a handoff of fewer tokens would move only one or two blocks
MAX_TOKENS = 16_384


class PrefillBreakEven:
    """Learns from the handoffs of one router how many uncached tokens make a handoff to a prefill worker worthwhile."""

    def __init__(self) -> None:
        self.samples = 0
        self.handoff_seconds = 0.0

    @property
    def measured(self) -> bool:
        """True if at least `MIN_SAMPLES` handoffs were measured, so that a number can be learned (rule 3)."""
        return self.samples >= MIN_SAMPLES

    def handed_over(self, taken: Nanos) -> None:
        """Learn from one handoff. `taken` is the time from the end of its prefill to the first token of the decode worker."""
        seconds = taken / SECOND
        self.samples += 1
        weight = max(WEIGHT, 1 / self.samples)
        self.handoff_seconds += weight * (seconds - self.handoff_seconds)

    def min_tokens(self, token_seconds: float, requests: int, constant: int) -> int:
        """Return the number of uncached tokens from which on a prompt is handed over to a prefill worker (rule 3).

        Args:
            token_seconds: Seconds per prompt token on the decode worker; 0: unknown.
            requests: Requests on the decode worker.
            constant: The setting `remote_prefill_min_tokens`. Until enough handoffs were measured, the result is this number or
                `MIN_TOKENS`, whichever is smaller. Afterwards it is this number only if `token_seconds` is 0.
        """
        if not self.measured:
            return min(constant, MIN_TOKENS)
        even = self.even_tokens(token_seconds, requests)
        return constant if even is None else even

    def even_tokens(self, token_seconds: float, requests: int) -> int | None:
        """Return the number of tokens at which a handoff and a prefill on the decode worker cost the same; None if too little was measured."""
        if not self.measured or token_seconds == 0:
            return None
        even = self.handoff_seconds / (token_seconds * max(1, requests))
        return int(min(max(even, MIN_TOKENS), MAX_TOKENS))
