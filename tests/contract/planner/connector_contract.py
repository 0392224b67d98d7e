"""Contract suite of plan connectors: with every connector, equal plans have equal effects and are reported equally.

The importing module provides the fixture `a_world`.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.planner.execution import PlanOutcome
from fleet.planner.messages import Observation, Plan, PlanId, PlanWriter, PoolGapReason, PoolName
from fleet.planner.ports import ConnectorUnreachable, PlanConflict, PlanConnector, PlanRefused
from fleet.planner.server import carry_out
from tests.support.kvstore.builders import ManualClock
from tests.support.waiting import until_answered

SECONDS = 60
PREFILL, DECODE = PoolName("prefill"), PoolName("decode")
ROOM = 3
"""Number of replicas of both pools together for which every setup has room."""


class ProcessKilled(BaseException):
    """Raised to simulate the kill of a planner; it is no Exception, so that no supervisor in the code catches it."""


class ConnectorSetup(Protocol):
    """Two pools with one replica each, and an orchestrator that carries out plans for them."""

    def open(self, writer: PlanWriter = PlanWriter.PLANNER) -> AbstractAsyncContextManager[PlanConnector]: ...

    def open_mortal(self, answered: bool) -> AbstractAsyncContextManager[PlanConnector]:
        """Open a connector whose first write raises `ProcessKilled`: after the write if `answered`, otherwise before it."""
        ...

    def open_cut(self) -> AbstractAsyncContextManager[PlanConnector]:
        """Open a connector to an address or a file that does not answer."""
        ...

    async def occupy(self) -> None:
        """Keep every replica busy until `finish`, so that a replica that is removed has to drain first."""
        ...

    async def finish(self) -> None: ...

    async def pin(self, pool: PoolName, replicas: int) -> None:
        """Scale a pool by the orchestrator's own means, as a person would do it."""
        ...


def a_plan(name: str, within: int = SECONDS * SECOND, **replicas: int) -> Plan:
    pools = {PoolName(pool): count for pool, count in replicas.items()}
    return Plan(id=PlanId(name), replicas=pools, within=Nanos(within))


async def observed(connector: PlanConnector, condition: Callable[[Observation], bool]) -> Observation:
    """Observe until the condition holds, and return this observation."""
    seen = None

    async def look() -> Observation | None:
        nonlocal seen
        seen = await connector.observe()
        return seen if condition(seen) else None

    found = await until_answered(look, SECONDS, lambda: f"the expected state was not observed in time; last: {seen}")
    assert found is not None
    return found


def sizes(seen: Observation) -> dict[str, tuple[int, int, int]]:
    """Return by pool the numbers of wanted, ready and draining replicas."""
    return {each.name: (each.wanted, each.ready, each.draining) for each in seen.pools}


async def observed_sizes(connector: PlanConnector, **pools: tuple[int, int, int]) -> Observation:
    """Wait until the orchestrator has read the plan and the pools have these sizes (wanted, ready, draining).

    Before the orchestrator has read the plan, the sizes may be equal by chance.
    """

    def is_so(seen: Observation) -> bool:
        return sizes(seen) == pools and all(each.why is not PoolGapReason.NOT_TAKEN_UP for each in seen.pools)

    return await observed(connector, is_so)


async def test_equal_plans_give_equal_observations(a_world):
    clock = ManualClock()
    async with a_world.open() as planner:
        start = await observed_sizes(planner, decode=(1, 1, 0), prefill=(1, 1, 0))
        assert [(each.plan, each.pinned, each.why) for each in start.pools] == [("", "", None)] * 2

        # The pool grows.
        await planner.apply(a_plan("grow", decode=2), start)
        grown = await observed_sizes(planner, decode=(2, 2, 0), prefill=(1, 1, 0))
        assert [(each.plan, each.before) for each in grown.pools] == [("grow", 1), ("", None)]

        # A replica for which there is no room stays pending, and the plan is rolled back at its deadline.
        impossible = a_plan("impossible", within=5 * SECOND, decode=3)

        def late(seen: Observation) -> None:
            if seen.pool(DECODE).why is PoolGapReason.NO_ROOM:
                assert sizes(seen)["decode"] == (3, 2, 0)
                assert seen.pool(DECODE).pending == 1
                assert seen.pool(DECODE).message
                clock.move(impossible.within)

        outcome, _ = await carry_out(planner, impossible, grown, clock, late)
        assert outcome is PlanOutcome.ROLLED_BACK
        kept = await observed_sizes(planner, decode=(2, 2, 0), prefill=(1, 1, 0))

        # The pool shrinks: a draining replica finishes its work, and occupies its room until then.
        await a_world.occupy()
        swap = a_plan("swap", prefill=2, decode=1)

        # The planner is killed before and after each of its writes. The wanted sizes stay between those of the old and the new plan.
        for answered in (False, True, False, True):
            async with a_world.open_mortal(answered) as mortal:
                with suppress(ProcessKilled):
                    await mortal.apply(swap, await mortal.observe())
            async with a_world.open() as restarted:
                assert sum(each.wanted for each in (await restarted.observe()).pools) <= ROOM
        async with a_world.open() as restarted:
            await restarted.apply(swap, await restarted.observe())
        draining = await observed_sizes(planner, decode=(1, 1, 1), prefill=(2, 1, 0))
        await observed(planner, lambda seen: seen.pool(PREFILL).why is PoolGapReason.NO_ROOM)
        assert [each.plan for each in draining.pools] == ["swap", "swap"]
        await a_world.finish()
        swapped = await observed_sizes(planner, decode=(1, 1, 0), prefill=(2, 2, 0))

        # A plan that is already in force is accepted and changes nothing. A writer that has not observed this plan is refused.
        await planner.apply(swap, kept)
        assert await planner.observe() == swapped
        with pytest.raises(PlanConflict):
            await planner.apply(a_plan("late", decode=2, prefill=1), kept)

        # The number that a person has set stays, and the plan stays in force for the other pool.
        await a_world.pin(PREFILL, 1)
        pinned = await observed_sizes(planner, decode=(1, 1, 0), prefill=(1, 1, 0))
        assert "pinned" in pinned.pool(PREFILL).pinned
        assert f"; fleet scale --release {PREFILL}" in pinned.pool(PREFILL).pinned
        assert pinned.pool(PREFILL).plan != "swap"
        with pytest.raises(PlanRefused, match=r"^prefill: pinned"):
            await planner.apply(a_plan("pinned", decode=2, prefill=2), pinned)
        with pytest.raises(PlanRefused, match=r"^prefill: pinned"):
            await planner.apply(a_plan("unaware", prefill=2), swapped)
        assert await planner.observe() == pinned
        async with a_world.open(PlanWriter.PERSON) as person:
            seen = await person.observe()
            assert seen.pool(PREFILL).pinned == ""


async def test_plan_outlives_its_planner_and_others_can_change_it(a_world):
    async with a_world.open_mortal(answered=True) as mortal:
        with suppress(ProcessKilled):
            await mortal.apply(a_plan("too-many", decode=ROOM + 1), await mortal.observe())
    async with a_world.open() as planner:
        left = await observed(planner, lambda seen: seen.pool(DECODE).why is PoolGapReason.NO_ROOM)
        assert left.pool(DECODE).unfinished
        assert (left.pool(DECODE).wanted, left.pool(DECODE).before) == (ROOM + 1, 1)

        await planner.apply(a_plan("on", decode=ROOM + 1), left)
        going = await observed(planner, lambda seen: seen.pool(DECODE).plan == "on")
        assert going.pool(DECODE).before == 1, "the next planner can still undo the plan"

        await planner.apply(a_plan("back", decode=1), going)
        back = await observed_sizes(planner, decode=(1, 1, 0), prefill=(1, 1, 0))
        assert not back.pool(DECODE).unfinished


async def test_plan_for_unknown_pool_is_rejected_and_not_written(a_world):
    async with a_world.open() as planner:
        seen = await observed_sizes(planner, decode=(1, 1, 0), prefill=(1, 1, 0))
        for plan in (a_plan("odd", decode=2, vision=1), a_plan("odd", vision=0)):
            with pytest.raises(PlanRefused, match=r"^vision: there is no such pool; there are decode, prefill$"):
                await planner.apply(plan, seen)

        assert await planner.observe() == seen


async def test_connector_without_answer_is_unreachable_in_time(a_world, monkeypatch):
    for module in ("fleet.planner.ports", "fleet.planner.connectors.virtual"):
        monkeypatch.setattr(f"{module}.CALL_SECONDS", 0.2)
    async with a_world.open() as planner:
        seen = await observed_sizes(planner, decode=(1, 1, 0), prefill=(1, 1, 0))
    async with asyncio.timeout(60), a_world.open_cut() as cut:
        with pytest.raises(ConnectorUnreachable):
            await cut.observe()
        with pytest.raises(ConnectorUnreachable):
            await cut.apply(a_plan("unheard", decode=2), seen)
    async with a_world.open() as planner:
        assert await planner.observe() == seen
