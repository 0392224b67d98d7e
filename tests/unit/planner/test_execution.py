"""Execution of plans, with the plan and the report in memory."""

import asyncio
from datetime import UTC, datetime

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.planner import server
from fleet.planner.connectors import virtual as connector_virtual
from fleet.planner.connectors.virtual import Intent, PlanReport, PoolReport, RecordsSnapshot, VirtualConnector
from fleet.planner.execution import PlanOutcome, forbidden, rollback, settled, to_write
from fleet.planner.messages import Observation, Plan, PlanId, PlanWriter, PoolGapReason, PoolName, PoolObservation
from fleet.planner.ports import ConnectorUnreachable, PlanConflict, PlanRefused
from fleet.planner.server import carry_out
from tests.support.kvstore.builders import ManualClock
from tests.support.waiting import pace

WITHIN = Nanos(10 * SECOND)


def a_plan(name: str = "plan", **replicas: int) -> Plan:
    return Plan(id=PlanId(name), replicas={PoolName(pool): count for pool, count in replicas.items()}, within=WITHIN)


def a_pool(name: str = "decode", wanted: int = 2, ready: int = 2, **fields) -> PoolObservation:
    return PoolObservation(name=PoolName(name), wanted=wanted, ready=ready, **fields)


def seen(*pools: PoolObservation) -> Observation:
    return Observation(pools)


def test_plan_settles_when_pools_serve_and_nothing_drains():
    plan = a_plan(decode=2, prefill=1)
    prefill = a_pool("prefill", wanted=1, ready=1)

    assert settled(plan, seen(a_pool(), prefill, a_pool("other", wanted=5, ready=1)))
    assert not settled(plan, seen(a_pool()))
    unread = a_pool(why=PoolGapReason.NOT_TAKEN_UP)
    for decode in (a_pool(wanted=3, ready=3), a_pool(ready=1), a_pool(ready=3), a_pool(draining=1), unread):
        assert not settled(plan, seen(decode, prefill))


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        (a_pool(wanted=1, ready=1), {"wanted": 4, "ready": 2}, 2),
        (a_pool(wanted=3, ready=1), {"wanted": 4, "ready": 2}, 3),
        (a_pool(wanted=4, ready=1), {"wanted": 4, "ready": 2}, None),
        (a_pool(wanted=4, ready=1, plan=PlanId("earlier"), before=1), {"wanted": 4, "ready": 2}, 2),
        (a_pool(wanted=4, ready=3, plan=PlanId("earlier"), before=1), {"wanted": 5, "ready": 1}, 3),
        (a_pool(wanted=4, ready=4, plan=PlanId("earlier"), before=1), {"wanted": 5, "ready": 1}, 4),
        (a_pool(wanted=4, ready=4), {"wanted": 1, "ready": 1, "draining": 3}, None),
        (a_pool(wanted=4, ready=4), {"wanted": 1, "ready": 4, "why": PoolGapReason.NOT_TAKEN_UP}, None),
        (a_pool(wanted=4, ready=4), {"wanted": 0, "ready": 2, "why": PoolGapReason.LIMITED}, 2),
        (a_pool(wanted=1, ready=1), {"wanted": 9, "ready": 1, "why": PoolGapReason.LIMITED}, 1),
        (a_pool(wanted=1, ready=1), {"wanted": 4, "ready": 2, "plan": PlanId("another")}, None),
        (None, {"wanted": 4, "ready": 2}, None),
    ],
    ids=[
        "grew",
        "not_below",
        "as_before",
        "superseded",
        "superseded_in_part",
        "after_settled",
        "drains",
        "shrinks",
        "may_not_shrink",
        "may_not_grow",
        "not_ours",
        "new",
    ],
)
def test_pending_replicas_are_rolled_back_and_no_others(before, now, kept):
    pool = a_pool(**({"plan": PlanId("plan")} | now))

    less = rollback(a_plan(decode=pool.wanted), seen(*([before] if before else [])), seen(pool))

    assert (less.replicas["decode"] if less else None) == kept


def test_number_before_the_first_of_superseding_plans_is_kept():
    first = a_pool(wanted=3, ready=1, plan=PlanId("first"), before=1)
    second = a_pool(wanted=5, ready=1, plan=PlanId("second"), before=first.before_a_write(5))

    assert (second.before, second.before_a_write(5), second.before_a_write(6)) == (1, 1, 1)
    assert a_pool(wanted=3, ready=3, plan=PlanId("first"), before=1).before_a_write(5) == 3


def test_only_forbidden_part_is_rolled_back_early():
    plan = a_plan(decode=2, prefill=9)

    assert forbidden(plan, seen(a_pool(why=PoolGapReason.NO_ROOM), a_pool("prefill"))) is None
    part = forbidden(plan, seen(a_pool(why=PoolGapReason.NO_ROOM), a_pool("prefill", why=PoolGapReason.LIMITED)))
    assert part.replicas == {"prefill": 9}


def test_shrinking_pools_are_written_first_and_once():
    pools = seen(
        a_pool("a", wanted=1, ready=1, version="1"),
        a_pool("b", wanted=3, ready=3, version="1"),
        a_pool("c", wanted=2, ready=2, version="5", plan=PlanId("plan")),
        a_pool("d", wanted=2, ready=2, version="1"),
    )
    before = seen(*(a_pool(each.name, version="1") for each in pools.pools))

    left = to_write(a_plan(a=2, b=1, c=2, d=2), before, pools)

    assert [each.name for each in left] == ["b", "d", "a"]


def test_late_or_forbidden_plan_writes_nothing():
    was = seen(a_pool(version="1"))
    with pytest.raises(PlanConflict, match="decode"):
        to_write(a_plan(decode=1), was, seen(a_pool(version="2")))
    with pytest.raises(PlanConflict, match="decode"):
        to_write(a_plan(decode=1), seen(), seen(a_pool(version="1")))
    with pytest.raises(PlanConflict, match="decode"):  # an earlier leader must not roll back a plan that was adopted
        to_write(a_plan(decode=1), was, seen(a_pool(version="1", plan=PlanId("plan-adopted-5"))))
    with pytest.raises(PlanRefused, match="decode: by hand"):
        to_write(a_plan(decode=1), was, seen(a_pool(version="2", pinned="by hand")))
    with pytest.raises(PlanRefused, match="vision: there is no such pool; there are decode"):
        to_write(a_plan(vision=1), was, was)


class Memory:
    """Plan and report in memory; every third call fails."""

    def __init__(self, **pools: PoolReport) -> None:
        self.intent = Intent()
        self.report = PlanReport(pools={PoolName(name): pool for name, pool in pools.items()})
        self.calls = 0

    async def read(self) -> RecordsSnapshot:
        self.stumble()
        return RecordsSnapshot(intent=self.intent, report=self.report, token=self.intent.revision)

    async def write(self, intent: Intent, over: RecordsSnapshot) -> bool:
        if over.token != self.intent.revision:
            return False
        self.intent = intent
        self.stumble()
        return True

    def stumble(self) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ConnectorUnreachable("for once")

    def says(self, **pools: PoolReport) -> None:
        self.report = PlanReport(
            revision=self.intent.revision, pools={PoolName(name): pool for name, pool in pools.items()}
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server, "LOOK_EVERY", 0)


async def carried_out(records: Memory, replicas: int, then) -> tuple[PlanOutcome, list[tuple[int, int]], int]:
    clock = ManualClock()
    connector = VirtualConnector(records, PlanWriter.PLANNER, lambda: datetime(2030, 1, 1, tzinfo=UTC))
    before = await connector.observe()
    told: list[tuple[int, int]] = []

    def tell(there: Observation) -> None:
        told.append((there.pools[0].wanted, there.pools[0].ready))
        then(clock)

    outcome, _ = await carry_out(connector, a_plan(decode=replicas), before, clock, tell)
    return outcome, told, records.intent.pools[PoolName("decode")].replicas


async def test_plan_survives_calls_without_answer():
    records = Memory(decode=PoolReport(asked=1, ready=1))

    outcome, told, wanted = await carried_out(
        records, 2, lambda clock: records.says(decode=PoolReport(asked=2, ready=2))
    )

    assert (outcome, told, wanted) == (PlanOutcome.SETTLED, [(2, 1), (2, 2)], 2)
    assert records.intent.revision == 1
    assert records.intent.settle_by == "2030-01-01T00:00:10+00:00"


async def test_forbidden_plan_is_rolled_back_at_once():
    records = Memory(decode=PoolReport(asked=1, ready=1))

    outcome, _, wanted = await carried_out(
        records, 9, lambda clock: records.says(decode=PoolReport(asked=1, ready=1, why=PoolGapReason.LIMITED))
    )

    assert (outcome, wanted) == (PlanOutcome.ROLLED_BACK, 1)


async def test_numbers_of_other_writer_stay_at_deadline():
    records = Memory(decode=PoolReport(asked=1, ready=1))

    def another(clock: ManualClock) -> None:
        clock.move(WITHIN)
        intent = records.intent.pools[PoolName("decode")]
        theirs = {PoolName("decode"): type(intent)(replicas=7, plan=PlanId("theirs"), writer="x", revision=5)}
        records.intent = Intent(revision=5, pools=theirs)

    outcome, _, wanted = await carried_out(records, 3, another)

    assert (outcome, wanted) == (PlanOutcome.UNSETTLED, 7)


class Hasty(ManualClock):
    """A clock on which a second passes at each reading."""

    def now(self) -> Nanos:
        self.move(SECOND)
        return super().now()


async def test_silent_orchestrator_is_given_up_at_deadline(monkeypatch):
    records = Memory(decode=PoolReport(asked=1, ready=1))
    connector = VirtualConnector(records, PlanWriter.PLANNER, lambda: datetime(2030, 1, 1, tzinfo=UTC))
    before = await connector.observe()
    records.report = None
    monkeypatch.setattr(records, "stumble", lambda: None)
    troubles: list[str] = []

    with pytest.raises(ConnectorUnreachable):
        await carry_out(connector, a_plan(decode=3), before, Hasty(), lambda there: None, troubles.append)
    assert troubles == ["no orchestrator has written a report there; is it running?"], "said once, and at once"


@pytest.mark.parametrize("deaf", ["read", "write"])
async def test_silent_records_are_unreachable_in_time(deaf, monkeypatch):
    monkeypatch.setattr(connector_virtual, "CALL_SECONDS", 0.01)
    records = Memory(decode=PoolReport(asked=1, ready=1))
    connector = VirtualConnector(records, PlanWriter.PLANNER, lambda: datetime(2030, 1, 1, tzinfo=UTC))
    before = await connector.observe()
    monkeypatch.setattr(records, deaf, lambda *_: asyncio.Event().wait())

    async with asyncio.timeout(60):
        with pytest.raises(ConnectorUnreachable, match="in time"):
            await connector.apply(a_plan(decode=2), before)


async def test_repeatedly_overtaken_plan_is_given_up_in_one_call(monkeypatch):
    records = Memory(decode=PoolReport(asked=1, ready=1))
    connector = VirtualConnector(records, PlanWriter.PLANNER, lambda: datetime(2030, 1, 1, tzinfo=UTC))
    before = await connector.observe()
    monkeypatch.setattr(connector_virtual, "CALL_SECONDS", 0.05)

    async def overtaken(intent: Intent, over: RecordsSnapshot) -> bool:
        await pace(0.03, "a write takes so long that two of them exceed the limit of a call")
        return False

    monkeypatch.setattr(records, "stumble", lambda: None)
    monkeypatch.setattr(records, "write", overtaken)

    with pytest.raises(ConnectorUnreachable, match="in time"):
        await connector.apply(a_plan(decode=2), before)
