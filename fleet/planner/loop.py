"""Planner loop: the async shell around a scaling rule, which observes pools, asks for decisions, and carries out plans.

Rules:

1. Unless its mode is `off`, every planner asks its rule for decisions, also if it does not lead. So the rule knows the
   past demand when the planner begins to lead. Only the leader applies plans, and only in active mode. The election is
   in `fleet.planner.election`.
2. Only one plan is carried out at a time. It is superseded by a decision that requests more replicas of some pool than the plan
   or, for a pool that is not in the plan, than the pool's present number. Every other decision has no effect while the plan is
   carried out. The new plan also contains the pools of the superseded plan whose replicas do not all serve yet. So these
   replicas are rolled back too if they do not serve in time.
3. A leader continues unfinished plans of earlier leaders, one after another: it writes the plan under another id, waits for
   the replicas, and rolls back those that do not serve in time. It looks for such plans whenever it carries out no plan,
   because a write of an earlier leader may arrive late (`fleet.planner.leading`). In the same way, it continues
   the written part of its own plans that ended by a conflict, a refusal or a failure, or were superseded during their write.
4. The loop limits the numbers of each decision to the bounds of the pools, because a rule may have a fault. Pinned pools
   keep their number in a decision, even if it is out of the bounds, and plans do not contain them.
5. A plan that only shrinks pools is held back if its rehearsal misses a goal that the present pools keep. The
   rehearsal runs in the simulator (`fleet.app.rehearsal`).
6. If the orchestrator does not answer, the rule is not asked, and the numbers that were written last stay. The numbers
   also stay if the rule raises an error: the error becomes a condition, and the rule is called again in the next round.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Never, Protocol

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.duration_counts import Counts, added, bucket_of, interpolated
from fleet.planner.decisions import (
    DecisionReason,
    PlanCondition,
    PlanConditionType,
    PlanDecision,
    ScalingRule,
)
from fleet.planner.demand import DemandWindow
from fleet.planner.election.ports import PlanElection
from fleet.planner.execution import PlanOutcome, rollback_id
from fleet.planner.leading import LeaderConnector, LeadershipLost, adopted_id, recorded_id
from fleet.planner.messages import Observation, Plan, PlanId, PoolName, PoolObservation, shortened
from fleet.planner.ports import (
    CALL_SECONDS,
    ConnectorError,
    OrchestratorGone,
    PlanConflict,
    PlanConnector,
    PlanRefused,
    Rehearsal,
    RehearsalSkipped,
)
from fleet.planner.records import PlanHistory, PlannerStatus, PlanRecord, PlanScore, PlanState
from fleet.planner.server import carry_out
from fleet.planner.settings import PlannerMode, PlannerSettings
from fleet.planner.sizing.prediction_error import prediction_error
from fleet.planner.sources.ports import DemandSource

log = logging.getLogger(__name__)

SHOWN_PLANS = 20
LEARNING_SHARE = 0.2
"""Weight of the latest plan in the running mean of the errors of predicted latencies."""

EXTRA_SECONDS = 30.0
"""Seconds that an orchestrator gets to read a plan and act on it, in addition to the time in which replicas start or
drain."""

STARTING_SECONDS = 30.0
"""Seconds after the start of the planner in which no condition reports that the orchestrator has not answered yet, because
the orchestrator may still be starting too."""

OBSERVE_SECONDS = 2 * CALL_SECONDS
"""Time limit in seconds for an observation. A connector has a shorter time limit of its own; this limit is for a
connector that exceeds it."""

RETRY_SECONDS = 10.0
"""Seconds to wait before the next plan begins, if the last plan was held back, failed, or ended without being settled."""

KNOWN_PLANS = 16
"""Number of plan ids that the loop remembers for each pool. The loop does not adopt these plans."""

_ENDED = {
    PlanOutcome.SETTLED: PlanState.SETTLED,
    PlanOutcome.ROLLED_BACK: PlanState.ROLLED_BACK,
    PlanOutcome.UNSETTLED: PlanState.UNSETTLED,
}


class RuleRunner(Protocol):
    """Port of a function that asks a rule for a decision, in a thread or in the event loop."""

    async def __call__(
        self, rule: ScalingRule, now: Nanos, demand: DemandWindow, seen: Observation, /
    ) -> PlanDecision: ...


async def decide_in_thread(rule: ScalingRule, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
    """Ask a rule for a decision in a thread, because the rule may compute for a tenth of a second or more.

    The caller must not begin another call before this one has ended, because rules are not thread-safe.
    """
    return await asyncio.to_thread(rule.decide, now, demand, seen)


class _PlanInFlight(Struct):
    """Holds the plan that is carried out now, or only rehearsed (in shadow mode), with its record and its task."""

    record: PlanRecord
    plan: Plan
    task: asyncio.Task[None]


class _ScoredPlan(Struct):
    """Collects the measured latencies and costs after a plan, for its score."""

    record: PlanRecord
    until: Nanos
    ttft: Counts = ()
    tpot: Counts = ()
    held_seconds: float = 0.0  # GPU-seconds that the replicas have used since the end of the plan
    dollars: float = 0.0
    overflow_dollars: float = 0.0
    seconds: float = 0.0


class DecisionRecorder(Protocol):
    """Port that records decisions and plans for a later replay."""

    def decided(self, now: Nanos, demand: DemandWindow, seen: Observation, decision: PlanDecision) -> None:
        """Record a decision together with the demand and the observation from which it was made."""
        ...

    def planned(self, plan: PlanRecord) -> None:
        """Record a plan as it is now; called each time that its record changes."""
        ...


class PlannerLoop:
    """Runs the planner of one model: observes its pools, asks for decisions, and carries out plans (rules 1 to 6)."""

    def __init__(
        self,
        settings: PlannerSettings,
        rule: ScalingRule,
        demand: DemandSource,
        connector: PlanConnector,
        election: PlanElection,
        history: PlanHistory,
        clock: Clock,
        wall_ms: Callable[[], int],
        *,
        identity: str,
        rehearsal: Rehearsal | None = None,
        recorder: DecisionRecorder | None = None,
        decide: RuleRunner = decide_in_thread,
    ) -> None:
        """Create the loop without starting it; the caller has to call `run`.

        Args:
            settings: The settings of the planner.
            rule: Decides the sizes of pools.
            demand: Source of the model's demand. The caller has to run it.
            connector: Connector to the orchestrator.
            election: Says whether this planner leads. The caller has to run it.
            history: Keeps the records of plans.
            clock: Clock for intervals and deadlines.
            wall_ms: Returns the wall-clock time in milliseconds since 1970, for ids of plans, records and the status.
            identity: Name of this planner.
            rehearsal: Tries plans before they are applied, or None if plans are not rehearsed.
            recorder: Records decisions and plans, or None if nothing is recorded.
            decide: Asks the rule for a decision, in a thread or in the event loop.
        """
        self._settings = settings
        self._rule = rule
        self._demand = demand
        self._connector = connector
        self._election = election
        self._history = history
        self._clock = clock
        self._wall_ms = wall_ms
        self._identity = identity
        self._rehearsal = rehearsal
        self._recorder = recorder
        self._decide = decide
        self._pools = {pool.name: pool for pool in settings.pools}
        self._in_flight: _PlanInFlight | None = None
        # Ids of plans that this planner does not adopt while it leads: its own, and those whose pools it has seen settled.
        self._known: defaultdict[PoolName, deque[PlanId]] = defaultdict(lambda: deque(maxlen=KNOWN_PLANS))
        self._retry_at = Nanos(0)
        self._shadowed: Mapping[PoolName, int] = {}
        self._scored: deque[_ScoredPlan] = deque(maxlen=8)
        self._numbered = 0
        self._decision: PlanDecision | None = None
        self._window: DemandWindow | None = None
        self._seen: Observation | None = None
        self._trouble: PlanCondition | None = None
        self._began = Nanos(0)  # instant at which `run` began
        self._waiting_for = ""
        self._overflow = {"requests": 0.0, "dollars": 0.0}
        self.errors: dict[str, float] = {}
        """Running means of the errors of the predicted latencies (`fleet.planner.sizing.prediction_error`), by name: `ttft` and
        `tpot`. A name is missing until the prediction of a rehearsal was compared with a measured latency."""

        self.rule_failures = 0
        """Number of rounds in which the scaling rule, or the recording of its decision, raised an error."""

        self.ended: dict[PlanState, int] = dict.fromkeys(PlanState, 0)
        """Number of plans by the state in which they ended."""

        self.decided: dict[DecisionReason, int] = dict.fromkeys(DecisionReason, 0)
        """Number of decisions by reason."""

    async def run(self) -> Never:
        """Plan until cancelled; the next leader then continues a plan that is unfinished."""
        self._began = self._clock.now()
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    await self._round(tasks)
                    await asyncio.sleep(self._rule.interval / SECOND)
            finally:
                self._stop_plan(PlanState.HANDED_OVER, "this planner ended")
        raise AssertionError("the loop never ends")

    def status(self) -> PlannerStatus:
        """Return the present state of the planner."""
        decision, window = self._decision, self._window
        conditions = () if decision is None else decision.conditions
        return PlannerStatus(
            planner=self._identity,
            model=self._settings.model,
            mode=self._settings.mode,
            leads=self._election.leads(),
            rule=str(self._settings.rule.__struct_config__.tag),
            at_ms=self._wall_ms(),
            reason=None if decision is None else decision.reason,
            message=self._waiting_for if decision is None else decision.message,
            replicas={} if decision is None else decision.replicas,
            numbers={} if decision is None else decision.numbers,
            conditions=conditions if self._trouble is None else (self._trouble, *conditions),
            pools=() if self._seen is None else self._planned(self._seen).pools,
            demand={} if window is None else self._demand_numbers(window),
            overflow=dict(self._overflow),
            error=max(self.errors.values(), default=None),
            errors=dict(self.errors),
            plans=self._history.latest(SHOWN_PLANS),
        )

    def explain(self, plan: PlanId) -> PlanRecord | None:
        """Return the record of a plan, also by an id of its adoption, or None if there is none.

        The call may read a file and block.
        """
        return self._history.find(recorded_id(plan))

    # Deciding.

    async def _round(self, tasks: asyncio.TaskGroup) -> None:
        if self._settings.mode is PlannerMode.OFF:
            self._window = self._demand.window()
            return
        try:
            async with asyncio.timeout(OBSERVE_SECONDS):
                seen = self._planned(await self._connector.observe())
        except (ConnectorError, TimeoutError) as error:
            self._not_observed(str(error) or f"no answer within {OBSERVE_SECONDS:g} s")
            return
        now, window = self._clock.now(), self._demand.window()
        self._overflow["requests"] += window.overflowed
        self._overflow["dollars"] += window.overflow_dollars
        try:
            decided = await self._decide(self._rule, now, window, seen)
            if self._recorder is not None:
                self._recorder.decided(now, window, seen, decided)
            decision = self._bounded(decided, seen)
        except Exception as error:  # a rule may raise any exception, which must not end the planner
            self.rule_failures += 1
            message = f"{type(error).__name__}: {error}"
            trouble = PlanCondition(type=PlanConditionType.RULE_FAILED, field="rule", message=message)
            if self._trouble != trouble:
                log.exception("rule failed, replicas stay as they are")
            self._trouble = trouble
            return
        self._trouble = None
        if self._decision is None or self._decision.reason is not decision.reason:
            log.info("decision", extra={"reason": decision.reason, "why": decision.message})
        self._decision, self._window, self._seen = decision, window, seen
        self.decided[decision.reason] += 1
        self._collect_scores(now, window, seen)
        if self._settings.mode is PlannerMode.SHADOW:
            self._shadow(decision, window, seen, tasks)
        elif self._election.leads():
            self._act(decision, window, seen, tasks)
        else:
            self._known.clear()
            self._stop_plan(PlanState.HANDED_OVER, "another planner leads")

    def _not_observed(self, cause: str) -> None:
        """Report in a condition that the orchestrator does not answer.

        If the pools were never observed, report no condition in the first STARTING_SECONDS of the planner, because the
        orchestrator may still be starting too.
        """
        if self._seen is None and self._clock.now() < self._began + round(STARTING_SECONDS * SECOND):
            self._waiting_for = f"waits for the orchestrator, which may still be starting ({shortened(cause)})"
            return
        trouble = PlanCondition(type=PlanConditionType.CONNECTOR_FAILED, field="target", message=cause)
        if self._trouble != trouble:
            log.warning("pools not observed", extra={"cause": trouble.message})
        self._trouble = trouble

    def _planned(self, seen: Observation) -> Observation:
        return Observation(tuple(each for each in seen.pools if each.name in self._pools))

    def _bounded(self, decision: PlanDecision, seen: Observation) -> PlanDecision:
        """Return the decision without pools that the settings do not name, and with its numbers limited to the bounds of the pools.

        A pinned pool keeps its number, because the bounds are those of the planner, which does not change this pool.
        """
        pinned = {each.name: each.wanted for each in seen.pools if each.pinned}
        replicas = {
            name: pinned.get(name, min(max(count, self._pools[name].least), self._pools[name].most))
            for name, count in decision.replicas.items()
            if name in self._pools
        }
        return decision if replicas == decision.replicas else structs.replace(decision, replicas=replicas)

    def _changes(self, decision: PlanDecision, seen: Observation) -> dict[PoolName, int]:
        """Return the new number of replicas of each pool that a decision changes, without pinned pools.

        If the reason of the decision is `NO_SIGNAL`, return no pool, even if the number of a pool is out of its bounds.
        """
        if decision.reason is DecisionReason.NO_SIGNAL:
            return {}
        return {
            each.name: decision.replicas[each.name]
            for each in seen.pools
            if not each.pinned and each.name in decision.replicas and decision.replicas[each.name] != each.wanted
        }

    def _shadow(
        self, decision: PlanDecision, window: DemandWindow, seen: Observation, tasks: asyncio.TaskGroup
    ) -> None:
        changes = self._changes(decision, seen)
        if changes == self._shadowed or (self._in_flight is not None and not self._in_flight.task.done()):
            return
        self._shadowed = changes
        if not changes:
            return
        record = self._new_record(decision, changes, seen, PlanState.SHADOW)
        self._keep(record)
        plan = self._plan_of(record, seen)

        async def rehearse() -> None:
            known = await self._rehearsed(record, window, seen)
            self._finish(structs.replace(known, ended_ms=self._wall_ms()), score=True)

        self._in_flight = _PlanInFlight(record, plan, tasks.create_task(rehearse()))

    def _act(self, decision: PlanDecision, window: DemandWindow, seen: Observation, tasks: asyncio.TaskGroup) -> None:
        if self._in_flight is not None and self._in_flight.task.done():
            self._in_flight = None
        if self._in_flight is None:
            self._adopt(seen, tasks)
        changes = self._changes(decision, seen)
        if (flying := self._in_flight) is not None:
            aim = {each.name: each.wanted for each in seen.pools} | flying.plan.replicas
            if decision.reason is DecisionReason.NO_SIGNAL or not any(
                count > aim.get(name, 0) for name, count in decision.replicas.items() if not _pinned(seen, name)
            ):
                return
            self._stop_plan(PlanState.SUPERSEDED, f"a higher need supersedes it: {decision.message}")
            # Its write may still arrive. The new plan then ends by a conflict, and the superseded plan is adopted.
            self._forget(flying.plan, seen)
            # The write of an adopted plan may still be under way, so its pools have the earlier id or the new one.
            superseded = recorded_id(flying.plan.id)
            pending = {
                each.name: each.wanted for each in seen.pools if recorded_id(each.plan) == superseded and each.pending
            }
            changes = {name: count for name, count in pending.items() if not _pinned(seen, name)} | changes
        if changes and self._clock.now() >= self._retry_at:
            state = PlanState.UNDER_WAY if self._rehearsal is None else PlanState.REHEARSED
            record = self._new_record(decision, changes, seen, state)
            self._start(record, self._plan_of(record, seen), window, seen, tasks)

    def _adopt(self, seen: Observation, tasks: asyncio.TaskGroup) -> None:
        """Continue an unfinished plan of an earlier leader, or one of this planner that `_forget` has released, if there is one.

        The plan of a pool that was seen settled or pinned is known from then on. So it is not adopted if a replica of the pool
        fails later.
        """
        open_pools = list[PoolObservation]()
        for each in seen.pools:
            if each.unfinished and not each.pinned and each.plan not in self._known[each.name]:
                open_pools.append(each)
            else:
                self._know(each.name, each.plan)
        if not open_pools or self._clock.now() < self._retry_at:
            return
        plan_id = recorded_id(open_pools[0].plan)
        # A leader that ended while it adopted the plan may have written the new id for only some of the pools.
        alike = [each for each in open_pools if recorded_id(each.plan) == plan_id]
        plan = Plan(
            id=adopted_id(plan_id, self._wall_ms()),
            replicas={each.name: each.wanted for each in alike},
            within=self._within({each.name: (each.ready, each.wanted) for each in alike}),
        )
        before = Observation(
            tuple(
                structs.replace(each, wanted=each.wanted if each.before is None else each.before)
                if each in alike
                else each
                for each in seen.pools
            )
        )
        record = self._history.find(plan_id) or PlanRecord(
            id=plan_id,
            at_ms=self._wall_ms(),
            planner=self._identity,
            mode=self._settings.mode,
            state=PlanState.UNDER_WAY,
            reason=DecisionReason.IN_FLIGHT,
            message="an earlier leader wrote this plan",
            before={each.name: each.wanted for each in before.pools if each.name in plan.replicas},
            replicas=dict(plan.replicas),
        )
        log.info("plan adopted", extra={"plan": plan_id})
        self._start(structs.replace(record, state=PlanState.UNDER_WAY, ended_ms=0), plan, None, before, tasks)

    def _know(self, pool: PoolName, plan: PlanId) -> None:
        """Remember that this planner does not adopt a plan for a pool; the id that was remembered last is kept longest."""
        known = self._known[pool]
        with suppress(ValueError):
            known.remove(plan)
        known.append(plan)

    def _forget(self, plan: Plan, seen: Observation) -> None:
        """Let this planner adopt the written part of one of its own plans, because no task carries the plan out any more.

        A pool that was seen settled by this plan is left out, so that the plan is not adopted if a replica of the pool fails later.
        """
        for name in plan.replicas:
            pool = seen.pool(name)
            if plan.id in self._known[name] and not (pool is not None and pool.settled and pool.plan == plan.id):
                self._known[name].remove(plan.id)

    # Carrying out plans.

    def _start(
        self,
        record: PlanRecord,
        plan: Plan,
        window: DemandWindow | None,
        seen: Observation,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._keep(record)
        for name in plan.replicas:
            self._know(name, rollback_id(plan.id))
            self._know(name, plan.id)
        log.info("plan begins", extra={"plan": plan.id, "replicas": dict(plan.replicas), "why": record.message})
        self._in_flight = _PlanInFlight(record, plan, tasks.create_task(self._carry_out(record, plan, window, seen)))

    async def _carry_out(self, record: PlanRecord, plan: Plan, window: DemandWindow | None, seen: Observation) -> None:
        if window is not None:
            record = await self._rehearsed(record, window, seen)
            if self._held_back(record, seen):
                detail = "the rehearsal misses a goal that the present pools keep"
                self._retry_at = Nanos(self._clock.now() + round(RETRY_SECONDS * SECOND))
                self._end(record, PlanState.HELD_BACK, detail)
                return
            if not self._election.leads():
                self._hand_over(record, "another planner leads")
                return
            record = structs.replace(record, state=PlanState.UNDER_WAY)
            self._note(record)
        state, detail = PlanState.FAILED, ""
        try:
            connector = LeaderConnector(self._connector, self._election)
            outcome, last = await carry_out(connector, plan, seen, self._clock, self._show, self._warn)
            state = _ENDED[outcome]
            detail = "; ".join(each.message for each in last.pools if each.name in plan.replicas and each.message)
        except LeadershipLost as error:
            self._hand_over(record, str(error))
            return
        except PlanConflict as error:
            state, detail = PlanState.CONFLICT, str(error)
        except PlanRefused as error:
            state, detail = PlanState.REFUSED, str(error)
            if (refused := seen.pool(error.pool)) is not None:  # do not adopt its plan again
                self._know(refused.name, refused.plan)
        except OrchestratorGone as error:
            detail = str(error)
        except ConnectorError as error:
            detail = str(error)
        if state not in _ENDED.values():
            self._forget(plan, seen)
        if state is not PlanState.SETTLED:
            self._retry_at = Nanos(self._clock.now() + round(RETRY_SECONDS * SECOND))
        self._end(record, state, detail)

    def _hand_over(self, record: PlanRecord, detail: str) -> None:
        """End a plan because this planner does not lead; if it leads again, it also adopts its own unfinished plans."""
        self._known.clear()
        self._end(record, PlanState.HANDED_OVER, detail)

    def _held_back(self, record: PlanRecord, seen: Observation) -> bool:
        wanted = {each.name: each.wanted for each in seen.pools}
        if record.rehearsal is None or any(count > wanted.get(name, 0) for name, count in record.replicas.items()):
            return False
        share, goals = self._settings.goals.percentile, record.rehearsal
        return goals.planned.attainment < share <= goals.present.attainment

    async def _rehearsed(self, record: PlanRecord, window: DemandWindow, seen: Observation) -> PlanRecord:
        """Rehearse a plan; return its record with the result, or with the reason why there is no result."""
        if self._rehearsal is None:
            return structs.replace(record, rehearsal_skipped="rehearsals are off")
        present = {each.name: each.ready + each.pending for each in seen.pools}
        rate = max(record.numbers.get("rate", 0.0), window.rate)
        try:
            async with asyncio.timeout(self._settings.rehearsal.limit_seconds):
                found = await self._rehearsal.rehearse(self._demand.sample(), rate, present, present | record.replicas)
        except TimeoutError:
            why = f"it took longer than {self._settings.rehearsal.limit_seconds:g} s"
        except RehearsalSkipped as error:
            why = str(error)
        else:
            return structs.replace(record, rehearsal=found)
        log.info("rehearsal skipped", extra={"plan": record.id, "cause": why})
        return structs.replace(record, rehearsal_skipped=why)

    def _stop_plan(self, state: PlanState, detail: str) -> None:
        flying, self._in_flight = self._in_flight, None
        if flying is not None and not flying.task.done():
            flying.task.cancel()
            self._end(flying.record, state, detail)

    def _keep(self, record: PlanRecord) -> None:
        self._history.keep(record)
        if self._recorder is not None:
            self._recorder.planned(record)

    def _note(self, record: PlanRecord) -> None:
        if self._in_flight is not None and self._in_flight.record.id == record.id:
            self._in_flight.record = record
        self._keep(record)

    def _end(self, record: PlanRecord, state: PlanState, detail: str) -> None:
        detail = shortened(detail)  # it may quote the orchestrator
        log.info("plan ended", extra={"plan": record.id, "state": state, "detail": detail})
        ended = structs.replace(record, state=state, detail=detail, ended_ms=self._wall_ms())
        self._finish(ended, score=state is PlanState.SETTLED)

    def _finish(self, record: PlanRecord, *, score: bool) -> None:
        self.ended[record.state] += 1
        if score:
            due = self._wall_ms() + round(self._settings.score_seconds * 1000)
            record = structs.replace(record, score_due_ms=due)
        self._keep(record)
        if score:
            until = Nanos(self._clock.now() + round(self._settings.score_seconds * SECOND))
            self._scored.append(_ScoredPlan(record, until))

    def _new_record(
        self, decision: PlanDecision, changes: Mapping[PoolName, int], seen: Observation, state: PlanState
    ) -> PlanRecord:
        self._numbered += 1
        wall = self._wall_ms()
        return PlanRecord(
            id=PlanId(f"plan-{wall}-{self._numbered}"),
            at_ms=wall,
            planner=self._identity,
            mode=self._settings.mode,
            state=state,
            reason=decision.reason,
            message=decision.message,
            before={each.name: each.fallback for each in seen.pools if each.name in changes},
            replicas=dict(changes),
            numbers=decision.numbers,
            conditions=decision.conditions,
        )

    def _plan_of(self, record: PlanRecord, seen: Observation) -> Plan:
        sizes = {
            each.name: (each.fallback, record.replicas[each.name])
            for each in seen.pools
            if each.name in record.replicas
        }
        return Plan(id=record.id, replicas=record.replicas, within=self._within(sizes))

    def _within(self, sizes: Mapping[PoolName, tuple[int, int]]) -> Nanos:
        """Return the time that a plan may take; `sizes` has the number before and after the plan for each pool.

        A growing pool may take twice its start-up time, and a shrinking pool its drain time. The result is the
        longest one of these times, plus EXTRA_SECONDS.
        """
        longest = 0.0
        for name, (before, after) in sizes.items():
            pool = self._pools[name]
            longest = max(longest, 2 * pool.start_seconds if after > before else pool.drain_seconds)
        return Nanos(round((longest + EXTRA_SECONDS) * SECOND))

    def _show(self, seen: Observation) -> None:
        """Show these pools from now on.

        The pools of the last decision would contradict the state of the plan, which changes between two decisions.
        """
        self._seen = self._planned(seen)

    def _warn(self, cause: str) -> None:
        log.warning("plan delayed", extra={"cause": shortened(cause)})

    # Scoring: measuring the effects of plans.

    def _collect_scores(self, now: Nanos, window: DemandWindow, seen: Observation) -> None:
        for scored in list(self._scored):
            scored.ttft, scored.tpot = added(scored.ttft, window.ttft), added(scored.tpot, window.tpot)
            held = {each.name: each.wanted + each.draining for each in seen.pools}
            scored.held_seconds += window.seconds * sum(self._pools[name].replica_gpus * n for name, n in held.items())
            scored.dollars += (
                window.seconds / 3600 * sum(self._pools[name].replica_dollars * n for name, n in held.items())
            )
            scored.overflow_dollars += window.overflow_dollars
            scored.seconds += window.seconds
            if now >= scored.until:
                self._scored.remove(scored)
                self._score(scored)

    def _score(self, scored: _ScoredPlan) -> None:
        goals, record = self._settings.goals, scored.record
        ttft, tpot = interpolated(scored.ttft, goals.percentile), interpolated(scored.tpot, goals.percentile)
        predicted = None
        if record.rehearsal is not None:
            predicted = record.rehearsal.present if record.mode is PlannerMode.SHADOW else record.rehearsal.planned
        errors = (
            _error(None if predicted is None else predicted.ttft_seconds, ttft),
            _error(None if predicted is None else predicted.tpot_seconds, tpot),
        )
        shares = [
            share
            for counts, goal in ((scored.ttft, goals.ttft_seconds), (scored.tpot, goals.tpot_seconds))
            if (share := _share_within(counts, goal)) is not None
        ]
        hours = max(scored.seconds, 1e-9) / 3600
        score = PlanScore(
            ttft_seconds=ttft,
            tpot_seconds=tpot,
            attainment=min(shares, default=None),
            gpu_hours=scored.held_seconds / 3600 / hours,
            dollars=scored.dollars / hours,
            overflow_dollars=scored.overflow_dollars / hours,
            ttft_error=errors[0],
            tpot_error=errors[1],
        )
        for name, error in zip(("ttft", "tpot"), errors, strict=True):
            if error is not None:
                known = self.errors.get(name, error)
                self.errors[name] = known + LEARNING_SHARE * (error - known)
        self._keep(structs.replace(record, score=score))

    def _demand_numbers(self, window: DemandWindow) -> dict[str, float | None]:
        share = self._settings.goals.percentile
        return {
            "seconds": window.seconds,
            "rate": window.rate,
            "refused": float(window.refused),
            "abandoned": float(window.abandoned),
            "overflowed": float(window.overflowed),
            "overflow_dollars_per_hour": window.overflow_dollars_per_hour,
            "queued": float(window.queued),
            "oldest_seconds": window.oldest_seconds,
            "prompt_tokens": window.prompt_tokens / window.arrivals if window.arrivals else None,
            "answer_tokens": window.answer_tokens / window.finished if window.finished else None,
            "cached_share": window.cached_tokens / window.prompt_tokens if window.prompt_tokens else None,
            "ttft_seconds": interpolated(window.ttft, share),
            "tpot_seconds": interpolated(window.tpot, share),
            "queue_wait_seconds": interpolated(window.queue_wait, share),
        }


def _pinned(seen: Observation, name: PoolName) -> bool:
    pool = seen.pool(name)
    return pool is None or bool(pool.pinned)


def _error(predicted: float | None, observed: float | None) -> float | None:
    return None if predicted is None or observed is None else prediction_error(predicted, observed)


def _share_within(counts: Counts, seconds: float) -> float | None:
    """Return the share of durations in the buckets up to the one that contains `seconds`, or None without durations."""
    total = sum(counts)
    return sum(counts[: bucket_of(seconds) + 1]) / total if total else None
