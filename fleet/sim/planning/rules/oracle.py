"""Oracle: searches the cheapest timetable of replicas, with all requests known in advance.

The search has two parts:

1. The need of a pool is the number of replicas that its load keeps busy (`fleet.sim.planning.rules.future_load`). Level
   k of a pool is its k-th replica, which is needed while the need, rounded up, is at least k. For each level alone, the
   timetable starts a replica early enough to serve when it is needed. A replica that is not needed for a short time is
   kept, if this time is not longer than a start and a drain together. Ending it would save nothing, because a replica
   occupies its GPUs during its start and its drain.
2. The need of each pool is multiplied by a scale. A bisection finds the smallest scales that keep the attainment. Each
   of its steps replays the same requests with another timetable.

The result is an estimate of the best that any rule can reach on this workload. It is no proof, because the needs ignore
queueing, and each pool has one scale for the whole replay.
"""

from collections.abc import Sequence
from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import PlannedPool
from fleet.planner.messages import PoolName
from fleet.sim.planning.capacity import TrafficShape
from fleet.sim.planning.orchestrator import TAKES_UP
from fleet.sim.planning.rule_context import NotNegative, RuleContext, ScheduledReplicas
from fleet.sim.planning.rules.future_load import BIN_SECONDS, needs
from fleet.sim.planning.rules.static import known_shape

Trials = Annotated[int, Meta(ge=0, le=20)]
"""Type of a number of replays. Each replay narrows the range of a scale. After 20 of them, more replays make no difference."""

HIGHEST, LOWEST = 2.5, 0.5
"""Highest and lowest scale, between which the bisection begins. A scale multiplies the need of a pool."""


class OracleRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the oracle's search for the cheapest timetable."""

    span_seconds: NotNegative = 30.0
    """Seconds around each instant over which the need of a pool is averaged."""

    halvings: Trials = 5
    refinements: Trials = 2
    """`halvings` is the number of replays that search one scale for all pools. `refinements` is the number of later
    replays for each pool, which search a lower scale for this pool alone."""

    def open(self, context: RuleContext) -> ScheduledReplicas:
        return _OracleSearch(self, context).best()


class _OracleSearch:
    def __init__(self, settings: OracleRule, context: RuleContext) -> None:
        self._settings, self._context = settings, context
        self._shape = known_shape(context)
        self._needs = {
            pool.name: needs(context, pool.name, self._shape, settings.span_seconds) for pool in context.pools
        }

    def best(self) -> ScheduledReplicas:
        names = list(self._needs)
        low, high = LOWEST, HIGHEST
        for _ in range(self._settings.halvings):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self._keeps(dict.fromkeys(names, middle)) else (middle, high)
        scales = dict.fromkeys(names, high)
        for name in names:
            low, high = LOWEST, scales[name]
            for _ in range(self._settings.refinements):
                middle = (low * high * high) ** (1 / 3)
                low, high = (low, middle) if self._keeps(scales | {name: middle}) else (middle, high)
            scales[name] = high
        return self._timetable(scales)

    def _keeps(self, scales: dict[PoolName, float]) -> bool:
        return self._context.attempt(self._timetable(scales)).attainment >= self._context.attainment

    def _timetable(self, scales: dict[PoolName, float]) -> ScheduledReplicas:
        changes: list[tuple[float, PoolName, int]] = []
        begin: dict[PoolName, int] = {}
        for pool in self._context.pools:
            levels = _levels(self._context, pool, self._needs[pool.name], scales[pool.name], self._shape)
            begin[pool.name] = levels[0][1]
            changes += [(at, pool.name, count) for at, count in levels[1:]]
        timetable = [(Nanos(0), dict(begin))]
        present = dict(begin)
        for at, name, count in sorted(changes):
            present[name] = count
            timetable.append((Nanos(round(at * SECOND)), dict(present)))
        return ScheduledReplicas(timetable, Nanos(round(BIN_SECONDS * SECOND)))


def _levels(
    context: RuleContext, pool: PlannedPool, need: Sequence[float], scale: float, shape: TrafficShape
) -> list[tuple[float, int]]:
    """Return the timetable of a pool: pairs of an instant in seconds and the number of replicas from then on.

    The instant of the first pair is 0.
    """
    counts = [context.bounded(pool.name, ceil(each * scale)) for each in need]
    # one bin earlier, because a need may begin anywhere within its bin
    early = pool.start_seconds + TAKES_UP / SECOND + BIN_SECONDS
    bridged = early + min(pool.drain_seconds, _stream_seconds(context, pool, shape))
    changes: dict[float, int] = {}
    begin = pool.least
    for level in range(pool.least + 1, max(counts) + 1):
        for first, end in _spans([count >= level for count in counts], bridged):
            start = first * BIN_SECONDS - early
            if start <= 0:
                begin += 1
            else:
                changes[start] = changes.get(start, 0) + 1
            stop = end * BIN_SECONDS
            changes[stop] = changes.get(stop, 0) - 1
    levels = [(0.0, begin)]
    for at in sorted(changes):
        levels.append((at, levels[-1][1] + changes[at]))
    return levels


def _spans(needed: Sequence[bool], bridged_seconds: float) -> list[tuple[int, int]]:
    """Return the spans in which the replica of a level (part 1) is kept, each as its first bin and the bin after its last one.

    A time of at most `bridged_seconds` seconds in which the replica is not needed does not end a span.
    """
    spans: list[tuple[int, int]] = []
    for place, needs_it in enumerate(needed):
        if not needs_it:
            continue
        if spans and (place - spans[-1][1]) * BIN_SECONDS <= bridged_seconds:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return spans


def _stream_seconds(context: RuleContext, pool: PlannedPool, shape: TrafficShape) -> float:
    """Return the estimated drain time of a replica: the time of one mean prompt if it only prefills, else of one mean answer."""
    if pool.role is Role.PREFILL:
        return context.capacities[pool.name].prefill_seconds(shape)
    return shape.answer_tokens * context.goals.tpot_seconds
