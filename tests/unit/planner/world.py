"""A simulated world of pools for tests of the planner: random arrivals, start-up times, drains and obstacles, in virtual time."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanDecision, PlannedPool, ScalingRule
from fleet.planner.demand import DemandWindow
from fleet.planner.execution import PlanOutcome, rollback, settled
from fleet.planner.messages import Observation, Plan, PlanId, PoolGapReason, PoolName, PoolObservation

PROMPT, ANSWER = 2000, 200
PLAN_SECONDS = 300.0
NO_PLAN = PlanId("")


def seconds(value: float) -> Nanos:
    return Nanos(round(value * SECOND))


@dataclass
class PoolState:
    """Replicas of one pool."""

    pool: PlannedPool
    wanted: int
    ready: int
    starting: list[float] = field(default_factory=list)
    """Instants at which starting replicas will begin to serve."""

    draining: list[float] = field(default_factory=list)
    """Instants at which draining replicas will end."""

    why: PoolGapReason | None = None
    plan: PlanId = NO_PLAN
    before: int | None = None
    pinned: str = ""
    stuck: bool = False
    """True if there is no room for new replicas."""

    def advance(self, now: float) -> None:
        if not self.stuck:
            self.ready += sum(at <= now for at in self.starting)
            self.starting = [at for at in self.starting if at > now]
        self.draining = [at for at in self.draining if at > now]

    def want(self, count: int, now: float) -> None:
        self.wanted = count
        while self.ready + len(self.starting) > count and self.starting:
            self.starting.pop()
        while self.ready > count:
            self.ready -= 1
            self.draining.append(now + self.pool.drain_seconds)
        while self.ready + len(self.starting) < count:
            self.starting.append(now + self.pool.start_seconds)

    @property
    def held(self) -> int:
        return self.ready + len(self.starting) + len(self.draining)

    @property
    def seen(self) -> PoolObservation:
        waits = PoolGapReason.NO_ROOM if self.stuck and self.starting else None
        busy = PoolGapReason.UNDER_WAY if self.starting or self.draining else None
        return PoolObservation(
            name=self.pool.name,
            wanted=self.wanted,
            ready=self.ready,
            draining=len(self.draining),
            plan=self.plan,
            before=self.before,
            pinned=self.pinned,
            why=self.why or waits or busy,
        )


@dataclass
class PlanRecord:
    """A plan and how it ended."""

    plan: Plan
    reason: DecisionReason
    before: Observation
    deadline: float
    outcome: str | None = None


class World:
    """Pools whose sizes a planner rule decides."""

    def __init__(
        self, rule: ScalingRule, pools: Sequence[PlannedPool], ready: Mapping[str, int], seed: int = 1
    ) -> None:
        self.rule = rule
        self.pools = {
            each.name: PoolState(
                pool=each, wanted=ready.get(each.name, each.least), ready=ready.get(each.name, each.least)
            )
            for each in pools
        }
        self.now = 0.0
        self.decisions: list[PlanDecision] = []
        self.history: list[dict[PoolName, int]] = []
        self.prompt, self.answer = PROMPT, ANSWER
        self.plans: list[PlanRecord] = []
        self._chance = random.Random(seed)

    def run(self, duration: float, rate: Callable[[float], float] | float, **fields: object) -> None:
        """Let `duration` seconds pass with Poisson arrivals at a rate, which may depend on the time."""
        until = self.now + duration
        while self.now < until - 1e-9:
            step = self.rule.interval / SECOND
            at = self.now + step / 2
            self.tick(self.arrivals((rate(at) if callable(rate) else rate) * step), **fields)

    def tick(self, arrivals: int, **fields: object) -> PlanDecision:
        began = self.now
        self.now += self.rule.interval / SECOND
        for each in self.pools.values():
            each.advance(self.now)
        self.end_plan()
        window = self.window(began, arrivals, **fields)
        decision = self.rule.decide(seconds(self.now), window, self.observation)
        if any(count != self.pools[name].wanted for name, count in decision.replicas.items()):
            self.begin_plan(decision)
        self.decisions.append(decision)
        self.history.append(self.wanted)
        return decision

    def begin_plan(self, decision: PlanDecision) -> None:
        """Make a plan of a decision, and apply it; the plan before is superseded unless it has ended."""
        if self.plans and self.plans[-1].outcome is None:
            self.plans[-1].outcome = "superseded"
        plan = Plan(
            id=PlanId(f"plan-{len(self.plans)}"), replicas=dict(decision.replicas), within=seconds(PLAN_SECONDS)
        )
        self.plans.append(
            PlanRecord(plan=plan, reason=decision.reason, before=self.observation, deadline=self.now + PLAN_SECONDS)
        )
        for name, count in plan.replicas.items():
            self.pools[name].before = self.pools[name].seen.before_a_write(count)
            self.pools[name].plan = plan.id
            if count != self.pools[name].wanted:
                self.pools[name].want(count, self.now)

    def end_plan(self) -> None:
        """End the plan if it is settled; at its deadline, roll back what is not settled, as the planner's server does."""
        if not self.plans or self.plans[-1].outcome is not None:
            return
        record, seen = self.plans[-1], self.observation
        if settled(record.plan, seen):
            record.outcome = PlanOutcome.SETTLED
        elif self.now >= record.deadline:
            rest = rollback(record.plan, record.before, seen)
            for name, count in (rest.replicas if rest is not None else {}).items():
                self.pools[name].want(count, self.now)
            record.outcome = PlanOutcome.ROLLED_BACK if rest is not None else PlanOutcome.UNSETTLED

    def window(self, began: float, arrivals: int, **fields: object) -> DemandWindow:
        given: dict[str, object] = {
            "arrivals": arrivals,
            "prompt_tokens": arrivals * self.prompt,
            "prompt_squares": float(arrivals * self.prompt**2),
            "finished": arrivals,
            "answer_tokens": arrivals * self.answer,
            "answer_squares": float(arrivals * self.answer**2),
        } | fields
        return DemandWindow(began=seconds(began), ended=seconds(self.now), **given)  # type: ignore[arg-type]

    def arrivals(self, mean: float) -> int:
        if mean > 200:
            return max(0, round(self._chance.gauss(mean, mean**0.5)))
        count, passed = 0, self._chance.expovariate(1.0)
        while passed < mean:
            count, passed = count + 1, passed + self._chance.expovariate(1.0)
        return count

    @property
    def observation(self) -> Observation:
        return Observation(tuple(self.pools[name].seen for name in sorted(self.pools)))

    @property
    def wanted(self) -> dict[PoolName, int]:
        return {name: each.wanted for name, each in self.pools.items()}

    def direction_changes(self, name: str, since: int = 0) -> int:
        """Return how often the size of a pool changed from growing to shrinking, or back."""
        numbers = [each[PoolName(name)] for each in self.history[since:]]
        moves = [later - earlier for earlier, later in pairwise(numbers) if later != earlier]
        return sum((one > 0) != (other > 0) for one, other in pairwise(moves))


def pool(name: str, role: Role, **fields: object) -> PlannedPool:
    given: dict[str, object] = {"gpu": "h100", "gpus": 1, "most": 50, "dollars_per_hour": 3.0} | fields
    return PlannedPool(name=PoolName(name), role=role, **given)  # type: ignore[arg-type]
