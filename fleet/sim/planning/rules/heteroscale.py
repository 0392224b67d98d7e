"""HeteroScale: a scaling rule that sizes decode pools by generated tokens per second, and prefill pools in a fixed ratio to them.

Source: arXiv 2508.19559. The wanted number of decode replicas is the number of ready ones, multiplied by r / t. Here r is
    the generated tokens per second of one instance, and t is the target for r. The number of prefill replicas is the
    number of decode replicas multiplied by a fixed ratio. Latency only corrects the result. If a P90 latency is above
    the share `latency_share` of its goal, no decode pool shrinks. If a P90 latency is above its goal, each decode pool
    that would not grow otherwise grows by one replica, if all its replicas are ready. Pools with the role `both` are
    sized like decode pools.
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation, PoolName
from fleet.planner.rule_settings import IntervalSeconds
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext
from fleet.sim.planning.rules.observed_load import ObservedLoad, Stabilised, ready_of, wanted_of


class HeteroScaleRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of HeteroScale's scaling rule."""

    target: Positive = 0.7
    """Target for the generated tokens per second of an instance, as a share of the tokens per second that the instance can
    generate within the TPOT goal."""

    ratio: NotNegative = 0.0
    """Number of prefill replicas for one decode replica; 0: the ratio at the beginning of the replay."""

    tolerance: NotNegative = 0.1
    window_seconds: Positive = 60.0
    latency_share: NotNegative = 0.8
    """If P90 TTFT or P90 TPOT is above this share of its goal, no decode pool shrinks."""

    interval_seconds: IntervalSeconds = 15.0
    down_seconds: NotNegative = 120.0

    def open(self, context: RuleContext) -> "_HeteroScale":
        return _HeteroScale(self, context)


class _HeteroScale:
    def __init__(self, settings: HeteroScaleRule, context: RuleContext) -> None:
        self.interval = Nanos(round(settings.interval_seconds * SECOND))
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        drivers = [pool for pool in context.pools if pool.role is not Role.PREFILL]
        self._down: dict[PoolName, Stabilised] = {pool.name: Stabilised(settings.down_seconds) for pool in drivers}
        self._ratio = settings.ratio

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        before = wanted_of(seen)
        if not self._ratio:
            self._ratio = self._first_ratio(before)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=before, reason=DecisionReason.NO_SIGNAL)
        late = self._lateness()
        replicas = {**before}
        for name, down in self._down.items():
            wanted = self._proportional(name, before[name], seen)
            if late > 1 and wanted <= before[name] == ready_of(seen, name):
                wanted = before[name] + 1
            elif late > self._settings.latency_share:
                wanted = max(wanted, before[name])
            highest = down.highest(now, wanted)
            replicas[name] = self._context.bounded(name, max(wanted, min(highest, before[name])))
        decodes = sum(replicas[name] for name in self._down)
        for pool in self._context.by_role(Role.PREFILL):
            replicas[pool.name] = self._context.bounded(pool.name, ceil(self._ratio * decodes))
        grows = any(replicas[name] > before[name] for name in replicas)
        reason = DecisionReason.LOAD_UP if grows else DecisionReason.WITHIN_BAND
        return PlanDecision(at=now, replicas=replicas, reason=reason, numbers={"late": late, "ratio": self._ratio})

    def _first_ratio(self, wanted: dict[PoolName, int]) -> float:
        decodes = sum(wanted[name] for name in self._down)
        prefills = sum(wanted[pool.name] for pool in self._context.by_role(Role.PREFILL))
        return prefills / max(1, decodes)

    def _proportional(self, name: PoolName, before: int, seen: Observation) -> int:
        settings, ready = self._settings, ready_of(seen, name)
        windows = self._load.recent(settings.window_seconds)
        span = sum(window.seconds for window in windows)
        tokens = sum(window.answer_tokens for window in windows) / span / len(self._down)
        most = self._context.rate(name, self._load.shape) * self._load.shape.answer_tokens
        ratio = tokens / (ready * most * settings.target)
        return before if abs(ratio - 1) <= settings.tolerance else ceil(ready * ratio)

    def _lateness(self) -> float:
        """Divide P90 TTFT and P90 TPOT by their goals, and return the larger ratio."""
        ttft, tpot = self._load.latencies(self._settings.window_seconds, 0.9)
        goals = self._context.goals
        return max((ttft or 0.0) / goals.ttft_seconds, (tpot or 0.0) / goals.tpot_seconds)
