"""HPA: a scaling rule that works like Kubernetes' Horizontal Pod Autoscaler, with the utilisation of each pool as its metric.

Source: the algorithm of the Kubernetes documentation with its default behaviour. Every 15 s the wanted number is the
number of ready replicas times utilisation divided by target; differences of up to 10 % are ignored. A pool shrinks only
to the highest number that was computed in the last 300 s. In 15 s a pool grows by at most 100 % or four replicas, whichever
is more. The utilisation of a replica that is starting counts as 0.
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision, PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext
from fleet.sim.planning.rules.observed_load import ObservedLoad, Stabilised, ready_of, wanted_of


class HpaRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the scaling rule that works like Kubernetes' HPA."""

    target: Positive = 0.6
    """Target for the utilisation of each pool, as a share from 0 to 1."""

    tolerance: NotNegative = 0.1
    window_seconds: Positive = 30.0
    """Seconds over which the utilisation of pools that compute prompts is measured. For decode pools, the last demand window counts."""

    down_seconds: NotNegative = 300.0
    """Seconds for which a lower need must last before a pool shrinks (HPA's stabilisation window)."""

    def open(self, context: RuleContext) -> "_Hpa":
        return _Hpa(self, context)


class _Hpa:
    def __init__(self, settings: HpaRule, context: RuleContext) -> None:
        self.interval = Nanos(15 * SECOND)
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        self._down = {pool.name: Stabilised(settings.down_seconds) for pool in context.pools}

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        replicas = wanted_of(seen)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=replicas, reason=DecisionReason.NO_SIGNAL)
        used = {}
        for pool in self._context.pools:
            used[pool.name] = utilisation = self._utilisation(pool, seen)
            replicas[pool.name] = self._wanted(now, pool, utilisation, seen)
        grows = any(replicas[name] > count for name, count in wanted_of(seen).items())
        reason = DecisionReason.LOAD_UP if grows else DecisionReason.WITHIN_BAND
        message = ", ".join(f"{name} is used to {share:.0%}" for name, share in used.items())
        return PlanDecision(
            at=now,
            replicas=replicas,
            reason=reason,
            message=message,
            numbers={str(name): share for name, share in used.items()},
        )

    def _wanted(self, now: Nanos, pool: PlannedPool, utilisation: float, seen: Observation) -> int:
        ready, before = ready_of(seen, pool.name), wanted_of(seen)[pool.name]
        ratio = utilisation / self._settings.target
        wanted = before if abs(ratio - 1) <= self._settings.tolerance else ceil(ready * ratio)
        if before > ready and ratio > 1 and ready * ratio <= before:
            wanted = (
                before  # do not shrink: the starting replicas are needed, because the ready ones are above the target
            )
        wanted = min(wanted, before + max(before, 4))
        highest = self._down[pool.name].highest(now, wanted)
        return self._context.bounded(pool.name, max(wanted, min(highest, before)))

    def _utilisation(self, pool: PlannedPool, seen: Observation) -> float:
        """Return the utilisation of a pool, from 0 to 1: its load, divided by the most that its ready replicas can take.

        For a decode pool, the load is the number of running requests; for other pools, it is the rate of served requests.
        """
        shape, ready = self._load.shape, ready_of(seen, pool.name)
        capacity = self._context.capacities[pool.name]
        if pool.role is Role.DECODE:
            most = capacity.running_within(shape, self._context.goals.tpot_seconds)
            running = sum(worker.running for worker in self._load.workers(pool.name))
            return min(1.0, running / (ready * most))
        served = self._load.served(self._settings.window_seconds)
        return min(1.0, served / (ready * self._context.rate(pool.name, shape)))
