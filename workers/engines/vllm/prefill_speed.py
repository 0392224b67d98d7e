"""How long an engine takes to compute a prompt, learnt from the times at which its scheduler plans steps. Pure."""

from collections import deque

LEAST_TOKENS = 64  # of a step that counts: smaller ones are decoding
SAMPLES = 16
UNKNOWN_SECONDS_A_TOKEN = 0.0005  # until something was measured: a small model on a CPU, an unhurried GPU


class PrefillSpeed:
    """Seconds a token of prompts, from above.

    Schedulers may plan a step while the one before it still runs. So what a step took is taken to be the time until the
    second plan after it, if none of them was idle; the shortest of the last samples has the least of other work in it.
    """

    def __init__(self) -> None:
        self._plans: deque[tuple[float, int]] = deque(maxlen=3)  # seconds, tokens
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def planned(self, tokens: int, now: float) -> None:
        """A step of that many tokens was planned; `now` is monotonic seconds."""
        self._plans.append((now, tokens))
        if len(self._plans) == 3 and all(tokens for _, tokens in self._plans):
            (began, tokens), _, (ended, _) = self._plans
            if tokens >= LEAST_TOKENS:
                self._samples.append((ended - began) / tokens)

    def seconds(self, tokens: int) -> float:
        """That computing so many tokens will take."""
        return tokens * min(self._samples, default=UNKNOWN_SECONDS_A_TOKEN)
