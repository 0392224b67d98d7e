"""Attainment: measures the share of recent requests that kept the goals, and detects when too many were late. Pure.

Rules:

1. The goals allow a certain share of all requests to be late. The budget is this share as a number of requests.
   By chance, some minutes have more late requests than others, so a single bad minute is no reason to add replicas.
2. A goal is missed if two conditions hold. First, the last `FAST_SECONDS` have so many more late requests than the
   budget that chance does not explain the excess. Second, the last `SLOW_SECONDS` also have more late requests than the
   budget, or the last `FAST_SECONDS` have at least `FAST_BURN` times the budget. With fewer than `FEWEST_LATE` late
   requests in the last `FAST_SECONDS`, no goal is missed. Alerts on burn rates compare a short and a long window in the
   same way (Beyer et al., The Site Reliability Workbook, 2018, chapter 5).
3. Requests that still wait in routers, longer than the TTFT goal, count as late too. Their number is estimated: the
   ages of waiting requests are assumed to be evenly spread between 0 and the age of the oldest one.
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
"""Number of standard errors by which the late requests of the last `FAST_SECONDS` must exceed the number that a goal allows.
A smaller excess may be chance, so the goal does not count as missed."""

UNSPENT = 0.5
"""`Attainment.unspent` is true only if the number of late requests is at most this share of the number that the goals
allow."""

FEWEST_LATE = 2.0
"""With fewer late requests than this in the last `FAST_SECONDS`, no goal counts as missed: at low traffic, a single late
request is chance."""


class _Latencies(Struct, frozen=True):
    """Holds the numbers of measured (`counts`) and late requests of one window, each as a pair for TTFT and TPOT."""

    ended: int
    counts: tuple[float, float]
    late: tuple[float, float]
    refused: int  # number of arrivals that routers refused because of too little capacity


class Attainment:
    """Counts how many recent requests missed the TTFT and TPOT goals, and decides whether these are too many (rules 1 to 3)."""

    def __init__(self, goals: PlanGoals) -> None:
        self._goals = goals
        self._windows: deque[_Latencies] = deque()
        self._waiting = 0.0  # estimated number of waiting requests that are late already (rule 3)

    def absorb(self, demand: DemandWindow) -> None:
        """Add the requests of the next window, and drop windows older than `SLOW_SECONDS`.

        The caller must have checked the window by `fleet.planner.decisions.demand_doubts`.
        """
        goal = self._goals.ttft_seconds
        oldest = demand.oldest_seconds
        self._waiting = demand.queued * (oldest - goal) / oldest if oldest > goal else 0.0
        ttft, tpot = float(sum(demand.ttft)), float(sum(demand.tpot))
        late = (ttft - within(demand.ttft, goal), tpot - within(demand.tpot, self._goals.tpot_seconds))
        self._windows.append(_Latencies(demand.ended, (ttft, tpot), late, demand.refused))
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
        """Return whether too many requests were late for the TTFT goal, or too many for the TPOT goal.

        Too many means: more late requests than the goal allows, in the last `FAST_SECONDS` and also in the last
        `SLOW_SECONDS`.
        """
        return any(
            all(
                (burn := self._burn(field, seconds, waiting)) is not None and burn[0] > burn[1]
                for seconds in (FAST_SECONDS, SLOW_SECONDS)
            )
            for field, waiting in ((0, self._waiting), (1, 0.0))
        )

    @property
    def unspent(self) -> bool:
        """Return whether hardly any request was late.

        This is the case if, for each goal, the number of late requests is at most the share `UNSPENT` of the number that
        the goal allows. It has to be so in the last `FAST_SECONDS` and also in the last `SLOW_SECONDS`.

        Return False if so few requests were measured in the last `SLOW_SECONDS` that a goal allows less than one late request.
        A request that was refused because of too little capacity counts as late, because routers refuse requests whose first
        token would come too late.
        """
        refused_lately, refused = self._refused(FAST_SECONDS), self._refused(SLOW_SECONDS)
        for field, waiting in ((0, self._waiting), (1, 0.0)):
            fast, slow = (self._burn(field, seconds, waiting) for seconds in (FAST_SECONDS, SLOW_SECONDS))
            if fast is None or slow is None or slow[1] < 1.0:
                return False
            if fast[0] + refused_lately > UNSPENT * fast[1] or slow[0] + refused > UNSPENT * slow[1]:
                return False
        return True

    def _refused(self, seconds: float) -> int:
        """Return the number of requests in the last `seconds` that were refused because of too little capacity."""
        since = self._windows[-1].ended - seconds * SECOND if self._windows else 0.0
        return sum(each.refused for each in self._windows if each.ended > since)

    def _misses(self, field: int, waiting: float) -> bool:
        fast = self._burn(field, FAST_SECONDS, waiting)
        if fast is None or fast[0] <= fast[1] + CHANCE * sqrt(fast[1]) or fast[0] < FEWEST_LATE:
            return False
        if fast[0] >= FAST_BURN * fast[1]:
            return True
        slow = self._burn(field, SLOW_SECONDS, waiting)
        return slow is not None and slow[0] > slow[1]

    def _burn(self, field: int, seconds: float, waiting: float) -> tuple[float, float] | None:
        """Return how many requests in the last `seconds` were late, and how many the goal allows to be late.

        Return None if there were no requests.
        """
        since = self._windows[-1].ended - seconds * SECOND if self._windows else 0.0
        recent = [each for each in self._windows if each.ended > since]
        count = sum(each.counts[field] for each in recent) + waiting
        if not count:
            return None
        late = sum(each.late[field] for each in recent) + waiting
        return late, (1.0 - self._goals.percentile) * count
