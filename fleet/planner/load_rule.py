"""Load rule: a scaling rule that sizes each pool by its number of requests, without a model of its engines.

It decides only if the settings have `rule.kind = "load"`. Otherwise `fleet.planner.machine` decides.

Rules:

1. The need of a pool, in replicas, is its number of running and waiting requests, divided by `requests_per_replica` and
   rounded up. Requests that wait in routers are divided evenly among the pools that generate answers (roles `decode`
   and `both`). They are divided among the prefill pools as well, because each request needs both phases.
2. A pool grows at once. It shrinks only to its highest need during the last cool-down, so that a short pause of the
   load changes nothing.
3. A pinned pool keeps its number, and every other pool stays within its bounds. The GPU budget or the price limit may
   be too small for all needs. Then each pool that is not pinned gets its minimum, and further replicas are given to the
   pools in the order of their names. Replicas that drain or are still to end use up the budget, too. So if one pool
   shrinks in favour of another pool, the other pool grows only when these replicas have drained.
4. All numbers stay as they are if demand is stale, no router serves the model although replicas are ready, a number is
   impossible, the clock went back, or a pool is not reported.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil, inf

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import (
    DOLLARS_ROUNDING,
    DecisionReason,
    PlanBudget,
    PlanCondition,
    PlanConditionType,
    PlanDecision,
    PlannedPool,
    demand_doubts,
    model_doubts,
    no_signal,
    pool_doubts,
)
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation, PoolName, PoolObservation
from fleet.planner.settings import LoadRuleSettings


class LoadRule:
    """Sizes each pool so that a replica has at most `requests_per_replica` requests.

    Implements `fleet.planner.decisions.ScalingRule`.
    """

    def __init__(self, settings: LoadRuleSettings, pools: Sequence[PlannedPool], budget: PlanBudget) -> None:
        self.interval = Nanos(round(settings.interval_seconds * SECOND))
        self._target = settings.requests_per_replica
        self._cool_down = Nanos(round(settings.cool_down_seconds * SECOND))
        self._pools = sorted(pools, key=lambda each: each.name)
        self._budget = budget
        self._now: Nanos | None = None
        self._needs: dict[PoolName, deque[tuple[Nanos, int]]] = {each.name: deque() for each in pools}

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        observed = {pool.name: found for pool in self._pools if (found := seen.pool(pool.name)) is not None}
        wanted = {name: found.wanted for name, found in observed.items()}
        doubts = [
            *demand_doubts(demand),
            *model_doubts(demand, seen),
            *pool_doubts((pool.name for pool in self._pools), seen),
        ]
        if self._now is not None and now < self._now:
            doubts.append(no_signal("now", "now: the clock went back"))
        self._now = now
        if doubts:
            message = f"hold: {doubts[0].message}"
            return PlanDecision(
                at=now, replicas=wanted, reason=DecisionReason.NO_SIGNAL, message=message, conditions=tuple(doubts)
            )
        conditions = [
            PlanCondition(type=PlanConditionType.PINNED, field=f"pools.{name}", message=found.pinned)
            for name, found in observed.items()
            if found.pinned
        ]
        numbers: dict[str, float] = {"rate": demand.rate, "queued": float(demand.queued)}
        needs = {pool.name: self._need(pool, now, demand, observed[pool.name], numbers) for pool in self._pools}
        replicas = self._within_budget(needs, observed, conditions)
        grown = [name for name, count in replicas.items() if count > wanted[name]]
        shrunk = [name for name, count in replicas.items() if count < wanted[name]]
        reason = DecisionReason.LOAD_UP if grown else DecisionReason.LOAD_DOWN if shrunk else DecisionReason.WITHIN_BAND
        changes = ", ".join(f"{name} {wanted[name]} to {replicas[name]}" for name in (*grown, *shrunk))
        is_limited = any(each.type is PlanConditionType.BUDGET_EXHAUSTED for each in conditions)
        unchanged = (
            "the budget has no room for the replicas that are needed" if is_limited else "every pool has what it needs"
        )
        message = f"{changes}: {self._target:g} requests a replica" if changes else unchanged
        return PlanDecision(
            at=now,
            replicas=replicas,
            reason=reason,
            message=message,
            numbers=numbers,
            conditions=tuple(conditions),
        )

    def _need(
        self, pool: PlannedPool, now: Nanos, demand: DemandWindow, seen: PoolObservation, numbers: dict[str, float]
    ) -> int:
        """Return the number of replicas that a pool should have (rules 1 and 2); note the pool's load and need in `numbers`."""
        load = sum(each.running + each.waiting for each in demand.workers if each.pool == pool.name)
        alike = [each for each in self._pools if (each.role is Role.PREFILL) == (pool.role is Role.PREFILL)]
        load += ceil(demand.queued / len(alike))
        numbers[f"{pool.name}.load"] = float(load)
        needed = min(max(ceil(load / self._target), pool.least), pool.most)
        past = self._needs[pool.name]
        # The load before the rule's first decision is unknown. So during the first cool-down, the number of replicas at
        # the first decision counts as a past need.
        if not past:
            past.append((now, seen.wanted))
        past.append((now, needed))
        while past[0][0] < now - self._cool_down or past[0][0] > now:
            past.popleft()
        highest = max(count for _, count in past)
        numbers[f"{pool.name}.needed"] = float(needed)
        if seen.pinned:
            return seen.wanted
        if needed >= seen.wanted:
            return needed
        return min(max(highest, pool.least), max(seen.wanted, pool.least), pool.most)

    def _within_budget(
        self, needs: dict[PoolName, int], observed: dict[PoolName, PoolObservation], conditions: list[PlanCondition]
    ) -> dict[PoolName, int]:
        """Return the numbers of replicas that the budget allows at this instant (rule 3).

        A pool gets its minimum number of replicas even if the budget is used up, and a pinned pool gets its number.
        """
        # for each pool that gets less than it needs: the name of the limit that causes this
        exhausted: dict[PoolName, str] = {}
        floors = {
            pool.name: needs[pool.name] if observed[pool.name].pinned else min(needs[pool.name], pool.least)
            for pool in self._pools
        }
        none = dict.fromkeys(needs, 0)
        shares = self._divided(floors, needs, none, none, exhausted)
        # A pool above its share shrinks at once. A pool below its share grows as soon as the other pools leave room.
        held = {name: max(found.wanted, found.ready) for name, found in observed.items()}
        draining = {name: found.draining for name, found in observed.items()}
        least = {name: max(floors[name], min(share, observed[name].wanted)) for name, share in shares.items()}
        replicas = self._divided(least, shares, held, draining, exhausted)
        for name, field in exhausted.items():
            message = f"{name} needs {needs[name]} replicas, and {field} leaves {replicas[name]}"
            conditions.append(PlanCondition(type=PlanConditionType.BUDGET_EXHAUSTED, field=field, message=message))
        return replicas

    def _divided(
        self,
        least: dict[PoolName, int],
        most: dict[PoolName, int],
        held: dict[PoolName, int],
        draining: dict[PoolName, int],
        exhausted: dict[PoolName, str],
    ) -> dict[PoolName, int]:
        """Divide the budget among the pools.

        Each pool gets `least` replicas. Then, in the order of their names, each pool gets as many more, up to `most`,
        as the budget allows.

        A pool uses the budget for at least `held` replicas, and for `draining` further ones. Note the limit in
        `exhausted` for each pool that gets less than `most`.
        """
        budget, replicas = self._budget, dict(least)
        most_dollars = inf if budget.dollars_per_hour is None else budget.dollars_per_hour + DOLLARS_ROUNDING
        used = {name: max(count, held[name]) + draining[name] for name, count in least.items()}
        gpus = sum(pool.replica_gpus * used[pool.name] for pool in self._pools)
        dollars = sum(pool.replica_dollars * used[pool.name] for pool in self._pools)
        for pool in self._pools:
            while replicas[pool.name] < most[pool.name]:
                # True if the pool already holds this replica, so that `gpus` and `dollars` contain its cost.
                free = replicas[pool.name] < held[pool.name]
                own, price = (0, 0.0) if free else (pool.replica_gpus, pool.replica_dollars)
                over = budget.gpus is not None and own and gpus + own > budget.gpus
                dear = price and dollars + price > most_dollars
                if over or dear:
                    exhausted[pool.name] = "budget.gpus" if over else "budget.dollars_per_hour"
                    break
                gpus, dollars = gpus + own, dollars + price
                replicas[pool.name] += 1
        return replicas
