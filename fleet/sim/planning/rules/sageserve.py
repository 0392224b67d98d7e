"""SageServe: a scaling rule that plans each hour by forecasts, and adds or removes single replicas by memory use in between.

Source: arXiv 2502.14617 and its published simulator, variants UT and UA. At each planning instant, the planned number
of replicas is the smallest one whose throughput is enough for the forecast rate. Between two plans, one replica is
added if memory use is above 0.5 and the pool is smaller than planned. One replica is removed if memory use is below
0.25 and the pool is larger than planned. In two cases, one replica is added even if the pool then exceeds the plan:
memory use is above 0.9, or the rate of the last minute is more than five times the forecast. While replicas are
starting, none is added or removed. In this module, the forecast is the present rate, plus its growth since the previous
plan if it has grown.
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
from fleet.sim.planning.rules.observed_load import ObservedLoad, wanted_of


class SageServeRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of SageServe's scaling rule."""

    plan_seconds: Positive = 600.0
    """Seconds between two plans. The paper plans once an hour; a trace that compresses a day needs shorter intervals."""

    margin: Positive = 1.1
    up: NotNegative = 0.5
    down: NotNegative = 0.25
    override: NotNegative = 0.9
    surge: Positive = 5.0
    step_seconds: IntervalSeconds = 15.0

    def open(self, context: RuleContext) -> "_SageServe":
        return _SageServe(self, context)


class _SageServe:
    def __init__(self, settings: SageServeRule, context: RuleContext) -> None:
        self.interval = Nanos(round(settings.step_seconds * SECOND))
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        self._planned: dict[PoolName, int] = {}
        self._next_plan = Nanos(0)
        self._forecast = self._last_rate = 0.0

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        before = wanted_of(seen)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=before, reason=DecisionReason.NO_SIGNAL)
        if now >= self._next_plan:
            self._plan(now)
        replicas = {**before}
        for pool in self._context.pools:
            replicas[pool.name] = self._stepped(pool, before[pool.name], seen)
        grows = any(replicas[name] > before[name] for name in replicas)
        reason = DecisionReason.FORECAST_UP if grows else DecisionReason.WITHIN_BAND
        return PlanDecision(at=now, replicas=replicas, reason=reason, numbers={"forecast": self._forecast})

    def _plan(self, now: Nanos) -> None:
        settings = self._settings
        rate = self._load.rate(min(300.0, settings.plan_seconds))
        trend = rate - self._last_rate if self._last_rate else 0.0
        self._last_rate, self._forecast = rate, max(rate, rate + trend)
        for pool in self._context.pools:
            capacity = self._context.rate(pool.name, self._load.shape)
            self._planned[pool.name] = self._context.bounded(
                pool.name, ceil(settings.margin * self._forecast / capacity)
            )
        self._next_plan = Nanos(now + round(settings.plan_seconds * SECOND))

    def _stepped(self, pool: PlannedPool, before: int, seen: Observation) -> int:
        settings, planned, used = self._settings, self._planned[pool.name], self._used(pool)
        present = seen.pool(pool.name)
        surges = self._load.rate(60.0) > settings.surge * self._forecast > 0
        wanted = before
        if present is not None and present.pending:
            return self._context.bounded(pool.name, before)
        if used > settings.override or surges or (used > settings.up and before < planned):
            wanted = before + 1
        elif used < settings.down and before > planned:
            wanted = before - 1
        return self._context.bounded(pool.name, wanted)

    def _used(self, pool: PlannedPool) -> float:
        """Return the use of a pool, which `_stepped` compares with the limits `up`, `down` and `override`.

        For a decode pool, the use is the used share of KV memory. For a prefill pool, it is the time to compute the
        prompts that wait on one replica, divided by the TTFT goal. For a pool with the role `both`, it is the larger
        one of these two values. Without workers, it is 0.
        """
        workers = self._load.workers(pool.name)
        if not workers:
            return 0.0
        memory = sum(worker.kv_used for worker in workers) / len(workers)
        if pool.role is Role.DECODE:
            return memory
        own = self._context.capacities[pool.name].prefill_seconds(self._load.shape)
        ahead = sum(worker.waiting for worker in workers) + self._load.queued
        if pool.role is Role.PREFILL:
            ahead += sum(worker.running for worker in workers)
            return ahead / len(workers) * own / self._context.goals.ttft_seconds
        return max(memory, ahead / len(workers) * own / self._context.goals.ttft_seconds)
