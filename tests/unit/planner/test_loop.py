"""Tests of the planner loop: which decisions become plans, how plans end, and what a new leader does. Time is virtual."""

import asyncio
import threading
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from fleet.core.clock import SECOND, Nanos
from fleet.core.duration_counts import EDGES, bucket_of
from fleet.core.roles import Role
from fleet.core.system_clock import utc_now
from fleet.planner.connectors.folder import FolderRecords
from fleet.planner.connectors.virtual import PlanReport, PoolReport, VirtualConnector
from fleet.planner.control.metrics import PlannerMetrics
from fleet.planner.decisions import DecisionReason, PlanConditionType, PlanDecision, PlanGoals, PlannedPool
from fleet.planner.demand import DemandWindow
from fleet.planner.execution import to_write
from fleet.planner.loop import OBSERVE_SECONDS, STARTING_SECONDS, PlannerLoop, decide_in_thread
from fleet.planner.messages import MOST_TEXT, Observation, PlanId, PlanWriter, PoolName, PoolObservation
from fleet.planner.ports import (
    ConnectorUnreachable,
    PlanConflict,
    PlanRefused,
    PoolsPrediction,
    RehearsalResult,
    RehearsalSkipped,
)
from fleet.planner.records import PlanHistory, PlanState
from fleet.planner.settings import FolderTarget, LoadRuleSettings, PlannerMode, PlannerSettings, RouterDemandSettings
from fleet.sim.kernel import Kernel
from fleet.sim.virtual_loop import VirtualLoop
from operators.chart.metric_catalogue import PLANNER
from tests.support.metric_pages import differences
from tests.support.planner.rule_runner import decide_in_place
from tests.support.waiting import pace, until

DECODE, PREFILL = PoolName("decode"), PoolName("prefill")


class LoopClock:
    def now(self):
        return Nanos(round(asyncio.get_running_loop().time() * SECOND))


class Rule:
    """A planner rule whose decisions the test sets."""

    interval = Nanos(SECOND)

    def __init__(self):
        self.replicas = {DECODE: 1}
        self.reason = DecisionReason.LOAD_UP
        self.asked = 0
        self.error = None

    def decide(self, now, demand, seen):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return PlanDecision(
            at=now, replicas=dict(self.replicas), reason=self.reason, message="said so", numbers={"rate": 3.0}
        )


class Demand:
    def __init__(self):
        self.counts = ()
        self.overflow_dollars = 0.0

    def window(self):
        return DemandWindow(
            began=Nanos(0),
            ended=Nanos(SECOND),
            ttft=self.counts,
            arrivals=3,
            overflowed=int(self.overflow_dollars > 0),
            overflow_dollars=self.overflow_dollars,
        )

    def sample(self):
        return ()


class Pools:
    """An orchestrator whose new replicas are ready after `start` seconds; None: never."""

    def __init__(self, start=2.0, **wanted):
        self.start = start
        self.pools = {
            PoolName(name): PoolObservation(name=PoolName(name), wanted=n, ready=n, version="0")
            for name, n in (wanted or {"decode": 1}).items()
        }
        self.applied = []
        self.fail = None
        self._since = 0.0

    async def observe(self):
        if isinstance(self.fail, ConnectorUnreachable):
            raise self.fail
        due = self.start is not None and asyncio.get_running_loop().time() >= self._since + self.start
        if due:
            self.pools = {name: structs.replace(each, ready=each.wanted) for name, each in self.pools.items()}
        return Observation(tuple(self.pools[name] for name in sorted(self.pools)))

    async def apply(self, plan, seen):
        if self.fail is not None:
            raise self.fail
        self._since = asyncio.get_running_loop().time()
        self.applied.append((plan.id, dict(plan.replicas)))
        for name, count in plan.replicas.items():
            pool = self.pools[name]
            if (pool.plan, pool.wanted) != (plan.id, count):
                self.pools[name] = structs.replace(
                    pool,
                    wanted=count,
                    ready=min(pool.ready, count),
                    plan=plan.id,
                    before=pool.before_a_write(count),
                    version=f"{int(pool.version) + 1}",
                )


class Election:
    def __init__(self):
        self.lead = True

    def leads(self):
        return self.lead


class FixedRehearsal:
    def __init__(self, present=0.99, planned=0.99, ttft=0.2):
        self.result = RehearsalResult(
            present=_prediction(present, ttft), planned=_prediction(planned, ttft), requests=50, seconds=1.0
        )
        self.error = None
        self.hangs = False

    async def rehearse(self, sample, rate, present, planned):
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.result


def _prediction(attainment, ttft):
    return PoolsPrediction(ttft_seconds=ttft, tpot_seconds=0.01, attainment=attainment, gpu_hours=1.0, dollars=2.0)


class World:
    def __init__(self, mode=PlannerMode.ACTIVE, rehearsal=None, connector=None, **wanted):
        self.rule, self.demand, self.pools, self.election = Rule(), Demand(), Pools(**wanted), Election()
        self.history = PlanHistory(None)
        bounds = {"least": 0, "most": 6, "start_seconds": 10.0, "drain_seconds": 5.0}
        roles = {DECODE: Role.DECODE, PREFILL: Role.PREFILL}
        settings = PlannerSettings(
            model="m",
            mode=mode,
            goals=PlanGoals(ttft_seconds=1.0, tpot_seconds=0.1),
            pools=tuple(PlannedPool(name=name, role=roles[name], **bounds) for name in self.pools.pools),
            rule=LoadRuleSettings(requests_per_replica=1),
            source=RouterDemandSettings(addresses=("unix:/x",)),
            target=FolderTarget(folder="x"),
            score_seconds=5.0,
        )
        clock = LoopClock()
        self.loop = PlannerLoop(
            settings,
            self.rule,
            self.demand,
            connector or self.pools,
            self.election,
            self.history,
            clock,
            lambda: clock.now() // 1_000_000,
            identity="me",
            rehearsal=rehearsal,
            decide=decide_in_place,
        )

    @asynccontextmanager
    async def running(self):
        task = asyncio.get_running_loop().create_task(self.loop.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def states(self):
        return [each.state for each in reversed(self.history.latest(20))]


def played(world, *steps):
    """Run the planner loop in virtual time; each step is a time to wait in seconds, and a function to call then."""

    async def play():
        async with world.running():
            for seconds, action in steps:
                await pace(seconds, "virtual time of the step")
                action()

    VirtualLoop(Kernel(1), Nanos(0)).complete(play())


def nothing():
    pass


def test_event_loop_turns_while_the_rule_computes():
    begun, released = threading.Event(), threading.Event()

    class Slow(Rule):
        def decide(self, now, demand, seen):
            begun.set()
            assert released.wait(30.0), "the event loop stood still"
            return super().decide(now, demand, seen)

    async def play():
        deciding = asyncio.create_task(decide_in_thread(Slow(), Nanos(0), Demand().window(), Observation(())))
        await until(begun.is_set)
        released.set()
        return await deciding

    assert asyncio.run(play()).replicas == {DECODE: 1}


def test_decision_becomes_a_plan_that_settles():
    world = World()
    world.rule.replicas = {DECODE: 3}

    played(world, (6, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{DECODE: 3}]
    (record,) = world.history.latest(5)
    assert (record.state, record.before, record.replicas) == (PlanState.SETTLED, {DECODE: 1}, {DECODE: 3})
    assert record.rehearsal_skipped == "rehearsals are off"


def test_shown_pools_are_as_new_as_the_state_of_the_plan():
    """The rule is asked once in a minute here, so that the plan settles between two decisions."""
    world = World()
    world.rule.interval = Nanos(60 * SECOND)
    world.rule.replicas = {DECODE: 3}
    seen = []

    played(world, (10, lambda: seen.append(world.loop.status())))

    (status,) = seen
    assert [each.state for each in status.plans] == [PlanState.SETTLED]
    assert [(each.wanted, each.ready) for each in status.pools] == [(3, 3)]


def test_higher_need_supersedes_and_lower_need_waits():
    world = World()
    world.pools.start = 8.0
    world.rule.replicas = {DECODE: 3}

    def lower():
        world.rule.replicas = {DECODE: 2}

    def higher():
        world.rule.replicas = {DECODE: 5}

    played(world, (2.5, lower), (2, higher), (10, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{DECODE: 3}, {DECODE: 5}]
    assert world.states() == [PlanState.SUPERSEDED, PlanState.SETTLED]


def test_superseding_plan_rolls_earlier_pending_replicas_back():
    world = World(decode=1, prefill=1)
    world.pools.start = None
    world.rule.replicas = {DECODE: 1, PREFILL: 3}

    def higher():
        world.rule.replicas = {DECODE: 2, PREFILL: 3}

    def hold():
        world.rule.reason = DecisionReason.NO_SIGNAL

    played(world, (2.5, higher), (2, hold), (60, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [
        {PREFILL: 3},
        {DECODE: 2, PREFILL: 3},
        {DECODE: 1, PREFILL: 1},
    ]
    assert world.states() == [PlanState.SUPERSEDED, PlanState.ROLLED_BACK]
    assert world.history.latest(1)[0].before == {DECODE: 1, PREFILL: 1}


def test_replicas_that_do_not_come_are_rolled_back():
    world = World()
    world.pools.start = None
    world.rule.replicas = {DECODE: 3}

    def content():
        world.rule.replicas = {DECODE: 1}

    played(world, (2, content), (60, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{DECODE: 3}, {DECODE: 1}]
    assert world.states() == [PlanState.ROLLED_BACK]


def test_bounds_hold_whatever_the_rule_says():
    world = World()
    world.rule.replicas = {DECODE: 99, PREFILL: 3}

    played(world, (3, nothing))

    assert world.pools.applied[0][1] == {DECODE: 6}


def test_hold_changes_nothing():
    world = World()
    world.rule.replicas, world.rule.reason = {DECODE: 4}, DecisionReason.NO_SIGNAL

    played(world, (5, nothing))

    assert world.pools.applied == []


def test_pin_above_the_bounds_is_what_is_planned():
    world = World(decode=9)
    world.pools.pools[DECODE] = structs.replace(world.pools.pools[DECODE], pinned="a person did")
    world.rule.replicas = {DECODE: 9}
    seen = []

    played(world, (3, lambda: seen.append(world.loop.status())))

    assert [(each.replicas, each.pools[0].wanted) for each in seen] == [({DECODE: 9}, 9)]
    assert world.pools.applied == []


def test_pinned_pool_is_left_out_of_plans():
    world = World(decode=1, prefill=1)
    world.pools.pools[DECODE] = structs.replace(world.pools.pools[DECODE], pinned="a person did")
    world.rule.replicas = {DECODE: 4, PREFILL: 2}

    played(world, (6, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{PREFILL: 2}]


def test_standby_decides_and_writes_nothing():
    world = World()
    world.election.lead = False
    world.rule.replicas = {DECODE: 3}

    def lead():
        assert world.rule.asked > 2
        assert world.pools.applied == []
        world.election.lead = True

    played(world, (4, lead), (5, nothing))

    assert len(world.pools.applied) == 1


def test_lost_lead_hands_the_plan_over():
    world = World()
    world.pools.start = None
    world.rule.replicas = {DECODE: 3}

    def lose():
        world.election.lead = False

    played(world, (2, lose), (60, nothing))

    assert len(world.pools.applied) == 1
    assert world.states() == [PlanState.HANDED_OVER]


def test_lost_lead_ends_the_plan_before_the_next_round():
    world = World()
    world.pools.start = None
    world.rule.replicas, world.rule.interval = {DECODE: 3}, Nanos(500 * SECOND)
    told = []

    def lose():
        world.election.lead = False

    played(world, (2, lose), (1, lambda: told.append(world.states())), (400, nothing))

    assert world.pools.applied == [(world.history.latest(1)[0].id, {DECODE: 3})], "nothing was rolled back"
    assert told == [[PlanState.HANDED_OVER]]


@pytest.mark.parametrize("fault", [ConnectorUnreachable("for once"), None])
def test_stopped_leader_does_not_write_when_it_goes_on(fault):
    """The leader is suspended within a call to the orchestrator until its plan is overdue, and another planner leads."""
    world = World()
    world.pools.start = None
    world.rule.replicas, world.rule.interval = {DECODE: 3}, Nanos(500 * SECOND)
    observe, apply = world.pools.observe, world.pools.apply

    async def suspended():
        world.election.lead = False
        await pace(100, "virtual time of the suspension")
        return await observe()

    async def fails(plan, seen):
        if fault is not None:
            world.election.lead = False
            raise fault
        await apply(plan, seen)
        world.pools.observe = suspended

    world.pools.apply = fails

    played(world, (300, nothing))

    assert [replicas for _, replicas in world.pools.applied] == ([] if fault else [{DECODE: 3}])
    assert world.states() == [PlanState.HANDED_OVER]


def test_regained_lead_takes_the_unfinished_plan_up_again():
    world = World()
    world.pools.start = None
    world.rule.replicas, world.rule.interval = {DECODE: 3}, Nanos(20 * SECOND)

    def lead(now):
        return lambda: setattr(world.election, "lead", now)

    played(world, (2, lead(False)), (2, lead(True)), (20, lambda: setattr(world.pools, "start", 1.0)), (20, nothing))

    assert world.states() == [PlanState.SETTLED]
    assert world.pools.pools[DECODE].wanted == 3


@pytest.mark.parametrize(("start", "state", "last"), [(3.0, PlanState.SETTLED, 4), (None, PlanState.ROLLED_BACK, 2)])
def test_new_leader_goes_on_with_an_unfinished_plan(start, state, last):
    world = World()
    unfinished = PoolObservation(name=DECODE, wanted=4, ready=2, plan=PlanId("old"), before=2, version="7")
    world.pools.pools[DECODE] = unfinished
    world.pools.start = start
    world.rule.replicas = {DECODE: 4}

    def content():
        world.rule.replicas = {DECODE: last}

    played(world, (2, content), (60, nothing))

    assert world.history.latest(1)[0].id == "old"
    assert world.states() == [state]
    assert world.pools.applied[0] == ("old-adopted-0", {DECODE: 4}), "the earlier leader does not know this id"
    assert world.loop.explain(PlanId("old-adopted-0")) == world.history.latest(1)[0]
    assert world.pools.pools[DECODE].wanted == last


def test_half_written_adoption_is_finished_for_all_pools():
    """An earlier leader has ended between the two writes with which it adopted a plan."""
    world = World(decode=1, prefill=1)
    for name, plan in ((DECODE, "old-adopted-5"), (PREFILL, "old")):
        unfinished = PoolObservation(name=name, wanted=4, ready=1, plan=PlanId(plan), before=1, version="7")
        world.pools.pools[name] = unfinished
    world.pools.start = None
    world.rule.replicas = {DECODE: 4, PREFILL: 4}

    def content():
        world.rule.replicas = {DECODE: 1, PREFILL: 1}

    played(world, (2, content), (60, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{DECODE: 4, PREFILL: 4}, {DECODE: 1, PREFILL: 1}]
    assert [(each.id, each.state) for each in world.history.latest(5)] == [("old", PlanState.ROLLED_BACK)]


def test_plan_superseding_an_unwritten_adoption_has_its_pools():
    world = World(decode=1, prefill=1)
    unfinished = PoolObservation(name=PREFILL, wanted=4, ready=1, plan=PlanId("old"), before=1, version="7")
    world.pools.pools[PREFILL] = unfinished
    world.pools.start = None
    world.rule.replicas = {DECODE: 3, PREFILL: 4}

    def content():
        world.rule.replicas = {DECODE: 1, PREFILL: 1}

    played(world, (2, content), (60, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{DECODE: 3, PREFILL: 4}, {DECODE: 1, PREFILL: 1}]
    assert world.states() == [PlanState.SUPERSEDED, PlanState.ROLLED_BACK]


def test_late_first_write_of_an_earlier_leader_is_adopted():
    """The earlier leader was suspended before the first write of its plan, which no rule of the present leader wants."""
    world = World(decode=1, prefill=1)
    world.pools.start = None

    def write():
        for name in (DECODE, PREFILL):  # two plans
            pool = world.pools.pools[name]
            world.pools.pools[name] = structs.replace(
                pool, wanted=4, plan=PlanId(f"late-{name}"), before=1, version="1"
            )

    world.rule.replicas = {DECODE: 1, PREFILL: 1}

    played(world, (5, write), (200, nothing))

    assert [each.id for each in reversed(world.history.latest(5))] == ["late-decode", "late-prefill"]
    assert world.states() == [PlanState.ROLLED_BACK] * 2
    assert [each.wanted for each in world.pools.pools.values()] == [1, 1]


def test_replica_failing_after_its_plan_settled_adopts_nothing():
    world = World()
    settled = PoolObservation(name=DECODE, wanted=4, ready=4, plan=PlanId("old"), before=1, version="7")
    world.pools.pools[DECODE] = settled
    world.rule.replicas = {DECODE: 4}

    def fail():
        world.pools.start = None
        world.pools.pools[DECODE] = structs.replace(settled, ready=2)

    played(world, (3, fail), (100, nothing))

    assert world.pools.applied == []


@pytest.mark.parametrize(
    ("error", "first", "written"),
    [
        (PlanConflict(DECODE), PlanState.CONFLICT, ["old-adopted-10000"]),
        (PlanRefused(DECODE, "no right"), PlanState.REFUSED, []),
    ],
    ids=["conflict", "refusal"],
)
def test_adoption_is_tried_again_after_a_conflict_only(error, first, written):
    world = World()
    world.pools.pools[DECODE] = PoolObservation(
        name=DECODE, wanted=4, ready=2, plan=PlanId("old"), before=2, version="7"
    )
    world.pools.start = None
    world.pools.fail = error
    world.rule.replicas = {DECODE: 4}
    told = []

    def mend():
        told.append(world.states())
        world.pools.fail = None

    played(world, (3, mend), (20, nothing))

    assert told == [[first]]
    assert [plan for plan, _ in world.pools.applied] == written


@pytest.mark.parametrize("error", [PlanConflict(PREFILL), PlanRefused(PREFILL, "no right")])
def test_half_written_plan_that_ended_is_rolled_back(error):
    """The orchestrator writes pool by pool, and the write of the second pool fails."""
    world = World(decode=1, prefill=1)
    world.pools.start = None
    apply = world.pools.apply

    async def half(plan, seen):
        if PREFILL in plan.replicas:
            plan = structs.replace(plan, replicas={DECODE: plan.replicas[DECODE]})
            await apply(plan, seen)
            raise error
        await apply(plan, seen)

    world.pools.apply = half
    world.rule.replicas = {DECODE: 4, PREFILL: 3}

    def content():
        world.rule.replicas = {DECODE: 1, PREFILL: 1}

    played(world, (2, content), (100, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{DECODE: 4}, {DECODE: 4}, {DECODE: 1}]
    assert world.states() == [PlanState.ROLLED_BACK]


def test_plan_is_rolled_back_after_an_outage_of_the_orchestrator():
    world = World()
    world.pools.start = None
    world.rule.replicas = {DECODE: 4}

    def fail():
        world.pools.fail = ConnectorUnreachable("the API server does not answer")

    def recover():
        assert world.states() == [PlanState.FAILED]
        world.rule.replicas = {DECODE: 1}
        world.rule.reason, world.pools.fail = DecisionReason.NO_SIGNAL, None

    played(world, (2, fail), (100, recover), (100, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{DECODE: 4}, {DECODE: 4}, {DECODE: 1}]
    assert world.states() == [PlanState.ROLLED_BACK]


def test_late_write_of_a_superseded_plan_is_rolled_back():
    world = World(decode=1, prefill=1)
    world.pools.start = None
    apply = world.pools.apply

    async def late(plan, seen):
        await pace(3, "virtual time of a write")
        to_write(plan, seen, await world.pools.observe())
        await apply(plan, seen)

    async def going_on_when_cancelled(plan, seen):
        await asyncio.shield(asyncio.ensure_future(late(plan, seen)))

    world.pools.apply = going_on_when_cancelled
    world.rule.replicas = {DECODE: 4, PREFILL: 1}

    def more():
        world.rule.replicas = {DECODE: 4, PREFILL: 2}

    def content():
        world.rule.replicas = {DECODE: 1, PREFILL: 1}

    played(world, (1.5, more), (6, content), (100, nothing))

    assert [replicas for _, replicas in world.pools.applied] == [{DECODE: 4}, {DECODE: 4}, {DECODE: 1}]
    assert [each.wanted for each in world.pools.pools.values()] == [1, 1]


class SuspendedBeforeWrites(VirtualConnector):
    """Connector of a planner that can be suspended after it has checked that it leads, and before it writes."""

    def __init__(self, records):
        super().__init__(records, PlanWriter.PLANNER, utc_now)
        self.goes_on, self.suspended = asyncio.Event(), False
        self.goes_on.set()

    async def apply(self, plan, seen):
        self.suspended = not self.goes_on.is_set()
        await self.goes_on.wait()
        await super().apply(plan, seen)


@pytest.mark.parametrize("wrote_before", [True, False], ids=["adopted", "first_write"])
def test_late_write_after_a_change_of_leaders(tmp_path, wrote_before):
    """A late write is refused if the new leader has adopted the earlier plan of the pool; else it is adopted itself."""

    async def play():
        records = FolderRecords(tmp_path)
        records.report(PlanReport(pools={DECODE: PoolReport(asked=1, ready=1)}))  # nobody carries the plans out
        connector = SuspendedBeforeWrites(records)
        early = World(connector=connector)
        late = World(connector=VirtualConnector(records, PlanWriter.PLANNER, utc_now))
        late.election.lead = False
        for world in (early, late):
            world.rule.interval = Nanos(SECOND // 50)

        def planned():
            return records.intent().pools.get(DECODE)

        async with early.running(), late.running():
            if wrote_before:
                early.rule.replicas = {DECODE: 3}
                await until(planned)
            connector.goes_on.clear()
            early.rule.replicas = {DECODE: 5}
            await until(lambda: connector.suspended)
            early.rule.interval = Nanos(1000 * SECOND)
            asked = early.rule.asked
            await until(lambda: early.rule.asked > asked)  # the last round of the suspended planner
            early.election.lead, late.election.lead = False, True
            if wrote_before:
                await until(lambda: "-adopted-" in planned().plan)
            else:
                asked = late.rule.asked
                await until(lambda: late.rule.asked > asked + 2)
            connector.goes_on.set()
            await until(lambda: early.states()[-1] in {PlanState.CONFLICT, PlanState.HANDED_OVER})
            await until(lambda: "-adopted-" in planned().plan)
            return early.history.latest(5), late.loop.explain(planned().plan), planned().replicas

    early, adopted, replicas = asyncio.run(play())

    assert [each.state for each in early] == (
        [PlanState.CONFLICT, PlanState.SUPERSEDED] if wrote_before else [PlanState.HANDED_OVER]
    )
    assert (adopted.id, adopted.state) == (early[-1].id, PlanState.UNDER_WAY), "found by its adopted id"
    assert replicas == (3 if wrote_before else 5)


def test_unreachable_orchestrator_is_a_condition():
    world = World()
    told = []

    def fail():
        world.pools.fail = ConnectorUnreachable("the API server does not answer")

    played(world, (3, fail), (3, lambda: told.append((world.loop.status().conditions, world.rule.asked))))

    (((condition,), asked),) = told
    assert (condition.type, condition.field) == (PlanConditionType.CONNECTOR_FAILED, "target")
    assert asked <= 4


def test_each_cause_of_an_absent_orchestrator_is_logged_once(caplog):
    world = World()

    def fail(cause):
        return lambda: setattr(world.pools, "fail", ConnectorUnreachable(cause))

    played(world, (3, fail("the address is unknown")), (3, fail("the key is wrong")), (3, nothing))

    causes = [each.cause for each in caplog.records if each.message == "pools not observed"]
    assert causes == ["the address is unknown", "the key is wrong"]


def test_orchestrator_that_still_starts_is_waited_for_and_named():
    world = World()
    world.pools.fail = ConnectorUnreachable("no orchestrator has written a report there")
    told = []

    def look():
        told.append(world.loop.status())

    played(world, (STARTING_SECONDS - 1, look), (3, look))

    starting, late = told
    assert (starting.conditions, starting.reason) == ((), None)
    assert starting.message == (
        "waits for the orchestrator, which may still be starting (no orchestrator has written a report there)"
    )
    assert [each.type for each in late.conditions] == [PlanConditionType.CONNECTOR_FAILED]
    assert world.rule.asked == 0


def test_connector_that_hangs_is_a_condition_and_ends_no_planner():
    world = World()
    hung = asyncio.Event()
    told = []

    async def hang():
        await hung.wait()
        return Observation(())

    observe, world.pools.observe = world.pools.observe, hang

    def recover():
        told.append(world.loop.status().conditions)
        world.pools.observe = observe
        world.rule.replicas = {DECODE: 2}

    played(world, (STARTING_SECONDS + 2 * OBSERVE_SECONDS, recover), (OBSERVE_SECONDS + 20, nothing))

    ((condition,),) = told
    assert (condition.type, condition.field) == (PlanConditionType.CONNECTOR_FAILED, "target")
    assert condition.message == "no answer within 20 s"
    assert world.states() == [PlanState.SETTLED]


def test_hanging_write_fails_the_plan_at_its_deadline():
    world = World()

    async def hang(plan, seen):
        await asyncio.Event().wait()

    world.pools.apply = hang
    world.rule.replicas = {DECODE: 2}

    played(world, (200, nothing))

    record = world.history.latest(20)[-1]
    assert record.state is PlanState.FAILED
    assert record.detail == "no answer within 20 s"
    assert world.pools.pools[DECODE].wanted == 1


def test_connector_that_obeys_nothing_is_rolled_back():
    """Use a connector that accepts every plan, but whose replicas never become ready."""
    world = World(start=None)
    world.rule.replicas = {DECODE: 4}
    wanted = []

    async def watched(plan, seen, apply=world.pools.apply):
        await apply(plan, seen)
        wanted.append(world.pools.pools[DECODE].wanted)

    world.pools.apply = watched

    played(world, (500, nothing))

    assert set(world.states()[:-1]) == {PlanState.ROLLED_BACK}
    assert set(wanted) == {1, 4}
    # One plan for each deadline (twice the start-up, and 30 s) with the pause after it; each plan is rolled back once.
    assert len(wanted) <= 2 * (500 // 60 + 1)


def test_failing_rule_is_a_condition_and_is_asked_again():
    world = World()
    told = []

    def recover():
        told.append(world.loop.status().conditions)
        world.rule.error, world.rule.replicas = None, {DECODE: 3}

    world.rule.error = ZeroDivisionError("no rate")
    played(world, (2.5, recover), (6, lambda: told.append(world.loop.status().conditions)))

    (condition,), afterwards = told
    assert (condition.type, condition.field) == (PlanConditionType.RULE_FAILED, "rule")
    assert condition.message == "ZeroDivisionError: no rate"
    assert world.loop.rule_failures == 3
    assert afterwards == ()
    assert world.states() == [PlanState.SETTLED]


def test_long_cause_is_shortened_and_logged_once(caplog):
    world = World()
    told = []

    def fail():
        world.rule.error = ValueError("é" * 1_000_000)

    def hide():
        told.append(world.loop.status().conditions)
        world.pools.fail = ConnectorUnreachable("x" * 1_000_000)

    played(world, (2, fail), (5, hide), (5, lambda: told.append(world.loop.status().conditions)))

    (failed,), (unreachable,) = told
    assert failed.message.startswith("ValueError: éé")
    assert failed.message.endswith("… (1000012 characters)")
    assert max(len(failed.message), len(unreachable.message)) <= MOST_TEXT
    assert [each.message for each in caplog.records] == ["rule failed, replicas stay as they are", "pools not observed"]


@pytest.mark.parametrize(
    ("error", "state"),
    [(PlanConflict(DECODE), PlanState.CONFLICT), (PlanRefused(DECODE, "no right"), PlanState.REFUSED)],
)
def test_failed_plan_is_tried_again_after_a_pause(error, state):
    world = World()
    world.pools.fail = error
    world.rule.replicas = {DECODE: 3}

    def mend():
        assert world.states() == [state]
        world.pools.fail = None

    played(world, (8, mend), (10, nothing))

    assert world.states() == [state, PlanState.SETTLED]


def test_long_cause_of_a_failed_plan_is_shortened():
    world = World()
    world.pools.fail = PlanRefused(DECODE, "x" * 1_000_000)
    world.rule.replicas = {DECODE: 3}

    played(world, (3, nothing))

    (record,) = world.history.latest(5)
    assert record.detail.startswith("decode: xx")
    assert len(record.detail) <= MOST_TEXT


def test_shrink_that_misses_a_goal_in_rehearsal_is_held_back():
    world = World(rehearsal=FixedRehearsal(present=0.99, planned=0.5), decode=3)
    world.rule.replicas = {DECODE: 1}

    played(world, (5, nothing))

    assert world.pools.applied == []
    assert world.states() == [PlanState.HELD_BACK]


def test_growth_is_never_held_back():
    world = World(rehearsal=FixedRehearsal(present=0.99, planned=0.5))
    world.rule.replicas = {DECODE: 3}

    played(world, (5, nothing))

    assert len(world.pools.applied) == 1


def test_hanging_or_failed_rehearsal_is_skipped_and_said():
    hanging, broken = FixedRehearsal(), FixedRehearsal()
    hanging.hangs = True
    broken.error = RehearsalSkipped("the simulator failed")
    for rehearsal, why in ((hanging, "it took longer than 10 s"), (broken, "the simulator failed")):
        world = World(rehearsal=rehearsal)
        world.rule.replicas = {DECODE: 3}

        played(world, (20, nothing))

        assert len(world.pools.applied) == 1
        assert world.history.latest(1)[0].rehearsal_skipped == why


def test_prediction_is_scored_against_what_happened():
    world = World(rehearsal=FixedRehearsal(ttft=0.2))
    world.rule.replicas = {DECODE: 2}
    counts = [0] * (len(EDGES) + 1)
    counts[bucket_of(0.4)] = 100
    world.demand.counts = tuple(counts)
    metrics = {}

    def scrape():
        registry = CollectorRegistry()
        registry.register(PlannerMetrics(world.loop))
        assert differences(generate_latest(registry).decode(), PLANNER) == []
        for family in PlannerMetrics(world.loop).collect():
            metrics.update({(each.name, *each.labels.values()): each.value for each in family.samples})

    played(world, (15, scrape))

    score = world.history.latest(1)[0].score
    assert 0.3 < score.ttft_seconds < 0.45
    assert score.ttft_error == pytest.approx((score.ttft_seconds - 0.2) / score.ttft_seconds)
    assert score.attainment == 1.0
    assert world.loop.errors == {"ttft": pytest.approx(score.ttft_error)}
    assert metrics["fleet_planner_prediction_error", "m", "ttft"] == pytest.approx(score.ttft_error)
    assert ("fleet_planner_prediction_error", "m", "tpot") not in metrics
    assert metrics["fleet_planner_decision", "m", "rate"] == 3.0


@pytest.mark.parametrize(("predicted", "error"), [(0.04, 0.9), (0.4, 0.0), (4.0, 0.9), (146.5, 0.997)])
def test_error_is_a_share_of_the_longer_time(predicted, error):
    world = World(rehearsal=FixedRehearsal(ttft=predicted))
    world.rule.replicas = {DECODE: 2}
    counts = [0] * (len(EDGES) + 1)
    counts[bucket_of(0.4)] = 100
    world.demand.counts = tuple(counts)

    played(world, (15, nothing))

    assert world.history.latest(1)[0].score.ttft_error == pytest.approx(error, abs=0.12)


def test_cost_of_overflow_is_scored_beside_that_of_replicas():
    world = World()
    world.rule.replicas = {DECODE: 2}
    world.demand.overflow_dollars = 0.001

    seen = []
    played(world, (15, lambda: seen.append(world.loop.status())))

    (status,) = seen
    assert world.history.latest(1)[0].score.overflow_dollars == pytest.approx(3.6)
    assert status.overflow["dollars"] == pytest.approx(0.001 * status.overflow["requests"])
    assert (status.demand["overflowed"], status.demand["overflow_dollars_per_hour"]) == (1.0, pytest.approx(3.6))


def test_shadow_mode_makes_one_record_for_each_change():
    world = World(PlannerMode.SHADOW, rehearsal=FixedRehearsal())
    world.rule.replicas = {DECODE: 3}

    def more():
        world.rule.replicas = {DECODE: 4}

    played(world, (5, more), (5, nothing))

    assert world.pools.applied == []
    assert [each.replicas for each in reversed(world.history.latest(5))] == [{DECODE: 3}, {DECODE: 4}]
    assert world.states() == [PlanState.SHADOW] * 2
    assert all(each.rehearsal is not None for each in world.history.latest(5))


def test_mode_off_decides_nothing():
    world = World(PlannerMode.OFF)

    played(world, (5, nothing))

    assert world.rule.asked == 0
