"""Planner machine: decides how many replicas of each pool to run.

Pure: it does no I/O, and gets the present instant as an argument. If the settings have `rule.kind = "load"`,
`fleet.planner.load_rule` decides instead.

Rules, in the order in which `PlannerMachine.decide` applies them:

1. **Doubts.** The planner does not trust its input in these cases: demand is stale, no router serves the model although
   replicas are ready, a number is impossible, the clock goes back, or a pool is not reported. Then the requested numbers stay as they are, and a condition names the field or
   the source. The demand window of this round is not added to the history.
2. **Demand.** The arrival rate and the mean lengths of prompts and answers are levels
   (`fleet.planner.forecasting.level`): each is a mean over the windows since the last detected change of this mean, up to
   a maximum number of windows. Bursts raise the dispersion of arrivals, and a higher dispersion needs more free capacity.
   The rate is 0 when the load has ended: no request waits or runs, and none has arrived for a certain time. This time is
   the cool-down or `fleet.planner.forecasting.history.QUIET_GAPS` times the mean gap between requests, whichever is longer.
3. **Two horizons.** The rate to serve is the larger of two numbers: the present level, which reacts within seconds, and
   the forecast for the time at which a replica that is started now would serve. From that rate, the capacity model and
   the solver compute the replicas for prefill, decode and all GPU types at once.
4. **Growth** happens at once, if the replicas that serve or start are too few for the rate. Replicas that are starting
   count as existing, so no plan requests them twice. Only a higher need supersedes a plan that is under way. But growth
   waits while four conditions hold: the rate is at most `TOLERATED` times the capacity, hardly any request is late, no
   change is under way, and the last growth is at least `RECENT_SECONDS` ago. After a step of the load, requests that will
   be late have not been measured yet.
5. **Latency.** More requests may be late than the goals allow (`fleet.planner.forecasting.attainment`), although the
   capacity model says that the replicas suffice. Then one replica is added to the phase that causes the delay. This
   happens only if no change is under way. The time from one such growth to the next is at least a minute, and at least
   the time that a replica needs to start.
   For some hours after that, the planner uses a smaller share of the phase's predicted capacity than the share at which
   the goals were missed. Measured latencies correct the predictions; if the ratio of measured to predicted latencies
   changes, the condition `ModelDrift` reports it.
6. **Shrinking** is allowed only if the smaller pools can still serve the highest rate of the last cool-down, increased
   by the share `deadband`. If the present pools cannot serve so much either, the smaller pools must serve as much as the
   present pools.
   Shrinking also waits in these cases: a change is under way, the last growth or the start of the planner is less than a
   cool-down ago, a mean length has changed in the last `LENGTHS_SECONDS`, or more requests are late than the goals allow.
   Unless the load has ended, `UNDO_HORIZONS` horizons replace the cool-down after a growth or a start, if they are longer.
   One step removes at most half of a pool, because the caches of removed replicas are lost; if the load has ended, this
   limit does not hold.
   In two cases, pools shrink without waiting. If one phase grows because a mean length has changed, the other phase
   shrinks in the same plan. If the budget does not allow a growth, pools shrink so that others can grow.
7. **Cheaper mix.** Another mix of pools is used only if it saves at least the share `mix_saving` of the cost, which is the
   power of the replicas if the settings minimise energy. The replicas that it adds are started before other replicas end.
8. **Limits.** The requested numbers keep the bounds of the pools, and the bounds of the ratio of prefill to decode
   replicas. If the maximum of the pools of one phase does not allow the whole rate within the goals, the other phase is still sized for
   the requests that these pools serve without the goals. Budgets are kept at every instant, and also count replicas that start or drain. If no budget is free, a
   replica that replaces another one starts only when the other one has drained.
9. **Pinned** pools keep their number, and the sizes of the other pools are computed with this number. A pool does not
   grow for `retry_seconds` after one of these events: its replicas found no room or failed, the orchestrator forbade its
   number, or its number was rolled back. The other pools grow instead.
10. **Goals out of reach.** If no pool can reach a goal, the planner sizes pools for nearly the best latency that can be
    reached, and reports a condition. The planner then does not shrink pools unless the load ends.

`fleet.planner.loop` carries the decisions out. Which replicas end is decided elsewhere: on Kubernetes by
`operators.controller.reconcile` (rule 5), under `fleet up` by `fleet.local.pools` (rule 2).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import (
    DecisionReason,
    PlanBudget,
    PlanCondition,
    PlanConditionType,
    PlanDecision,
    PlanGoals,
    PlannedPool,
    check_energy,
    check_limits,
    check_roles,
    demand_doubts,
    model_doubts,
    no_signal,
    pool_doubts,
)
from fleet.planner.demand import DemandWindow
from fleet.planner.forecasting.attainment import FAST_SECONDS, Attainment
from fleet.planner.forecasting.history import RECENT_SECONDS, DemandHistory, PoolHistory
from fleet.planner.messages import Observation, PoolGapReason, PoolName, PoolObservation
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.sizing.capacity import CapacityModel, OfferedLoad
from fleet.planner.sizing.corrected import CorrectedCapacity
from fleet.planner.sizing.solver import (
    Candidate,
    Mix,
    served,
    solve,
    within_budget,
    within_ratio,
)

ENOUGH_SERVED = 1.0 - 1e-6
"""If at least this share of a rate can be served, the whole rate counts as served, because the rest is a rounding
error."""

TOLERATED = 1.1
"""Factor by which the rate may exceed the capacity as long as hardly any request is late. Replicas are not overloaded
then, because `fleet.planner.sizing.capacity.StepCapacity` leaves a tenth of their throughput free."""

LATE_SHARE = 0.5
"""If a phase uses less than this share of its capacity, the load is not the cause of a missed goal. More replicas would
not help then."""

LENGTHS_SECONDS = 60.0
"""Seconds after a change of the mean lengths in which no pool shrinks. The reason is that the length of an answer is
known only when the answer has ended."""

UNDO_HORIZONS = 1.25
"""Horizons that must have passed since the last growth or the start of the planner before a pool shrinks under load, even
if the cool-down is shorter. If a removed replica turns out to be necessary, its successor serves only after a horizon. The
factor is above 1, so that at least one forecast can be compared with the load before."""

RATIO_GAIN = 1.05
"""If the budget is used up, the planner may remove replicas of one pool in favour of another pool. It does so only if
the served rate then grows at least by this factor."""


class PlannerMachine:
    """Decides the sizes of the pools of one model. Implements `fleet.planner.decisions.ScalingRule`."""

    def __init__(
        self,
        settings: PlannerRuleSettings,
        pools: Sequence[PlannedPool],
        goals: PlanGoals,
        capacity: CapacityModel,
        budget: PlanBudget | None = None,
    ) -> None:
        """Create the machine.

        Raises:
            ValueError: The pools, the budget or the forecast method are invalid, or no pool serves a phase; the message names the field.
        """
        budget = budget or PlanBudget()
        check_roles(pools)
        check_limits(pools, budget)
        if settings.minimise == "energy":
            check_energy(pools)
        self.interval = Nanos(round(settings.interval_seconds * SECOND))
        self._settings = settings
        self._pools = {each.name: each for each in pools}
        self._goals = goals
        self._budget = budget
        self._demand = DemandHistory(settings)
        self._attainment = Attainment(goals)
        self._model = CorrectedCapacity(capacity, goals, pools)
        self._pool_history = PoolHistory(settings.retry_seconds, pools)
        self._now: Nanos | None = None
        self._elapsed = 0.0
        # instants of the last cool-down, each with the rate that had to be served
        self._needs: deque[tuple[float, float]] = deque()
        self._latency_growth = self._learned = -inf
        self._drifted: dict[str, float] = {}
        self._shape_changes = 0

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        wanted = {name: pool.wanted for name in self._pools if (pool := seen.pool(name)) is not None}
        doubts = list(self._doubts(now, demand, seen))
        self._advance(now)
        self._model.advance(self._elapsed)
        if doubts:
            return PlanDecision(
                at=now,
                replicas=wanted,
                reason=DecisionReason.NO_SIGNAL,
                message=f"hold: {doubts[0].message}",
                conditions=tuple(doubts),
            )
        self._demand.absorb(demand)
        self._attainment.absorb(demand)
        self._pool_history.absorb(self._elapsed, seen)
        view = self._view(demand, seen)
        self._learn(view)
        conditions = [*self._pins(view), *self._drifts()]
        decision = self._decide(now, view)
        self._pool_history.decided(decision.replicas)
        return structs.replace(
            decision,
            numbers=decision.numbers
            | ({} if self.forecast_error is None else {"forecast_error": self.forecast_error})
            | {f"{latency}_error": error for latency, error in self.model_error.items()},
            conditions=(*decision.conditions, *conditions),
        )

    @property
    def forecast_error(self) -> float | None:
        """Mean absolute error of past forecasts of the rate, divided by the mean rate; None before the first comparison."""
        return self._demand.forecaster.error

    @property
    def forecast_method(self) -> str:
        return self._demand.forecaster.chosen

    @property
    def model_error(self) -> dict[str, float]:
        """Typical errors of the corrected predictions of TTFT (`ttft`) and TPOT (`tpot`), by the formula of `fleet.planner.sizing.prediction_error`.

        A latency is missing until a measurement was compared with a prediction that an earlier measurement had corrected.
        """
        errors = {"ttft": self._model.ttft.error, "tpot": self._model.tpot.error}
        return {latency: error for latency, error in errors.items() if error is not None}

    # Rule 1: checks of the input.

    def _doubts(self, now: Nanos, demand: DemandWindow, seen: Observation) -> Iterator[PlanCondition]:
        yield from demand_doubts(demand)
        yield from model_doubts(demand, seen)
        if demand.ended > now + self.interval:
            yield no_signal("demand.ended", "demand.ended: the window ends in the future")
        if self._demand.ended is not None and demand.began < self._demand.ended:
            yield no_signal("demand.began", "demand.began: the window overlaps the one before it")
        if self._now is not None and now < self._now:
            yield no_signal("now", "now: the clock went back")
        yield from pool_doubts(self._pools, seen)

    def _advance(self, now: Nanos) -> None:
        """Add the time since the last decision to the elapsed time of this rule.

        A time of more than three intervals counts as three intervals, so that a jump of the clock does not end a
        cool-down.
        """
        if self._now is not None and now > self._now:
            self._elapsed += min((now - self._now) / SECOND, 3.0 * self._settings.interval_seconds)
        self._now = now

    # Rules 2 and 3: the load for which pools are sized.

    def _view(self, demand: DemandWindow, seen: Observation) -> "_PlanningView":
        """Return the pools and the load of this round, from which all further rules decide."""
        load, level = self._demand.load.rounded(), self._demand.rate
        pools = [
            _SeenPool(planned, pool, planned.cost(self._settings.minimise))
            for name, planned in self._pools.items()
            if (pool := seen.pool(name)) is not None
        ]
        late = max(0.0, (self._now - demand.ended) / SECOND) if self._now is not None else 0.0
        horizon = (
            late
            + self._settings.interval_seconds
            + max((self._pool_history.start_seconds(each.pool) for each in pools if not each.seen.pinned), default=0.0)
        )
        self._demand.forecaster.aim(horizon)
        ahead = self._demand.forecaster.forecast(horizon)
        forecast, no_forecast = None, self._no_forecast(horizon)
        if not no_forecast:
            forecast = ahead.mean + self._settings.caution * (ahead.upper - ahead.mean)
        quiet = self._demand.quiet and _idle(demand)
        rate = 0.0 if quiet else max(level, forecast or 0.0)
        self._needs.append((self._elapsed, rate))
        while self._needs[0][0] < self._elapsed - self._settings.cool_down_seconds:
            self._needs.popleft()
        highest = 0.0 if quiet else max(rate for _, rate in self._needs)
        return _PlanningView(
            pools=tuple(pools),
            load=load,
            level=level,
            forecast=forecast,
            no_forecast=no_forecast,
            rate=rate,
            highest=highest,
            horizon=horizon,
            quiet=quiet,
        )

    def _no_forecast(self, horizon: float) -> str:
        """Return why no forecast of the rate is used; empty if it is used.

        The forecast is not used if the settings turn it off, or if there are too few samples.

        After a fall of the rate, forecasts by means and trends are too high for a while. In this time, only a seasonal
        forecast is used.
        """
        if self._settings.forecast == "level":
            return "no forecast by the settings"
        if not self._demand.forecastable:
            return "no forecast yet"
        if self._demand.since_fall > horizon or self.forecast_method == "seasonal":
            return ""
        return "no forecast shortly after a fall"

    def _learn(self, view: "_PlanningView") -> None:
        """Learn from the measured latencies how to correct the predicted ones.

        Do nothing while pools change, and for some time after the last change, because queues distort the latencies
        then. Also do nothing for some time after the last learning. Both times are `_PlanningView.horizon`, but at
        least `RECENT_SECONDS`.
        """
        rested = self._elapsed - max(self._learned, self._pool_history.last_change)
        if view.under_way or rested < max(view.horizon, RECENT_SECONDS):
            return
        self._learned = self._elapsed
        ttft, tpot = self._demand.latencies(self._goals.percentile)
        ready = {each.pool: each.seen.ready for each in view.pools if each.seen.ready}
        for field in self._model.learn(view.load, view.level, ready, ttft, tpot):
            self._drifted[field] = self._elapsed

    def _drifts(self) -> Iterator[PlanCondition]:
        for field, since in self._drifted.items():
            if self._elapsed - since < self._settings.retry_seconds:
                error = self.model_error.get(field)
                said = "" if error is None else f"; their error is {error:.0%} of the longer time"
                yield PlanCondition(
                    type=PlanConditionType.MODEL_DRIFT,
                    field=field,
                    message=f"{field}: predictions have become wrong, and are learnt anew{said}",
                )

    def _pins(self, view: "_PlanningView") -> Iterator[PlanCondition]:
        for each in view.pools:
            if each.seen.pinned:
                yield PlanCondition(
                    type=PlanConditionType.PINNED, field=f"pools.{each.pool.name}", message=each.seen.pinned
                )

    # Rules 4 to 10: the decision.

    def _decide(self, now: Nanos, view: "_PlanningView") -> PlanDecision:
        conditions = list(self._model.out_of_reach(view.load))
        wanted = view.wanted
        needed = self._solve(view, view.rate)
        if needed is None:
            conditions.append(_contradiction(self._budget))
            return _decision(now, view, wanted, DecisionReason.BOUNDS, "hold: limits contradict each other", conditions)
        if needed.served < view.rate * ENOUGH_SERVED:
            conditions.append(self._shortage(view, needed))
        out_of_bounds = self._out_of_bounds(view)
        if not out_of_bounds and self._growth_may_wait(view):
            said = "growth waits, because hardly any request is late"
            return _decision(now, view, wanted, DecisionReason.WITHIN_BAND, said, conditions)
        if out_of_bounds or self._too_few(view, view.rate):
            replicas, reason = self._more(view)
            if replicas != wanted:
                self._shape_changes = self._demand.shape_changes
                return _decision(now, view, replicas, reason, "", conditions)
        elif (phase := self._late(view)) is not None:
            replicas = self._one_more(view, phase)
            if replicas != wanted:
                self._latency_growth = self._elapsed
                self._model.remember(phase, self._load_share(view, phase))
                said = f"goals are missed by {phase} although the replicas should suffice"
                return _decision(now, view, replicas, DecisionReason.LOAD_UP, said, conditions)
        return self._fewer(now, view, conditions)

    def _out_of_bounds(self, view: "_PlanningView") -> bool:
        """Return whether the requested replicas break the bounds of a pool, or the ratio of prefill to decode."""
        for each in view.pools:
            least, most = self._bounds(each)
            if not least <= each.seen.wanted <= most:
                return True
        candidates = [each.candidate(0, each.seen.wanted) for each in view.pools]
        return not within_ratio(candidates, [each.seen.wanted for each in view.pools], self._budget)

    def _too_few(self, view: "_PlanningView", rate: float) -> bool:
        """Return whether the requested replicas are too few to serve a rate."""
        return self._served(view, view.wanted, rate) < rate * ENOUGH_SERVED

    def _growth_may_wait(self, view: "_PlanningView") -> bool:
        """Return whether growth may wait, because replicas are only a little too few and hardly any request is late."""
        return (
            self._attainment.unspent
            and self._elapsed - self._pool_history.last_growth >= RECENT_SECONDS
            and not view.under_way
            and self._too_few(view, view.rate)
            and not self._too_few(view, view.rate / TOLERATED)
        )

    def _more(self, view: "_PlanningView") -> tuple[dict[PoolName, int], DecisionReason]:
        """Return numbers of replicas that serve the rate, or as much of it as the limits allow, and the reason.

        A pool shrinks only in three cases: it is above its bounds, the budget does not allow other pools to grow, or
        mean lengths have changed (rule 6).
        """
        rate = view.rate * (1.0 + self._settings.margin)
        wanted = view.wanted
        changed = self._demand.shape_changes != self._shape_changes and not view.under_way
        grown = self._solve(view, rate, least=wanted)
        if (exchanged := self._exchange(view, rate, grown)) is not None:
            return exchanged, DecisionReason.RATIO
        if grown is None:
            return wanted, DecisionReason.BOUNDS
        replicas = view.named(grown)
        grows = {name for name, count in replicas.items() if count > wanted[name]}
        if not grows:
            return replicas, DecisionReason.BOUNDS
        if changed:
            least = {name: replicas[name] if name in grows else 0 for name in replicas}
            other = self._solve(view, view.highest * (1.0 + self._settings.deadband), least=least, most=replicas)
            if other is not None and view.named(other) != replicas:
                return view.named(other), DecisionReason.RATIO
        by_level = self._served(view, wanted, view.level) < view.level * ENOUGH_SERVED
        return replicas, DecisionReason.LOAD_UP if by_level else DecisionReason.FORECAST_UP

    def _exchange(self, view: "_PlanningView", rate: float, grown: Mix | None) -> dict[PoolName, int] | None:
        """Return numbers of replicas with which some pools shrink, so that other pools can grow within the budget.

        Return None if this is impossible, if growth alone serves about as much, or if too little would be served during
        the change.

        Draining replicas still hold their GPUs. So the returned numbers mainly shrink pools, and a later plan lets the
        other pools grow, when the drains have ended.
        """
        final = self._solve(view, rate, drained=True)
        if final is None or (grown is not None and final.served < grown.served * RATIO_GAIN):
            return None
        wanted, most = view.wanted, view.named(final)
        least = {name: min(count, wanted[name]) for name, count in most.items()}
        if grown is not None and self._served(view, least, rate) < self._served(view, wanted, rate) * ENOUGH_SERVED:
            return None
        first = self._solve(view, rate, least=least, most=most)
        return view.named(first) if first is not None else None

    def _late(self, view: "_PlanningView") -> Role | None:
        """Return the phase that misses its latency goal, although its replicas suffice by the capacity model.

        Return None if there is no such phase, or if a change of the pools is too recent to judge. Also return None if
        the load has ended, or is less than `LATE_SHARE` of the phase's capacity.
        """
        rested = self._elapsed - max(self._latency_growth, self._pool_history.last_change)
        if view.under_way or view.quiet or rested < max(view.horizon, FAST_SECONDS):
            return None
        if self._attainment.misses_tpot:
            phase = Role.DECODE
        elif self._attainment.misses_ttft:
            phase = max((Role.PREFILL, Role.DECODE), key=lambda each: self._load_share(view, each))
        else:
            return None
        return phase if self._load_share(view, phase) >= LATE_SHARE else None

    def _one_more(self, view: "_PlanningView", phase: Role) -> dict[PoolName, int]:
        """Return the numbers with one more replica in the pool that serves the phase at the lowest price per request.

        Only pools that have replicas and may grow are considered. If there is none, return the present numbers.
        """
        replicas = dict(view.wanted)
        able = [
            each
            for each in view.pools
            if each.pool.role in {phase, Role.BOTH} and each.seen.wanted and each.seen.wanted < self._bounds(each)[1]
        ]
        for each in sorted(able, key=lambda each: each.cost / max(1e-9, self._rate(view, each.pool, 1))):
            grown = {**replicas, each.pool.name: each.seen.wanted + 1}
            if self._fits(view, grown):
                return grown
        return replicas

    def _fewer(self, now: Nanos, view: "_PlanningView", conditions: list[PlanCondition]) -> PlanDecision:
        """Return the decision for the case that rules 4 and 5 add no replicas: fewer replicas, a cheaper mix, or no change."""
        wanted = view.wanted
        rate = view.highest * (1.0 + self._settings.deadband)
        replicas, reason = wanted, DecisionReason.WITHIN_BAND
        target = self._solve(view, rate)
        if target is not None and any(count > wanted[name] for name, count in view.named(target).items()):
            replicas, reason = self._cheaper(view, target), DecisionReason.CHEAPER_MIX
        elif target is not None:
            replicas, reason = view.named(target), DecisionReason.LOAD_DOWN
        if replicas == wanted and (smaller := self._solve(view, rate, most=wanted)) is not None:
            replicas, reason = view.named(smaller), DecisionReason.LOAD_DOWN
        if replicas == wanted or self._served(view, replicas, rate) < self._served(view, wanted, rate) * ENOUGH_SERVED:
            if any(each.type is PlanConditionType.BUDGET_EXHAUSTED for each in conditions):
                return _decision(
                    now, view, wanted, DecisionReason.BOUNDS, "the limits allow no more replicas", conditions
                )
            said = ""
            if view.highest > view.rate:
                said = f"{view.highest:.3g} requests a second were expected in the last {self._settings.cool_down_seconds:.0f} s"
            return _decision(now, view, wanted, DecisionReason.WITHIN_BAND, said, conditions)
        wait = self._settings.cool_down_seconds
        if not view.quiet:
            wait = max(wait, UNDO_HORIZONS * view.horizon)
        rest = wait - (self._elapsed - self._pool_history.last_growth)
        cause = "a growth" if self._pool_history.has_grown else "the start of the planner"
        lengths = min(LENGTHS_SECONDS, self._settings.cool_down_seconds) - self._demand.since_shape_change
        if not view.quiet and lengths > rest:
            rest, cause = lengths, "a change of lengths"
        if view.under_way:
            return _decision(now, view, wanted, DecisionReason.IN_FLIGHT, "replicas start or drain", conditions)
        if rest > 0.0:
            said = f"nothing shrinks for another {rest:.0f} s after {cause}"
            return _decision(now, view, wanted, DecisionReason.COOLING_DOWN, said, conditions)
        if not view.quiet and any(each.type is PlanConditionType.GOAL_OUT_OF_REACH for each in conditions):
            return _decision(now, view, wanted, DecisionReason.COOLING_DOWN, "a goal is out of reach", conditions)
        if not view.quiet and self._attainment.overspent:
            said = "more requests than the goals allow are late"
            return _decision(now, view, wanted, DecisionReason.COOLING_DOWN, said, conditions)
        return _decision(now, view, self._step_down(view, replicas), reason, "", conditions)

    def _step_down(self, view: "_PlanningView", replicas: dict[PoolName, int]) -> dict[PoolName, int]:
        """Return numbers for one step towards `replicas`, in which no pool loses more than half of its replicas.

        Replicas are removed in steps, because their caches are lost. A pool may always lose one replica. If the load
        has ended, or if the budget forbids the step, return `replicas`.
        """
        if view.quiet:
            return replicas
        stepped = {
            name: max(count, view.wanted[name] - max(1, view.wanted[name] // 2)) for name, count in replicas.items()
        }
        return stepped if self._fits(view, stepped) else replicas

    def _cheaper(self, view: "_PlanningView", target: Mix) -> dict[PoolName, int]:
        """Return the first step of a change to a cheaper mix of pools, in which no pool shrinks.

        Return the present numbers if the mix saves too little, or if the budget does not allow the old and the new
        replicas at the same time.
        """
        wanted = view.wanted
        now = sum(each.cost * each.seen.wanted for each in view.pools)
        then = sum(each.cost * count for each, count in zip(view.pools, target.replicas, strict=True))
        grown = {name: max(count, wanted[name]) for name, count in view.named(target).items()}
        saves = then <= now * (1.0 - self._settings.mix_saving)
        return grown if saves and self._fits(view, grown) else wanted

    # Sizing.

    def _bounds(self, each: "_SeenPool") -> tuple[int, int]:
        """Return the minimum and the maximum number of replicas that a pool may have at present."""
        if each.seen.pinned:
            return each.seen.wanted, each.seen.wanted
        most = each.pool.most
        if self._pool_history.blocked(each.pool.name, self._elapsed):
            most = min(most, each.seen.ready)
        return min(each.pool.least, most), most

    def _solve(
        self,
        view: "_PlanningView",
        rate: float,
        least: Mapping[PoolName, int] | None = None,
        most: Mapping[PoolName, int] | None = None,
        *,
        drained: bool = False,
    ) -> Mix | None:
        """Return the cheapest mix that serves a rate, or as much of it as the limits allow.

        Return None if the limits contradict each other.

        `least` and `most` may narrow the bounds of the pools. If `drained` is true, draining and removed replicas do
        not count in the budget.
        """
        candidates = []
        for each in view.pools:
            low, high = self._bounds(each)
            if most is not None:
                high = max(low, min(high, most[each.pool.name]))
            if least is not None:
                low = min(high, max(low, least[each.pool.name]))
            candidates.append(each.candidate(low, high, drained=drained))
        mix = solve(candidates, rate, lambda pool, count: self._rate(view, pool, count), self._budget)
        if mix is None or mix.served >= rate * ENOUGH_SERVED:
            return mix
        return self._beyond_goals(view, candidates, rate, mix)

    def _beyond_goals(self, view: "_PlanningView", candidates: Sequence[Candidate], rate: float, mix: Mix) -> Mix:
        """Return the mix with more replicas in the pools that are not at their maximum, for the requests beyond its served rate (rule 8).

        Pools at their maximum serve these requests, too, only later than the goals ask. So the other phase needs replicas for them.
        """
        full = {
            each.pool.name for each, count in zip(candidates, mix.replicas, strict=True) if count and count >= each.most
        }

        def rates(pool: PlannedPool, replicas: int) -> float:
            if pool.name in full:
                return self._model.throughput(pool, view.load, replicas)
            return self._rate(view, pool, replicas)

        at_least = [structs.replace(each, least=count) for each, count in zip(candidates, mix.replicas, strict=True)]
        beyond = solve(at_least, rate, rates, self._budget)
        return mix if beyond is None else structs.replace(beyond, served=mix.served)

    def _rate(self, view: "_PlanningView", pool: PlannedPool, replicas: int) -> float:
        return self._model.highest_rate(pool, view.load, replicas)

    def _served(self, view: "_PlanningView", replicas: Mapping[PoolName, int], rate: float) -> float:
        candidates = [each.candidate(0, each.seen.wanted) for each in view.pools]
        counts = [replicas[each.pool.name] for each in view.pools]
        return served(candidates, counts, rate, lambda pool, count: self._rate(view, pool, count))

    def _fits(self, view: "_PlanningView", replicas: Mapping[PoolName, int]) -> bool:
        candidates = [each.candidate(0, each.seen.wanted) for each in view.pools]
        return within_budget(candidates, [replicas[each.pool.name] for each in view.pools], self._budget)

    def _load_share(self, view: "_PlanningView", phase: Role) -> float:
        """Return the present rate, as a share of the rate that the ready replicas of a phase can serve.

        The rate that these replicas can serve is the prediction of the capacity model, without the effect of earlier
        missed goals. Return 0 if no replica is ready.
        """
        most = sum(
            self._rate(view, each.pool, each.seen.ready)
            for each in view.pools
            if each.seen.ready and each.pool.role in {phase, Role.BOTH}
        )
        return self._demand.recent_rate * self._model.used_share(phase) / most if most else 0.0

    def _shortage(self, view: "_PlanningView", needed: Mix) -> PlanCondition:
        """Return a condition which says that the limits do not allow enough replicas for the rate.

        The condition names the limit: the pinned pools, a budget, or the maximum number of replicas of the pools.
        """
        expected = f"{view.rate:.3g} requests a second are expected"
        if pins := list(self._limiting_pins(view, needed)):
            field = ", ".join(f"pools.{each.pool.name}" for each in pins)
            numbers = ", ".join(f"{each.pool.name} at {each.seen.wanted}" for each in pins)
            return PlanCondition(
                type=PlanConditionType.BUDGET_EXHAUSTED,
                field=field,
                message=f"{field}: {expected}, and the pinned numbers ({numbers}) allow for {needed.served:.3g}",
            )
        unlimited = solve(
            [each.candidate(*self._bounds(each)) for each in view.pools],
            view.rate,
            lambda pool, count: self._rate(view, pool, count),
            PlanBudget(),
        )
        by_pools = unlimited is None or unlimited.served <= needed.served * (1.0 + 1e-6)
        field = "pools.most" if by_pools else _budget_fields(self._budget)
        return PlanCondition(
            type=PlanConditionType.BUDGET_EXHAUSTED,
            field=field,
            message=f"{field}: {expected}, and the limits allow for {needed.served:.3g}",
        )

    def _limiting_pins(self, view: "_PlanningView", needed: Mix) -> Iterator["_SeenPool"]:
        """Yield the pinned pools without whose pin more of the rate would be served, even if all other limits hold."""
        for pinned in view.pools:
            if not pinned.seen.pinned:
                continue
            candidates = [
                each.candidate(each.pool.least, max(each.pool.most, each.seen.wanted))
                if each is pinned
                else each.candidate(*self._bounds(each))
                for each in view.pools
            ]
            free = solve(candidates, view.rate, lambda pool, count: self._rate(view, pool, count), self._budget)
            if free is not None and free.served > needed.served * (1.0 + 1e-6):
                yield pinned


class _SeenPool(Struct, frozen=True):
    pool: PlannedPool
    seen: PoolObservation
    cost: float
    """Cost of one replica that the settings minimise (`PlannedPool.cost`)."""

    def candidate(self, least: int, most: int, *, drained: bool = False) -> Candidate:
        return Candidate(
            pool=self.pool,
            least=least,
            most=max(least, most),
            cost=self.cost,
            now=self.seen.wanted,
            held=0 if drained else max(self.seen.wanted, self.seen.ready),
            draining=0 if drained else self.seen.draining,
        )

    @property
    def under_way(self) -> bool:
        return not self.seen.pinned and bool(
            self.seen.pending
            or self.seen.draining
            or self.seen.ready > self.seen.wanted
            or self.seen.why in {PoolGapReason.NOT_TAKEN_UP, PoolGapReason.UNDER_WAY}
        )


class _PlanningView(Struct, frozen=True, kw_only=True):
    """Holds the state of the pools and the load from which one decision is made."""

    pools: tuple[_SeenPool, ...]
    load: OfferedLoad
    level: float
    """Mean arrivals per second since the last detected change of the rate (`DemandHistory.rate`)."""

    forecast: float | None
    """Expected requests per second at the end of `horizon`; None if no forecast is used."""

    no_forecast: str
    """Why no forecast is used; empty if it is used."""

    rate: float
    """Requests per second for which the pools are sized: the larger one of `level` and `forecast`, or 0 if the load has
    ended."""

    highest: float
    """Highest `rate` during the last cool-down, or 0 if the load has ended."""

    horizon: float
    """Seconds from the end of the demand window until replicas that are requested now would serve."""

    quiet: bool
    """True if the load has ended: no request has arrived for a while, and none waits or runs."""

    @property
    def wanted(self) -> dict[PoolName, int]:
        return {each.pool.name: each.seen.wanted for each in self.pools}

    @property
    def under_way(self) -> bool:
        return any(each.under_way for each in self.pools)

    def named(self, mix: Mix) -> dict[PoolName, int]:
        return {each.pool.name: count for each, count in zip(self.pools, mix.replicas, strict=True)}


def _decision(
    now: Nanos,
    view: _PlanningView,
    replicas: Mapping[PoolName, int],
    reason: DecisionReason,
    said: str,
    conditions: Sequence[PlanCondition],
) -> PlanDecision:
    shape = view.load.shape
    ahead = view.no_forecast if view.forecast is None else f"{view.forecast:.3g} expected in {view.horizon:.0f} s"
    message = (
        f"{view.level:.3g} requests a second, {ahead}, of "
        f"{shape.prompt_tokens:.0f} prompt and {shape.answer_tokens:.0f} answer tokens"
    )
    return PlanDecision(
        at=now,
        replicas=dict(replicas),
        reason=reason,
        message=f"{said}; {message}" if said else message,
        numbers={
            "rate": view.level,
            **({} if view.forecast is None else {"forecast": view.forecast}),
            "planned_rate": view.rate,
            "highest_rate": view.highest,
            "horizon_seconds": view.horizon,
            "prompt_tokens": shape.prompt_tokens,
            "cached_tokens": shape.cached_tokens,
            "answer_tokens": shape.answer_tokens,
            "dispersion": view.load.dispersion,
            "dollars_per_hour": sum(each.pool.replica_dollars * replicas[each.pool.name] for each in view.pools),
            **_watts(view, replicas),
        },
        conditions=tuple(conditions),
    )


def _watts(view: _PlanningView, replicas: Mapping[PoolName, int]) -> dict[str, float]:
    """Return the number `watts` of a decision; nothing if the power of a pool with replicas is unknown."""
    drawn = [each.pool.replica_watts * count for each in view.pools if (count := replicas[each.pool.name])]
    return {"watts": sum(drawn, 0.0)} if all(drawn) else {}


def _contradiction(budget: PlanBudget) -> PlanCondition:
    field = _budget_fields(budget)
    return PlanCondition(
        type=PlanConditionType.BUDGET_EXHAUSTED,
        field=field,
        message=f"{field}: no numbers of replicas keep the floors of the pools, their pins and these limits",
    )


def _budget_fields(budget: PlanBudget) -> str:
    set_fields = [f"budget.{name}" for name in budget.__struct_fields__ if getattr(budget, name) is not None]
    return ", ".join(set_fields) or "pools.most"


def _idle(demand: DemandWindow) -> bool:
    return not demand.queued and not any(each.running or each.waiting for each in demand.workers)
