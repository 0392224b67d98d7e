"""Observed load: adds up recent demand windows, and computes the rates, lengths and latencies that scaling rules of other systems need."""

from collections import deque

from fleet.core.clock import SECOND, Nanos
from fleet.core.duration_counts import added, percentile
from fleet.planner.demand import DemandWindow, WorkerDemand
from fleet.planner.messages import Observation, PoolName
from fleet.sim.planning.capacity import TrafficShape

KEPT_SECONDS = 900.0
"""Seconds for which demand windows are kept. No rule that uses `ObservedLoad` reads older windows."""

FIRST_SHAPE = TrafficShape(prompt_tokens=1000, answer_tokens=200)
"""Mean lengths that are assumed until the first request has ended."""


class ObservedLoad:
    """Keeps the demand windows of the last `KEPT_SECONDS`, and computes rates, lengths and latencies from them."""

    def __init__(self) -> None:
        self._windows: deque[DemandWindow] = deque()
        self._shape = FIRST_SHAPE
        self.last: DemandWindow | None = None

    def add(self, window: DemandWindow) -> bool:
        """Add a window and return True. If the window is stale or has no duration, ignore it and return False."""
        if window.stale or window.ended <= window.began:
            return False
        self._windows.append(window)
        self.last = window
        oldest = window.ended - KEPT_SECONDS * SECOND
        while self._windows[0].ended <= oldest:
            self._windows.popleft()
        self._note_lengths()
        return True

    def recent(self, seconds: float) -> list[DemandWindow]:
        """Return the windows that ended within the last `seconds` seconds, the newest one last."""
        if self.last is None:
            return []
        since = self.last.ended - seconds * SECOND
        return [window for window in self._windows if window.ended > since]

    def rate(self, seconds: float) -> float:
        """Return the requests per second that clients sent in the last `seconds`, including rejected and abandoned ones."""
        windows = self.recent(seconds)
        span = sum(window.seconds for window in windows)
        return sum(_sent(window) for window in windows) / span if span else 0.0

    def served(self, seconds: float) -> float:
        """Return the answers per second that began in the last `seconds`. Rejected and abandoned requests do not count."""
        windows = self.recent(seconds)
        span = sum(window.seconds for window in windows)
        return sum(sum(window.ttft) for window in windows) / span if span else 0.0

    def latencies(self, seconds: float, share: float) -> tuple[float | None, float | None]:
        """Return one percentile of TTFT and of TPOT over the last `seconds`, such as P90 for a `share` of 0.9.

        The values are in seconds; None means that nothing was measured.
        """
        ttft: tuple[int, ...] = ()
        tpot: tuple[int, ...] = ()
        for window in self.recent(seconds):
            ttft, tpot = added(ttft, window.ttft), added(tpot, window.tpot)
        return percentile(ttft, share), percentile(tpot, share)

    @property
    def shape(self) -> TrafficShape:
        """Mean lengths of prompts and answers in the last `KEPT_SECONDS`, and the cached share of the prompts (at most 0.95).

        If no request arrived, or none ended, in this time, the value is the previous one; at first it is `FIRST_SHAPE`.
        """
        return self._shape

    @property
    def queued(self) -> int:
        return 0 if self.last is None else self.last.queued

    def workers(self, pool: PoolName) -> list[WorkerDemand]:
        """Return the serving workers of a pool, as the last window listed them."""
        return [] if self.last is None else [each for each in self.last.workers if each.pool == pool]

    def _note_lengths(self) -> None:
        arrivals = sum(window.arrivals for window in self._windows)
        finished = sum(window.finished for window in self._windows)
        prompt = sum(window.prompt_tokens for window in self._windows)
        if not arrivals or not finished or not prompt:
            return
        mean_prompt = prompt / arrivals
        cached = sum(window.cached_tokens for window in self._windows) / finished
        self._shape = TrafficShape(
            prompt_tokens=mean_prompt,
            answer_tokens=sum(window.answer_tokens for window in self._windows) / finished,
            cached_share=min(0.95, cached / mean_prompt),
        )


def _sent(window: DemandWindow) -> int:
    return window.arrivals + window.abandoned


def wanted_of(seen: Observation) -> dict[PoolName, int]:
    """Return the wanted number of replicas of each pool."""
    return {each.name: each.wanted for each in seen.pools}


def ready_of(seen: Observation, name: PoolName) -> int:
    """Return the number of ready replicas of a pool, but at least 1, because rules divide by the result."""
    pool = seen.pool(name)
    return 1 if pool is None else max(1, pool.ready)


class Stabilised:
    """Delays the shrinking of a pool: `highest` returns the highest number that the rule computed within the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._span = Nanos(round(seconds * SECOND))
        self._recommended: deque[tuple[Nanos, int]] = deque()

    def highest(self, now: Nanos, recommended: int) -> int:
        self._recommended.append((now, recommended))
        while self._recommended[0][0] <= now - self._span and len(self._recommended) > 1:
            self._recommended.popleft()
        return max(number for _, number in self._recommended)
