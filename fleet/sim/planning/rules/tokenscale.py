"""TokenScale: token velocities of each stage.

Source: arXiv 2512.03416. Prefill replicas are the incoming prompt tokens per second over the velocity of one replica, which is the smaller of
what it computes and what its network sends. Decode replicas are the tokens that have to be released per second over what one replica
releases at the goal for the TPOT. Convertible decoders take bursts of prompts until new instances serve: here the router's conditional
disaggregation does that for short prompts, so only the velocities are compared.
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.planner.decisions import DecisionReason, PlanDecision
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation
from fleet.sim.planning.rule_context import RuleContext
from fleet.sim.planning.rules.observed_load import ObservedLoad, Stabilised, wanted_of


class TokenScaleRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of TokenScale."""

    velocity_seconds: float = 15.0
    """Span over which velocities are measured; the paper's point is that it is short."""

    use: float = 0.85
    """Share of a replica's velocity that is planned with."""

    interval_seconds: float = 5.0
    down_seconds: float = 60.0

    def open(self, context: RuleContext) -> "_TokenScale":
        return _TokenScale(self, context)


class _TokenScale:
    def __init__(self, settings: TokenScaleRule, context: RuleContext) -> None:
        self.interval = Nanos(round(settings.interval_seconds * SECOND))
        self._settings, self._context = settings, context
        self._load = ObservedLoad()
        self._down = {pool.name: Stabilised(settings.down_seconds) for pool in context.pools}

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        before = wanted_of(seen)
        if not self._load.add(demand):
            return PlanDecision(at=now, replicas=before, reason=DecisionReason.NO_SIGNAL)
        rate = self._load.rate(self._settings.velocity_seconds)
        replicas = {**before}
        for pool in self._context.pools:
            velocity = self._context.rate(pool.name, self._load.shape) * self._settings.use
            wanted = ceil(rate / velocity)
            highest = self._down[pool.name].highest(now, wanted)
            replicas[pool.name] = self._context.bounded(pool.name, max(wanted, min(highest, before[pool.name])))
        grows = any(replicas[name] > before[name] for name in replicas)
        reason = DecisionReason.LOAD_UP if grows else DecisionReason.WITHIN_BAND
        return PlanDecision(at=now, replicas=replicas, reason=reason, numbers={"rate": rate})
