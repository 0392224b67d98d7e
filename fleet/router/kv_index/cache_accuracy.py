"""Cache accuracy: how well the cached tokens that the router predicts agree with those that workers report.

Rules:

1. The comparison is between the prompt tokens that placement expected to be cached and those that were cached, once for each request,
   on the worker that computed its prompt. Both are whole blocks and exclude the last token, which every engine computes.
2. The smaller number agrees, because a cached prefix begins at the start. Precision is the agreed share of the predicted tokens, recall
   the agreed share of the reported tokens. The hit-rate error is the excess of the prediction (negative: its shortfall) over all prompt
   tokens.
3. For each worker the latest `WINDOW` comparisons count in which something was predicted or reported. When at least `ENOUGH` of them
   have a precision or recall below `DRIFTS`, the cache is said to drift; it no longer drifts when both are above `RECOVERED`. Each
   change is reported once.
"""

from collections import deque
from enum import StrEnum

from msgspec import Struct

WINDOW = 64
ENOUGH = 16
DRIFTS = 0.8  # one evicted block in ten, or a guessed chat template, is no reason to worry
RECOVERED = 0.9


class Knowledge(StrEnum):
    """How the router knows what a worker has cached. Public: a metric label."""

    EXACT = "exact"  # the worker reports it
    APPROXIMATE = "approximate"  # the worker is assumed to hold what it was sent


class CacheComparison(Struct, frozen=True):
    """Tokens of one prompt, or the sums of several."""

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
    """Compare one prompt by rule 1."""
    most = max(0, prompt_tokens - 1) // block_tokens * block_tokens
    predicted, reported = max(0, min(predicted_tokens, most)), min(reported_tokens, most)
    return CacheComparison(prompt_tokens, predicted, reported, min(predicted, reported))


class CacheAccuracy:
    """The latest comparisons of one worker."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.drifting = False
        self.recent = CacheComparison()
        self._window: deque[CacheComparison] = deque()

    def __len__(self) -> int:
        return len(self._window)

    def note(self, compared: CacheComparison) -> bool:
        """Add a comparison; return whether `drifting` has changed."""
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
