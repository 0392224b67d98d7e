"""Static pools: three rules with fixed sizes: for the peak of the load, for the lowest cost of a replay, and by Mélange's method.

Rules:

1. `StaticPeakRule` sizes pools for the peak of the load, as most administrators do. As in `fleet.hardware.sizing`, the
   minute with the highest load uses 0.8 of the throughput. If a replay with these pools misses the wanted attainment in
   any five minutes, the pools are made larger.
2. `StaticBestRule` searches, by trial replays of the same requests, the cheapest fixed sizes that keep the attainment.
3. `MelangeRule` follows Mélange (arXiv 2404.14527). It divides the load into slices by prompt length. Mélange then computes the cheapest
   mix of GPU types by an integer program. Here, the GPU type of each pool is fixed, so the replicas that the slices need are added and
   rounded up.
"""

from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.hardware.sizing import HEADROOM
from fleet.planner.messages import PoolName
from fleet.sim.planning.capacity import TrafficShape
from fleet.sim.planning.rule_context import Positive, RuleContext, ScheduledReplicas
from fleet.sim.planning.rules.future_load import mean_shape, needs, peak_replicas

EVERY = Nanos(60 * SECOND)
PEAK_SECONDS = 60.0
HALVINGS = 4
GROWTH = 1.15
MOST_TRIALS = 8
SLICES = (0, 1000, 4000, 16_000, 64_000)
"""Prompt lengths in tokens at which Mélange's slices begin."""


def static(replicas: dict[PoolName, int]) -> ScheduledReplicas:
    return ScheduledReplicas([(Nanos(0), replicas)], EVERY)


def known_shape(context: RuleContext) -> TrafficShape:
    """Return the mean lengths of all requests, with the cached share that a replay with pools of the peak size measures."""
    lengths = mean_shape(context.future, 0.0)
    generous = context.attempt(static(peak_replicas(context, lengths, PEAK_SECONDS, HEADROOM)))
    return mean_shape(context.future, generous.cached_share)


class StaticPeakRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the rule that gives each pool a fixed size for the peak of the load."""

    use: Positive = HEADROOM
    """Share of the throughput that is used at the peak. If a replay with this share misses the wanted attainment in any
    five minutes, smaller shares are tried."""

    def __post_init__(self) -> None:
        if not 0 < self.use <= 1:
            raise ValueError(f"use: {self.use:g} is not between 0 and 1")

    def open(self, context: RuleContext) -> ScheduledReplicas:
        shape = known_shape(context)
        uses = [self.use / GROWTH**trial for trial in range(MOST_TRIALS)]
        pools = [static(peak_replicas(context, shape, PEAK_SECONDS, use)) for use in uses]
        return next((each for each in pools if self._keeps(context, each)), pools[-1])

    def _keeps(self, context: RuleContext, rule: ScheduledReplicas) -> bool:
        return context.attempt(rule).worst_attainment >= context.attainment


class StaticBestRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the rule that searches the cheapest fixed sizes that keep the attainment."""

    def open(self, context: RuleContext) -> ScheduledReplicas:
        shape = known_shape(context)
        peak = peak_replicas(context, shape, PEAK_SECONDS, 0.5)
        low, high = 0.2, 1.0
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if _keeps(context, _scaled(context, peak, middle)) else (middle, high)
        best = _scaled(context, peak, high)
        for pool in sorted(context.pools, key=lambda each: -each.gpus * each.dollars_per_hour):
            while best[pool.name] > pool.least and _keeps(context, less := best | {pool.name: best[pool.name] - 1}):
                best = less
        return static(best)


def _scaled(context: RuleContext, replicas: dict[PoolName, int], factor: float) -> dict[PoolName, int]:
    return {name: context.bounded(name, ceil(count * factor)) for name, count in replicas.items()}


def _keeps(context: RuleContext, replicas: dict[PoolName, int]) -> bool:
    return context.attempt(static(replicas)).attainment >= context.attainment


class MelangeRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the rule that gives each pool a fixed size by Mélange's method."""

    use: Positive = 1.0
    """Share of the profiled throughput that the sizing uses; 1.0 is the paper's value."""

    def open(self, context: RuleContext) -> ScheduledReplicas:
        whole = known_shape(context)
        peak = {
            pool.name: max(needs(context, pool.name, whole, PEAK_SECONDS)) * context.rate(pool.name, whole)
            for pool in context.pools
        }
        wanted = dict.fromkeys(peak, 0.0)
        for index, begin in enumerate(SLICES):
            end = SLICES[index + 1] if index + 1 < len(SLICES) else float("inf")
            slice_ = [each for each in context.future if begin <= each.prompt_tokens < end]
            if not slice_:
                continue
            shape = mean_shape(slice_, whole.cached_share)
            share = len(slice_) / len(context.future)
            for name, rate in peak.items():
                wanted[name] += share * rate / context.rate(name, shape)
        return static({name: context.bounded(name, ceil(count / self.use)) for name, count in wanted.items()})
