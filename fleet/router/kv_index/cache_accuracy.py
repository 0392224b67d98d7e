"""What the router believed to be cached against what workers report: how far its picture of their caches can be trusted.

Rules:

1. Compared is the prompt tokens that placement counted on not being computed with those that were not, once a request, on the
   worker that computed its prompt. Both are whole blocks and never the last token, which every engine computes.
2. What agrees is the shorter of the two, since a cached prefix is cached from the start. Precision is what agrees of what was
   predicted, recall what agrees of what was reported; the hit-rate error is what was predicted too much (less: too little) of
   all prompt tokens.
3. Of each worker the latest `WINDOW` comparisons count, of which something was predicted or reported. When `ENOUGH` of them
   have a precision or a recall below `DRIFTS`, its cache is said to drift, once; and once, when both are above `RECOVERED`.
"""

from collections import deque
from enum import StrEnum

from msgspec import Struct

WINDOW = 64
ENOUGH = 16
DRIFTS = 0.8  # a block of ten evicted since, and the odd chat template that was guessed at, are no reason to worry
RECOVERED = 0.9


class Knowledge(StrEnum):
    """How it is known what a worker has cached. Public: a metric label."""

    EXACT = "exact"  # it tells
    APPROXIMATE = "approximate"  # it is believed to hold what was sent there


class CacheComparison(Struct, frozen=True):
    """One prompt, or several together, in tokens."""

    prompt: int = 0
    predicted: int = 0
    reported: int = 0
    agreed: int = 0

    def __add__(self, other: "CacheComparison") -> "CacheComparison":
        return CacheComparison(
            self.prompt + other.prompt,
            self.predicted + other.predicted,
            self.reported + other.reported,
            self.agreed + other.agreed,
        )

    @property
    def precision(self) -> float:
        return self.agreed / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.agreed / self.reported if self.reported else 1.0

    @property
    def hit_rate_error(self) -> float:
        return (self.predicted - self.reported) / self.prompt if self.prompt else 0.0


_NOTHING = CacheComparison()


def compare(prompt_tokens: int, predicted_tokens: int, reported_tokens: int, block_tokens: int) -> CacheComparison:
    """One prompt, by rule 1."""
    most = max(0, prompt_tokens - 1) // block_tokens * block_tokens
    predicted, reported = max(0, min(predicted_tokens, most)), min(reported_tokens, most)
    return CacheComparison(prompt_tokens, predicted, reported, min(predicted, reported))


class CacheAccuracy:
    """Of one worker."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.drifting = False
        self.recent = CacheComparison()
        self._window: deque[CacheComparison] = deque()

    def __len__(self) -> int:
        return len(self._window)

    def note(self, compared: CacheComparison) -> bool:
        """Take a comparison in; whether `drifting` has changed by it."""
        if not compared.predicted and not compared.reported:
            return False
        window, recent = self._window, self.recent
        gone = window.popleft() if len(window) == WINDOW else _NOTHING
        window.append(compared)
        self.recent = recent = CacheComparison(
            recent.prompt + compared.prompt - gone.prompt,
            recent.predicted + compared.predicted - gone.predicted,
            recent.reported + compared.reported - gone.reported,
            recent.agreed + compared.agreed - gone.agreed,
        )
        worst = min(recent.precision, recent.recall)
        drifting = worst < (RECOVERED if self.drifting else DRIFTS) and len(self._window) >= ENOUGH
        changed = drifting is not self.drifting
        self.drifting = drifting
        return changed

    def check(self) -> None:
        """Assert that the sum is that of the window."""
        assert sum(self._window, start=CacheComparison()) == self.recent
        assert len(self._window) <= WINDOW
