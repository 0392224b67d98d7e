"""Prefill speed: how long an engine takes to compute a prompt, learned from when its scheduler plans steps. Pure."""

from collections import deque

LEAST_TOKENS = 64  # in a step that counts, because smaller steps only decode
SAMPLES = 16
UNKNOWN_SECONDS_A_TOKEN = 0.0005  # until something was measured: a small model on a CPU, an unhurried GPU


class PrefillSpeed:
    """An upper estimate of the seconds per prompt token.

    Schedulers may plan a step while the previous one still runs. So a step's duration is taken as the time until the
    second plan after it, if none of them was idle. The shortest of the last samples contains the least other work.
    """

    def __init__(self) -> None:
        self._plans: deque[tuple[float, int]] = deque(maxlen=3)  # seconds, tokens
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def planned(self, tokens: int, now: float) -> None:
        """Note that a step with that many tokens was planned; `now` is in monotonic seconds."""
        self._plans.append((now, tokens))
        if len(self._plans) == 3 and all(tokens for _, tokens in self._plans):
            (began, tokens), _, (ended, _) = self._plans
            if tokens >= LEAST_TOKENS:
                self._samples.append((ended - began) / tokens)

    def seconds(self, tokens: int) -> float:
        """Return how long computing that many tokens will take."""
        return tokens * min(self._samples, default=UNKNOWN_SECONDS_A_TOKEN)
