"""WVA saturation: llm-d's Workload Variant Autoscaler, version 2, which compares tokens in use with token capacity.

Source: llm-d-workload-variant-autoscaler, saturation analyzer V2. The capacity of a replica is a number of tokens: the
smaller one of two numbers. The first is 0.80 of the tokens for which its KV cache has room. The second is the tokens of
a full batch, N (I + O / 2). I and O are the mean lengths of prompts and answers. N = min(B O / (I + O), S) is the
number of running requests. B is the maximum number of tokens in a step, and S is the maximum number of requests in a batch.

The demand of a pool is the tokens in its KV caches, plus the uncached prompt tokens and the answer of each queued
request. The pool grows if demand / 0.85 exceeds the capacity of all requested replicas. It shrinks if fewer replicas
have the capacity for demand / 0.70. For a prefill pool, the demand is the prompt tokens of its requests, and the
capacity of a replica is the prompt tokens that it computes within the TTFT goal.
"""

from math import ceil, floor

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision, PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation
from fleet.planner.rule_settings import IntervalSeconds
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext, Share
from fleet.sim.planning.rules.observed_load import ObservedLoad, Stabilised, wanted_of


class SaturationRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of WVA's saturation rule."""

    kv_share: Share = 0.80
    up: Positive = 0.85
    down: Positive = 0.70
    interval_seconds: IntervalSeconds = 30.0
    down_seconds: NotNegative = 120.0

    def open(self, context: RuleContext) -> "_Saturation":
        return _Saturation(self, context)


class _Saturation:
    def __init__(self, settings: SaturationRule, context: RuleContext) -> None:
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
            capacity, used = self._capacity(pool), self._demand(pool)
            numbers[f"{pool.name} tokens"] = used
            required = used / self._settings.up - before[pool.name] * capacity
            spare = before[pool.name] * capacity - used / self._settings.down
            wanted = before[pool.name]
            if required > 0:
                wanted += ceil(required / capacity)
            elif spare > 0:
                wanted -= floor(spare / capacity)
            highest = self._down[pool.name].highest(now, wanted)
            bounded = max(wanted, min(highest, before[pool.name]))
            replicas[pool.name] = self._context.bounded(pool.name, bounded)
        grows = any(replicas[name] > before[name] for name in replicas)
        reason = DecisionReason.LOAD_UP if grows else DecisionReason.WITHIN_BAND
        return PlanDecision(at=now, replicas=replicas, reason=reason, numbers=numbers)

    def _capacity(self, pool: PlannedPool) -> float:
        """Return the capacity of one replica of a pool, in tokens (see the module's description)."""
        shape, capacity = self._load.shape, self._context.capacities[pool.name]
        if pool.role is Role.PREFILL:
            return self._context.goals.ttft_seconds / capacity.prefill_seconds(shape) * shape.prompt_tokens
        batch, limits = shape.prompt_tokens + shape.answer_tokens, capacity.limits
        running = min(limits.step_tokens * shape.answer_tokens / batch, limits.max_running)
        compute = running * shape.context
        return max(1.0, min(self._settings.kv_share * capacity.kv_tokens, compute))

    def _demand(self, pool: PlannedPool) -> float:
        shape, capacity = self._load.shape, self._context.capacities[pool.name]
        workers = self._load.workers(pool.name)
        queued = sum(worker.waiting for worker in workers)
        if pool.role is not Role.DECODE:
            queued += self._load.queued
        if pool.role is Role.PREFILL:
            running = sum(worker.running for worker in workers)
            return (running + queued) * shape.prompt_tokens
        used = sum(worker.kv_used for worker in workers) * capacity.kv_tokens
        return used + queued * (shape.new_tokens + shape.answer_tokens)
