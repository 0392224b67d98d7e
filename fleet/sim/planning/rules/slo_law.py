"""SLO law of llm-d: the number of replicas is proportional to the tail latency divided by its goal.

Source: llm-d-autoscaling, RFC 1018 and pull request 1376. Each pool has a signal s. It is the P90 latency of the last
45 s divided by its goal, but at most 2; without requests it is 0. If the oldest waiting request is older than the P90
TTFT, the age of this request replaces the P90 TTFT. Prefill pools use the TTFT, decode pools the TPOT, and pools with the
role `both` use the larger ratio.

A pool has n replicas, of which the share r is ready. If s has been above 0.55 for 30 s, the pool grows to
n + ceil(n (s r / 0.55 - 1)) replicas. It grows at most once in 60 s, by at most n or four replicas, whichever is more.
If s has been below 0.40 for 180 s, and n (1 - s / 0.40) is at least 1, the pool loses one replica. It does so at most
once in 120 s.
"""

from math import ceil, floor

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision, PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation, PoolName
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext, Share
from fleet.sim.planning.rules.observed_load import ObservedLoad, ready_of, wanted_of


class SloLawRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of llm-d's SLO law."""

    up: Positive = 0.55
    down: Positive = 0.40
    share: Share = 0.9
    """Percentile of TTFT and TPOT from which the signal is computed, as a share: 0.9 is P90."""

    span_seconds: Positive = 45.0
    up_after_seconds: NotNegative = 30.0
    up_every_seconds: NotNegative = 60.0
    down_after_seconds: NotNegative = 180.0
    down_every_seconds: NotNegative = 120.0

    def open(self, context: RuleContext) -> "_SloLaw":
        return _SloLaw(self, context)


class _PoolTimers:
    """Holds, for one pool, the latest instant of each of four events.

    The events are: the signal was not above the upper limit, the signal was not below the lower limit, the pool grew,
    and the pool shrank.
    """

    def __init__(self) -> None:
        self.not_above = self.not_below = Nanos(0)
        self.grew = self.shrank = Nanos(-(10**15))


class _SloLaw:
    def __init__(self, settings: SloLawRule, context: RuleContext) -> None:
        self.interval = Nanos(15 * SECOND)
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        self._timers: dict[PoolName, _PoolTimers] = {pool.name: _PoolTimers() for pool in context.pools}

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        before = wanted_of(seen)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=before, reason=DecisionReason.NO_SIGNAL)
        replicas, signals = {**before}, {}
        for pool in self._context.pools:
            signals[pool.name] = signal = self._signal(pool)
            replicas[pool.name] = self._wanted(now, pool, signal, seen, before[pool.name])
        grows = any(replicas[name] > before[name] for name in replicas)
        reason = DecisionReason.LOAD_UP if grows else DecisionReason.WITHIN_BAND
        message = ", ".join(f"{name} is at {signal:.2f} of its goal" for name, signal in signals.items())
        return PlanDecision(
            at=now,
            replicas=replicas,
            reason=reason,
            message=message,
            numbers={str(name): signal for name, signal in signals.items()},
        )

    def _signal(self, pool: PlannedPool) -> float:
        ttft, tpot = self._load.latencies(self._settings.span_seconds, self._settings.share)
        goals, ratios = self._context.goals, [0.0]
        if pool.role is not Role.DECODE:
            late = 0.0 if self._load.last is None else self._load.last.oldest_seconds
            ratios.append(max(ttft or 0.0, late) / goals.ttft_seconds)
        if pool.role is not Role.PREFILL:
            ratios.append((tpot or 0.0) / goals.tpot_seconds)
        return min(2.0, max(ratios))

    def _wanted(self, now: Nanos, pool: PlannedPool, signal: float, seen: Observation, before: int) -> int:
        settings, timers = self._settings, self._timers[pool.name]
        if signal <= settings.up:
            timers.not_above = now
        if signal >= settings.down:
            timers.not_below = now
        if (now - timers.not_above) >= settings.up_after_seconds * SECOND:
            if now - timers.grew < settings.up_every_seconds * SECOND:
                return before
            ready = min(1.0, ready_of(seen, pool.name) / before) if before else 1.0
            grown = before + max(0, ceil(before * (signal * ready / settings.up - 1)))
            if (wanted := self._context.bounded(pool.name, min(grown, before + max(before, 4)))) > before:
                timers.grew = now
                return wanted
        if (now - timers.not_below) >= settings.down_after_seconds * SECOND:
            if now - timers.shrank < settings.down_every_seconds * SECOND:
                return before
            if floor(before * (1 - signal / settings.down)) >= 1:
                timers.shrank = now
                return self._context.bounded(pool.name, before - 1)
        return self._context.bounded(pool.name, before)
