"""From how many prompt tokens on another worker had better compute them: learned, in place of a constant.

Rules:

1. A prompt of n uncached tokens that the decode worker computes itself holds up each of the r requests there for n × s seconds;
   handing it over costs one request h seconds. They are equal at n = h / (s × r).
2. h is learned from hand-offs: from the prefill worker's end to the decode worker's first token. s is what a prompt token took on
   the decode worker lately, or, where it has computed none, on the workers of this pool that have.
3. Until `MIN_SAMPLES` hand-offs have been seen, prompts of `LEAST_TOKENS` are handed over: a constant that is too high would
   else keep anything from being measured. Not those that others send to their workers (`Arrived.second_hand`), which teach nothing:
   for them the constant counts until then. While s is not known the constant of the settings counts. After that the estimate is
   kept within `LEAST_TOKENS` and `MOST_TOKENS`, so that neither side ever stops being measured.
"""

from fleet.core.clock import SECOND, Nanos

MIN_SAMPLES = 8
WEIGHT = 0.1  # of the newest hand-off: of the last ten, mostly
LEAST_TOKENS = 64  # below that, a hand-off moves a block or two
MOST_TOKENS = 16_384


class PrefillBreakEven:
    """What one router has learned of hand-offs."""

    def __init__(self) -> None:
        self.samples = 0
        self.handoff_seconds = 0.0

    @property
    def measured(self) -> bool:
        """Whether enough hand-offs have been seen."""
        return self.samples >= MIN_SAMPLES

    def handed_over(self, taken: Nanos) -> None:
        """A hand-off took so long."""
        seconds = taken / SECOND
        self.samples += 1
        weight = max(WEIGHT, 1 / self.samples)
        self.handoff_seconds += weight * (seconds - self.handoff_seconds)

    def min_tokens(self, token_seconds: float, requests: int, constant: int) -> int:
        """From which on a hand-off is the lesser evil.

        Args:
            token_seconds: That a prompt token takes; 0: not known.
            requests: On the decode worker.
            constant: What counts until enough has been measured.
        """
        if not self.measured:
            return min(constant, LEAST_TOKENS)
        even = self.even_tokens(token_seconds, requests)
        return constant if even is None else even

    def even_tokens(self, token_seconds: float, requests: int) -> int | None:
        """Where a hand-off and a prefill on the decode worker cost the same; None: too little was measured. Arguments as above."""
        if not self.measured or token_seconds == 0:
            return None
        even = self.handoff_seconds / (token_seconds * max(1, requests))
        return int(min(max(even, LEAST_TOKENS), MOST_TOKENS))
