"""Attainment: measures which share of recent requests kept the goals, and detects when too many were late. Pure.

Rules:

1. The goals allow a share of all requests to be late, which is the budget. Chance makes some minutes worse than others, so one late
   minute is no reason to act.
2. A goal is missed if the last `FAST_SECONDS` have more late requests than the budget, by more than chance explains, and so have
   the last `SLOW_SECONDS`. It is also missed if the last `FAST_SECONDS` alone have `FAST_BURN` times the budget. These are the two
   windows of alerts on burn rates (Beyer et al., The Site Reliability Workbook, 2018, chapter 5).
3. Requests that wait in routers and are late already count, too: their ages are taken to be evenly spread up to that of the oldest.
"""

from collections import deque
from math import sqrt

from msgspec import Struct

from fleet.core.clock import SECOND
from fleet.core.duration_counts import within
from fleet.planner.decisions import PlanGoals
from fleet.planner.demand import DemandWindow

FAST_SECONDS = 60.0
SLOW_SECONDS = 1800.0
FAST_BURN = 8.0
CHANCE = 3.0
"""Deviations of up to this many standard errors are explained by chance."""

FEWEST_LATE = 2.0
"""With fewer late requests than this, no goal counts as missed."""


class _Latencies(Struct, frozen=True):
    """Numbers of measured and of late requests in one window."""

    ended: int
    counts: tuple[float, float]
    late: tuple[float, float]


class Attainment:
    """Counts recent requests that kept the TTFT and TPOT goals, and those that did not."""

    def __init__(self, goals: PlanGoals) -> None:
        self._goals = goals
        self._windows: deque[_Latencies] = deque()
        self._waiting = 0.0  # estimated number of waiting requests that are late already

    def absorb(self, demand: DemandWindow) -> None:
        """Add the requests of the next window, and drop windows older than `SLOW_SECONDS`. The window must be valid."""
        goal = self._goals.ttft_seconds
        oldest = demand.oldest_seconds
        self._waiting = demand.queued * (oldest - goal) / oldest if oldest > goal else 0.0
        ttft, tpot = float(sum(demand.ttft)), float(sum(demand.tpot))
        late = (ttft - within(demand.ttft, goal), tpot - within(demand.tpot, self._goals.tpot_seconds))
        self._windows.append(_Latencies(demand.ended, (ttft, tpot), late))
        while self._windows[0].ended < demand.ended - SLOW_SECONDS * SECOND:
            self._windows.popleft()

    @property
    def misses_ttft(self) -> bool:
        return self._misses(0, self._waiting)

    @property
    def misses_tpot(self) -> bool:
        return self._misses(1, 0.0)

    @property
    def overspent(self) -> bool:
        """Return whether the last `FAST_SECONDS` and the last `SLOW_SECONDS` both had more late requests than the goals allow."""
        return any(
            all(
                (burn := self._burn(field, seconds, waiting)) is not None and burn[0] > burn[1]
                for seconds in (FAST_SECONDS, SLOW_SECONDS)
            )
            for field, waiting in ((0, self._waiting), (1, 0.0))
        )

    def _misses(self, field: int, waiting: float) -> bool:
        fast = self._burn(field, FAST_SECONDS, waiting)
        if fast is None or fast[0] <= fast[1] + CHANCE * sqrt(fast[1]) or fast[0] < FEWEST_LATE:
            return False
        if fast[0] >= FAST_BURN * fast[1]:
            return True
        slow = self._burn(field, SLOW_SECONDS, waiting)
        return slow is not None and slow[0] > slow[1]

    def _burn(self, field: int, seconds: float, waiting: float) -> tuple[float, float] | None:
        """Return the late requests of the last seconds and the number that the goals allow; None without requests."""
        since = self._windows[-1].ended - seconds * SECOND if self._windows else 0.0
        recent = [each for each in self._windows if each.ended > since]
        count = sum(each.counts[field] for each in recent) + waiting
        if not count:
            return None
        late = sum(each.late[field] for each in recent) + waiting
        return late, (1.0 - self._goals.percentile) * count
