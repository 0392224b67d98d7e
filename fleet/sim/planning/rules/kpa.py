"""KPA: the concurrency rule of Knative's pod autoscaler, which users of AIBrix and KEDA run for LLM serving.

Source: Knative's autoscaling documentation; the tolerance and the delay are those of AIBrix. The wanted number is the
    mean number of requests in a pool, divided by the target for one replica. There is a stable mean over 60 s, and a
    panic mean over 6 s. A pool is in panic when the panic mean asks for at least twice the ready replicas, and for 60 s
    after that. A pool in panic takes the larger of the two numbers, and does not shrink; any other pool takes the number
    from the stable mean. Every pool shrinks only after a delay. Outside of a panic, differences of up to 10 % are ignored
    (the tolerance).
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision, PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation, PoolName
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext
from fleet.sim.planning.rules.observed_load import ObservedLoad, Stabilised, ready_of, wanted_of


class KpaRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the scaling rule that works like Knative's pod autoscaler."""

    target: Positive = 0.7
    """Target for the requests of one replica, as a share of the requests that it can run within the goals."""

    stable_seconds: Positive = 60.0
    panic_seconds: Positive = 6.0
    panic_factor: Positive = 2.0
    tolerance: NotNegative = 0.1
    down_seconds: NotNegative = 300.0

    def open(self, context: RuleContext) -> "_Kpa":
        return _Kpa(self, context)


class _Kpa:
    def __init__(self, settings: KpaRule, context: RuleContext) -> None:
        self.interval = Nanos(2 * SECOND)
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        self._down = {pool.name: Stabilised(settings.down_seconds) for pool in context.pools}
        self._panic_until: dict[PoolName, Nanos] = {}

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        before = wanted_of(seen)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=before, reason=DecisionReason.NO_SIGNAL)
        replicas = {**before}
        for pool in self._context.pools:
            replicas[pool.name] = self._wanted(now, pool, seen, before[pool.name])
        reason = DecisionReason.LOAD_UP if replicas != before else DecisionReason.WITHIN_BAND
        return PlanDecision(at=now, replicas=replicas, reason=reason)

    def _wanted(self, now: Nanos, pool: PlannedPool, seen: Observation, before: int) -> int:
        settings, ready = self._settings, ready_of(seen, pool.name)
        target = settings.target * self._most(pool)
        stable = ceil(self._concurrency(pool, settings.stable_seconds) / target)
        panic = ceil(self._concurrency(pool, settings.panic_seconds) / target)
        if panic >= settings.panic_factor * ready:
            self._panic_until[pool.name] = Nanos(now + round(settings.stable_seconds * SECOND))
        panics = self._panic_until.get(pool.name, Nanos(0)) > now
        wanted = max(stable, panic, before) if panics else stable
        if not panics and abs(wanted - before) <= settings.tolerance * before:
            wanted = before
        highest = self._down[pool.name].highest(now, wanted)
        return self._context.bounded(pool.name, max(wanted, min(highest, before)))

    def _most(self, pool: PlannedPool) -> float:
        """Return the number of requests that a replica of a pool can run within the goals.

        For a prefill pool, the TTFT goal limits this number. For other pools, the TPOT goal, the batch size and the KV
        memory limit it.
        """
        context, shape = self._context, self._load.shape
        if pool.role is Role.PREFILL:
            return max(1.0, context.goals.ttft_seconds / context.capacities[pool.name].prefill_seconds(shape))
        running = context.capacities[pool.name].running_within(shape, context.goals.tpot_seconds)
        return float(running)

    def _concurrency(self, pool: PlannedPool, seconds: float) -> float:
        """Return the mean number of requests in a pool over the last `seconds`.

        Requests that wait in the router count for each pool that computes prompts.
        """
        windows = self._load.recent(seconds)
        first = pool.role is not Role.DECODE
        total = 0
        for window in windows:
            total += sum(each.running + each.waiting for each in window.workers if each.pool == pool.name)
            total += window.queued * first
        return total / len(windows)
