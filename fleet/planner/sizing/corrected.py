"""Corrected capacity: corrects the predictions of a capacity model by measured latencies and missed goals. Pure.

Rules:

1. If the measured latency is `f` times the predicted one, the predicted latency has to be below the goal divided by
   `f`. `f` is limited to the range from `LEAST_FACTOR` to `MOST_FACTOR`. The lower limit is near 1, because an engine
   that is faster than predicted at low load may not be faster at high load.
2. A phase may miss a goal while it uses only a part of its predicted capacity. From then on, the planner uses a little
   less than this part, but at least `LEAST_SHARE` of the capacity. The usable share slowly grows back to 1, with the
   time constant `FADING_SECONDS`.
3. A goal is out of reach if even a lone request misses it in every pool. Pools are then sized for `RELAXED` times the
   best possible value.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf, log

from fleet.core.roles import Role
from fleet.planner.decisions import PlanCondition, PlanConditionType, PlanGoals, PlannedPool
from fleet.planner.sizing.capacity import CapacityModel, LatencyCorrection, OfferedLoad

LEAST_FACTOR = 0.8
MOST_FACTOR = 4.0
FACTOR_GRID = 1.05
LEAST_SHARE = 0.5
BELOW_MISS = 0.95
FADING_SECONDS = 6 * 3600.0
RELAXED = 1.25
ANY_LATENCY = 1e6
"""Goal in seconds that every request keeps."""

SMALLEST_RATE = 1e-3
"""A rate in requests per second that is so low that each request is alone in its engine."""


class CorrectedCapacity:
    """Predicts how many requests pools serve within the goals, and corrects the predictions by measurements."""

    def __init__(self, model: CapacityModel, goals: PlanGoals, pools: Sequence[PlannedPool]) -> None:
        self._model = model
        self._goals = goals
        self._pools = tuple(pools)
        self.ttft = LatencyCorrection()
        self.tpot = LatencyCorrection()
        # for each phase that missed a goal: the usable share of its capacity, and the instant of the miss
        self._misses: dict[Role, tuple[float, float]] = {}
        self._elapsed = 0.0
        self._goals_of: tuple[OfferedLoad, PlanGoals] | None = None

    def advance(self, elapsed: float) -> None:
        """Set the seconds since the start of the planner, because the effect of missed goals fades with time."""
        self._elapsed = elapsed

    def highest_rate(self, pool: PlannedPool, load: OfferedLoad, replicas: int) -> float:
        """Return the highest rate, in requests per second, that the replicas of a pool serve within the goals."""
        goals = self._model_goals(load)
        return self.used_share(pool.role) * self._model.highest_rate(pool, load, goals, replicas)

    def throughput(self, pool: PlannedPool, load: OfferedLoad, replicas: int) -> float:
        """Return the highest rate, in requests per second, that the replicas of a pool serve if latencies do not matter."""
        goals = PlanGoals(ttft_seconds=ANY_LATENCY, tpot_seconds=ANY_LATENCY, percentile=self._goals.percentile)
        return self._model.highest_rate(pool, load, goals, replicas)

    def remember(self, phase: Role, share: float) -> None:
        """Remember that a phase missed its goals when it used this share of its predicted capacity, and limit its usable share (rule 2)."""
        self._misses[phase] = (min(self.used_share(phase), max(LEAST_SHARE, BELOW_MISS * share)), self._elapsed)

    def learn(
        self, load: OfferedLoad, rate: float, ready: Mapping[PlannedPool, int], ttft: float | None, tpot: float | None
    ) -> Iterator[str]:
        """Learn from the measured TTFT and TPOT at the percentile of the goals; None means not measured.

        Yield the name of each latency whose predictions have become wrong.
        """
        predicted = self.predicted(load, rate, ready)
        self._goals_of = None
        if ttft is not None and self.ttft.observe(predicted[0], ttft):
            yield "ttft"
        if tpot is not None and self.tpot.observe(predicted[1], tpot):
            yield "tpot"

    def out_of_reach(self, load: OfferedLoad) -> Iterator[PlanCondition]:
        """Yield a condition for each goal that no pool can keep; the condition names the best possible value."""
        best = self._best(load)
        for field, reachable in (("ttft_seconds", best[0]), ("tpot_seconds", best[1])):
            goal: float = getattr(self._goals, field)
            if reachable > goal:
                yield PlanCondition(
                    type=PlanConditionType.GOAL_OUT_OF_REACH,
                    field=f"goals.{field}",
                    message=f"goals.{field}: {goal:g} s for {self._goals.percentile:.0%} is out of reach; the best is {reachable:.3g} s",
                )

    def _best(self, load: OfferedLoad) -> tuple[float, float]:
        """Return the lowest corrected TTFT and TPOT that any pool reaches for a lone request."""
        ttft = tpot = inf
        for each in self._pools:
            alone = self._model.latency(each, load, self._goals.percentile, 1, SMALLEST_RATE)
            if each.role is not Role.DECODE:
                ttft = min(ttft, alone.ttft * self._factor(self.ttft, alone.ttft))
            if each.role is not Role.PREFILL:
                tpot = min(tpot, alone.tpot * self._factor(self.tpot, alone.tpot))
        return ttft, tpot

    def _model_goals(self, load: OfferedLoad) -> PlanGoals:
        """Return the goals that the uncorrected model has to keep.

        The goals for the last load are cached until new measurements are learnt.
        """
        if self._goals_of is not None and self._goals_of[0] == load:
            return self._goals_of[1]
        ttft, tpot = self._best(load)
        goals = PlanGoals(
            ttft_seconds=self._model_goal(self.ttft, self._goals.ttft_seconds, ttft),
            tpot_seconds=self._model_goal(self.tpot, self._goals.tpot_seconds, tpot),
            percentile=self._goals.percentile,
        )
        self._goals_of = (load, goals)
        return goals

    def _model_goal(self, correction: LatencyCorrection, goal: float, best: float) -> float:
        goal = goal if best <= goal else RELAXED * best
        return goal / self._factor(correction, goal)

    @staticmethod
    def _factor(correction: LatencyCorrection, predicted: float) -> float:
        factor = min(max(correction.factor(predicted), LEAST_FACTOR), MOST_FACTOR)
        return FACTOR_GRID ** round(log(factor) / log(FACTOR_GRID))

    def used_share(self, role: Role) -> float:
        """Return the usable share of the predicted capacity of a role; it is below 1 after missed goals (rule 2)."""
        phases = (Role.PREFILL, Role.DECODE) if role is Role.BOTH else (role,)
        shares = [self._misses[phase] for phase in phases if phase in self._misses]
        return min(
            (1.0 - (1.0 - share) * exp((since - self._elapsed) / FADING_SECONDS) for share, since in shares),
            default=1.0,
        )

    def predicted(self, load: OfferedLoad, rate: float, ready: Mapping[PlannedPool, int]) -> tuple[float, float]:
        """Return the highest TTFT and the highest TPOT of all pools, as the model predicts them without correction.

        The pools of a phase are assumed to share the rate in proportion to their capacities. A latency is 0 if its phase has no
        ready replicas, or none that can keep the goals.
        """
        ttft = tpot = 0.0
        for phase in (Role.PREFILL, Role.DECODE):
            pools = {pool: count for pool, count in ready.items() if pool.role in {phase, Role.BOTH}}
            capacity = {pool: self.highest_rate(pool, load, count) for pool, count in pools.items()}
            total = sum(capacity.values())
            for pool, count in pools.items():
                if not total:
                    continue
                latency = self._model.latency(pool, load, self._goals.percentile, count, rate * capacity[pool] / total)
                ttft, tpot = max(ttft, latency.ttft), max(tpot, latency.tpot)
        return ttft, tpot
