"""Dynamo's planner: a scaling rule that sets a minimum by the forecast rate, and adds or removes single replicas by the load.

Source: ai-dynamo, `components/planner` of release 1.6. Every 180 s (a throughput tick), the minimum number of replicas
of a pool is computed: the forecast rate divided by the rate that one engine serves within the goals. The minimum
differs by at most eight from the present number of replicas. Every 5 s (a load tick), each pool whose replicas are all
ready is checked. One replica is added if the estimated latency of every engine of the pool exceeds the goal. One of N
replicas is removed if every engine would stay below 0.8 of the goal even with N / (N - 1) times its latency. For a
prefill engine, the latency is the waiting time of a prompt. Its goal is the TTFT goal less the time to compute the
prompt itself. For a decode engine, the latency is the TPOT. Latencies are estimated as means, not as tail percentiles.
In this module, the forecast continues the linear trend of the last throughput ticks.
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision, PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation, PoolName
from fleet.planner.rule_settings import IntervalSeconds
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext
from fleet.sim.planning.rules.observed_load import ObservedLoad, ready_of, wanted_of

MOST_STEP = 8
HISTORY = 5
"""Number of past throughput ticks from which the linear trend of the rate is computed."""


class DynamoRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the scaling rule of Dynamo's planner."""

    throughput_seconds: Positive = 180.0
    load_seconds: IntervalSeconds = 5.0
    sensitivity: NotNegative = 0.8
    """A replica is removed only if the estimated latencies would stay below this share of their goals without it."""

    margin: Positive = 1.0
    """Factor by which the forecast rate is multiplied before the minimum numbers of replicas are computed from it."""

    def open(self, context: RuleContext) -> "_Dynamo":
        return _Dynamo(self, context)


class _Dynamo:
    def __init__(self, settings: DynamoRule, context: RuleContext) -> None:
        self.interval = Nanos(round(settings.load_seconds * SECOND))
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        self._floor: dict[PoolName, int] = {pool.name: pool.least for pool in context.pools}
        self._next_throughput = Nanos(0)
        self._rates: list[float] = []

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        before = wanted_of(seen)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=before, reason=DecisionReason.NO_SIGNAL)
        if now >= self._next_throughput:
            self._throughput_tick(before)
            self._next_throughput = Nanos(now + round(self._settings.throughput_seconds * SECOND))
        replicas = {**before}
        for pool in self._context.pools:
            step = self._load_step(pool, seen) if before[pool.name] == ready_of(seen, pool.name) else 0
            replicas[pool.name] = self._context.bounded(
                pool.name, max(before[pool.name] + step, self._floor[pool.name])
            )
        grows = any(replicas[name] > before[name] for name in replicas)
        reason = DecisionReason.LOAD_UP if grows else DecisionReason.WITHIN_BAND
        return PlanDecision(
            at=now,
            replicas=replicas,
            reason=reason,
            numbers={f"{name} floor": float(count) for name, count in self._floor.items()},
        )

    def _throughput_tick(self, before: dict[PoolName, int]) -> None:
        self._rates = [*self._rates, self._load.rate(self._settings.throughput_seconds)][-HISTORY:]
        trend = (self._rates[-1] - self._rates[0]) / (len(self._rates) - 1) if len(self._rates) > 1 else 0.0
        rate = max(0.0, self._rates[-1] + trend) * self._settings.margin
        for pool in self._context.pools:
            wanted = ceil(rate / self._context.rate(pool.name, self._load.shape))
            limited = min(max(wanted, before[pool.name] - MOST_STEP), before[pool.name] + MOST_STEP)
            self._floor[pool.name] = self._context.bounded(pool.name, limited)

    def _load_step(self, pool: PlannedPool, seen: Observation) -> int:
        """Return the change of a pool's replicas (1, 0 or -1) that the estimated latencies of its engines demand."""
        workers = self._load.workers(pool.name)
        if not workers:
            return 0
        count = ready_of(seen, pool.name)
        queued = self._load.queued / count if pool.role is not Role.DECODE else 0.0
        loads = [self._relative_load(pool, worker.running, worker.waiting + queued) for worker in workers]
        if min(loads) > 1:
            return 1
        if count > 1 and max(loads) * count / (count - 1) < self._settings.sensitivity:
            return -1
        return 0

    def _relative_load(self, pool: PlannedPool, running: float, waiting: float) -> float:
        """Return the estimated latency of one engine divided by its goal. If the engine prefills and decodes, return the larger ratio.

        For prefills, the latency is the wait of a new prompt, and its goal is the TTFT goal less the time of the prompt's own prefill.
        If the engine decodes, the ratio is at least its number of requests divided by the most requests that it can run.
        """
        capacity, shape, goals = self._context.capacities[pool.name], self._load.shape, self._context.goals
        ratios = []
        if pool.role is not Role.DECODE:
            own = capacity.prefill_seconds(shape)
            ahead = waiting + (running if pool.role is Role.PREFILL else 0.0)
            ratios.append(ahead * own / max(goals.ttft_seconds - own, 0.1 * goals.ttft_seconds))
        if pool.role is not Role.PREFILL:
            ratios.append(capacity.step_seconds(shape, max(1.0, running + waiting)) / goals.tpot_seconds)
            ratios.append((running + waiting) / capacity.most_running(shape))
        return max(ratios)
