"""TokenScale: a scaling rule that divides the rate of tokens at each stage by the rate that one replica can process.

Source: arXiv 2512.03416, which calls these rates token velocities. In the paper, the number of prefill replicas is the
incoming prompt tokens per second, divided by the velocity of one replica: the tokens per second that it can compute, or
that its network can send if these are fewer. The number of decode replicas is the KV tokens per second that ending
requests release, divided by the velocity of a decode replica: the KV tokens per second that it releases at the TPOT
goal. This module expresses both velocities in requests per second (`RuleContext.rate`), and assumes that the network is
no limit.

In the paper, decode instances also compute prompts during a burst, until new instances serve (convertible decoders).
This module does not simulate them, because the router already lets decode workers compute short prompts.
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.planner.decisions import DecisionReason, PlanDecision
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation
from fleet.planner.rule_settings import IntervalSeconds
from fleet.sim.planning.rule_context import NotNegative, Positive, RuleContext
from fleet.sim.planning.rules.observed_load import ObservedLoad, Stabilised, wanted_of


class TokenScaleRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of TokenScale's scaling rule."""

    velocity_seconds: Positive = 15.0
    """Seconds over which the rate of arrivals is measured. The span is short, so that the rule follows bursts at once,
    as the paper demands."""

    use: Positive = 0.85
    """Share of a replica's velocity (the rate that it can process) with which the number of replicas is computed; the rest is a reserve."""

    interval_seconds: IntervalSeconds = 5.0
    down_seconds: NotNegative = 60.0

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
