"""Chiron: a scaling rule that sizes pools by the back-pressure of interactive requests.

Source: arXiv 2501.08090, as SageServe's simulator implements it. The paper defines the interactive back-pressure of a
    pool as the share of its instances that have interactive work. If this pressure is above the target of 0.6 (`pressure`)
    and all wanted replicas of the pool serve, the pool grows in proportion to the pressure. The pool may lose one replica
    in an interval in which the pressure is below the target by more than the share `band` of the target. With continuous
    batching, every instance has some request all the time. So in this module, an instance counts as having work only if
    it has more requests than the share `busy` of those that it can run within the goals. Batch work is not simulated.
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision, PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation
from fleet.planner.rule_settings import IntervalSeconds
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext
from fleet.sim.planning.rules.observed_load import ObservedLoad, Stabilised, wanted_of


class ChironRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of Chiron's scaling rule."""

    pressure: Positive = 0.6
    busy: NotNegative = 0.5
    """An instance counts as busy if it has more than this share of the requests that it can run within the goals."""

    interval_seconds: IntervalSeconds = 15.0
    band: NotNegative = 0.2
    """Share of the target by which the pressure must be below the target before a pool shrinks."""

    down_seconds: NotNegative = 60.0

    def open(self, context: RuleContext) -> "_Chiron":
        return _Chiron(self, context)


class _Chiron:
    def __init__(self, settings: ChironRule, context: RuleContext) -> None:
        self.interval = Nanos(round(settings.interval_seconds * SECOND))
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        self._down = {pool.name: Stabilised(settings.down_seconds) for pool in context.pools}

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        before = wanted_of(seen)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=before, reason=DecisionReason.NO_SIGNAL)
        replicas, numbers = {**before}, {}
        for pool in self._context.pools:
            numbers[f"{pool.name} pressure"] = pressure = self._pressure(pool)
            present = seen.pool(pool.name)
            wanted = before[pool.name]
            if pressure > self._settings.pressure and not (present is not None and present.pending):
                wanted = ceil(wanted * pressure / self._settings.pressure)
            elif pressure < self._settings.pressure * (1 - self._settings.band):
                wanted -= 1
            highest = self._down[pool.name].highest(now, wanted)
            replicas[pool.name] = self._context.bounded(pool.name, max(wanted, min(highest, before[pool.name])))
        grows = any(replicas[name] > before[name] for name in replicas)
        reason = DecisionReason.LOAD_UP if grows else DecisionReason.WITHIN_BAND
        return PlanDecision(at=now, replicas=replicas, reason=reason, numbers=numbers)

    def _pressure(self, pool: PlannedPool) -> float:
        """Return the number of busy instances divided by the number of instances; 0 if there are none.

        Requests that wait in the router are added as the number of instances that they would fill, except for decode pools.
        """
        workers = self._load.workers(pool.name)
        if not workers:
            return 0.0
        context, shape = self._context, self._load.shape
        capacity = context.capacities[pool.name]
        if pool.role is Role.PREFILL:
            most = max(1.0, context.goals.ttft_seconds / capacity.prefill_seconds(shape))
        else:
            most = float(capacity.running_within(shape, context.goals.tpot_seconds))
        busy = sum(worker.running + worker.waiting > self._settings.busy * most for worker in workers)
        missing = self._load.queued / most if pool.role is not Role.DECODE else 0.0
        return (busy + missing) / len(workers)
