"""WVA queueing: the queueing model of llm-d's Workload Variant Autoscaler, which sizes pools by mean latencies.

Source: llm-d-workload-variant-autoscaler, queueing model analyzer. A replica is a state-dependent M/M/1/K queue. With b
requests in the batch, a replica completes b / (prefill(b) + O decode(b)) requests per second. Here O is the answer length,
prefill(b) is the time to compute b prompts, and decode(b) is the time of a decode step. A bisection finds the highest
rate of arrivals at which the mean TTFT and the mean TPOT of one replica keep their goals. The wanted number of replicas
is the observed rate divided by this highest rate. The original estimates step times by a Kalman filter. This module
takes them from the pool's profile, which makes the rule better than the original.
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision, PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation
from fleet.planner.rule_settings import IntervalSeconds
from fleet.sim.planning.capacity import TrafficShape
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext
from fleet.sim.planning.rules.observed_load import ObservedLoad, Stabilised, wanted_of

HALVINGS = 20
QUEUE_FACTOR = 4
"""Number of requests that may wait for each place in the batch. This number determines K, the capacity of the queue. If the
batch has only one place, ten times this number may wait in addition."""


class QueueingRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the scaling rule with WVA's queueing model."""

    interval_seconds: IntervalSeconds = 30.0
    rate_seconds: Positive = 60.0
    """Seconds over which the rate of arrivals is measured."""

    margin: Positive = 1.0
    """Factor by which the observed rate is multiplied before the number of replicas is computed from it."""

    down_seconds: NotNegative = 120.0

    def open(self, context: RuleContext) -> "_Queueing":
        return _Queueing(self, context)


class _Queueing:
    def __init__(self, settings: QueueingRule, context: RuleContext) -> None:
        self.interval = Nanos(round(settings.interval_seconds * SECOND))
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        self._down = {pool.name: Stabilised(settings.down_seconds) for pool in context.pools}

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        before = wanted_of(seen)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=before, reason=DecisionReason.NO_SIGNAL)
        rate = self._load.rate(self._settings.rate_seconds) * self._settings.margin
        replicas, numbers = {**before}, {"rate": rate}
        for pool in self._context.pools:
            numbers[f"{pool.name} rate"] = most = self._highest_rate(pool)
            wanted = ceil(rate / most)
            highest = self._down[pool.name].highest(now, wanted)
            replicas[pool.name] = self._context.bounded(pool.name, max(wanted, min(highest, before[pool.name])))
        grows = any(replicas[name] > before[name] for name in replicas)
        reason = DecisionReason.LOAD_UP if grows else DecisionReason.WITHIN_BAND
        return PlanDecision(at=now, replicas=replicas, reason=reason, numbers=numbers)

    def _highest_rate(self, pool: PlannedPool) -> float:
        """Return the highest rate of arrivals, in requests per second, at which one replica keeps the goals for both mean latencies."""
        shape = self._load.shape
        rates = self._completion_rates(pool, shape)
        low, high = 0.0, max(rates)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self._keeps(pool, shape, rates, middle) else (low, middle)
        return max(low, 1e-6)

    def _completion_rates(self, pool: PlannedPool, shape: TrafficShape) -> list[float]:
        """Return a list: the requests per second that one replica completes with 1, 2, … requests in the batch.

        For a prefill pool, the list has only the first value, because a prefill replica computes one prompt after the other.
        """
        capacity = self._context.capacities[pool.name]
        prefill = 0.0 if pool.role is Role.DECODE else capacity.prefill_seconds(shape)
        if pool.role is Role.PREFILL:
            return [1 / prefill]
        answer = max(1.0, shape.answer_tokens)
        most = capacity.most_running(shape)
        return [
            batch / (batch * prefill + answer * capacity.step_seconds(shape, batch)) for batch in range(1, most + 1)
        ]

    def _keeps(self, pool: PlannedPool, shape: TrafficShape, rates: list[float], rate: float) -> bool:
        """Return True if one replica keeps the goals for mean TTFT and mean TPOT when `rate` requests arrive per second."""
        goals, capacity = self._context.goals, self._context.capacities[pool.name]
        most = len(rates)
        weight, total, in_batch, waiting = 1.0, 1.0, 0.0, 0.0
        for count in range(1, most * (1 + QUEUE_FACTOR) + (QUEUE_FACTOR * 10 if most == 1 else 0) + 1):
            weight *= rate / rates[min(count, most) - 1]
            total += weight
            in_batch += weight * min(count, most)
            waiting += weight * max(0, count - most)
            if total > 1e200:  # the queue diverges: it is full all the time
                return False
        wait = waiting / total / rate
        batch = max(1.0, in_batch / total)
        prefill = 0.0 if pool.role is Role.DECODE else capacity.prefill_seconds(shape)
        if wait + prefill > goals.ttft_seconds:
            return False
        if pool.role is Role.PREFILL:
            return True
        delays = batch * prefill / max(1.0, shape.answer_tokens)
        return capacity.step_seconds(shape, batch) + delays <= goals.tpot_seconds
