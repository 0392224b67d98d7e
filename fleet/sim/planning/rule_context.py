"""Rule context: the data that a scaling rule gets when it is created for a replay."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanBudget, PlanDecision, PlanGoals, PlannedPool, ScalingRule
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation, PoolName
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.planning.capacity import ReplicaCapacity, TrafficShape
from fleet.sim.planning.outcome import ReplayOutcome
from kvstore.eviction.trace_replay import TraceRequest

Positive = Annotated[float, Meta(gt=0, le=1e6)]
NotNegative = Annotated[float, Meta(ge=0, le=1e6)]
Share = Annotated[float, Meta(gt=0, le=1)]
"""Types of the parameters of rules. A number by which a rule divides, or a time over which it averages, must be above 0."""


class RuleContext(Struct, frozen=True, kw_only=True):
    """Data that a scaling rule gets about a replay: goals, budget, pools, hardware and, for rules that know the future, all requests."""

    goals: PlanGoals
    attainment: float
    """Share of requests that must keep the goals. Only rules that know all requests in advance use it."""

    budget: PlanBudget
    pools: tuple[PlannedPool, ...]
    profiles: Mapping[PoolName, PoolProfile]
    capacities: Mapping[PoolName, ReplicaCapacity]
    future: Sequence[TraceRequest] = ()
    """All requests of the replay. Only rules that know the future may read it, such as the oracle."""

    attempt: Callable[[ScalingRule], ReplayOutcome]
    """Function that runs the whole replay with a rule and returns the outcome. Only rules that know all requests in advance call it, to
    compare several timetables."""

    def pool(self, name: PoolName) -> PlannedPool:
        return next(each for each in self.pools if each.name == name)

    def by_role(self, role: Role) -> tuple[PlannedPool, ...]:
        return tuple(each for each in self.pools if each.role is role)

    def bounded(self, name: PoolName, replicas: float) -> int:
        """Round `replicas` down to a whole number, and return it, or the nearest bound if it is outside of the pool's bounds."""
        pool = self.pool(name)
        return min(max(int(replicas), pool.least), pool.most)

    def rate(self, name: PoolName, shape: TrafficShape) -> float:
        """Return the requests per second that one replica of a pool can serve while it keeps the TPOT goal."""
        return self.capacities[name].rate(shape, self.goals.tpot_seconds)


class SimulatedRule(Protocol):
    """Parameters of a scaling rule for a replay. The method `open` creates the rule."""

    def open(self, context: RuleContext) -> ScalingRule:
        """Return a new rule for one replay."""
        ...


class ScheduledReplicas:
    """Scaling rule that follows a timetable: it sets the pools to given numbers of replicas at given instants.

    For pools of a fixed size, the timetable has a single entry.
    """

    def __init__(self, timetable: Sequence[tuple[Nanos, Mapping[PoolName, int]]], interval: Nanos) -> None:
        """Set the timetable, in ascending order of time. Its first entry applies from the beginning, even if its instant is later."""
        assert timetable, "a timetable has an entry for the beginning"
        self.interval = interval
        self._timetable = [(at, dict(replicas)) for at, replicas in timetable]
        self._next = 0

    @property
    def begin(self) -> dict[PoolName, int]:
        """Number of replicas in each pool at the beginning of the replay."""
        return self._timetable[0][1]

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:  # noqa: ARG002 - signature of `ScalingRule`
        """Return the numbers of replicas in the last entry of the timetable whose instant has come."""
        while self._next + 1 < len(self._timetable) and self._timetable[self._next + 1][0] <= now:
            self._next += 1
        at, replicas = self._timetable[self._next]
        return PlanDecision(
            at=now,
            replicas=dict(replicas),
            reason=DecisionReason.WITHIN_BAND,
            message=f"The timetable says so from {at / SECOND:.0f} s on.",
        )
