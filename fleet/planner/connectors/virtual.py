"""Plans for an orchestrator that is none of ours: written down where it looks, and acknowledged by what it writes back.

Rules:

1. There are two records, and each has one kind of writer. The *plan* is ours: a revision that grows by one with every write, and for
   each pool how many replicas, by which plan and revision, for whom. The *report* is the orchestrator's: which revision it has
   read, and what there is of each pool.
2. All of a plan is one write, and only over the revision that was read: of two planners, one is told that it comes late.
3. What the report's revision does not cover has not been taken up. Whether an orchestrator is still there is seen by nothing else, so a
   plan says until when its replicas are waited for; what has not come then is taken back, by another revision.
   Of somebody who has gone before that nothing is taken back: what is wanted stays, with what was wanted before it.
4. Pools are those of the report. Where there is no report nobody obeys, and nothing is written.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Protocol

from msgspec import Meta, Struct, structs

from fleet.core.clock import SECOND
from fleet.planner.execution import to_write
from fleet.planner.messages import (
    Observation,
    Plan,
    PlanId,
    PlanWriter,
    PoolGapReason,
    PoolName,
    PoolObservation,
    Replicas,
)
from fleet.planner.ports import CALL_SECONDS, ConnectorUnreachable, PlanConflict

TRIES = 4  # to write a plan while others write theirs, of other pools

Revision = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]


class PoolIntent(Struct, frozen=True, kw_only=True):
    """What one pool is to be."""

    replicas: Replicas
    plan: PlanId
    writer: str
    revision: Revision
    """Of the record, when this was written."""

    before: Replicas | None = None
    """What was wanted before it; null: it is not known."""


class Intent(Struct, frozen=True, kw_only=True):
    """The record `plan`. Fields that a later version adds are passed over."""

    revision: Revision = 0
    settle_by: str = ""
    """RFC 3339: until then the replicas of this revision are waited for."""

    pools: dict[PoolName, PoolIntent] = {}


class PoolReport(Struct, frozen=True, kw_only=True):
    """One pool, as the orchestrator says."""

    asked: Count
    """Replicas that it keeps up, or tries to."""

    ready: Count
    draining: Count = 0
    why: PoolGapReason | None = None
    """Why others are ready than the plan wants; null: they are, or will be."""

    message: str = ""
    pinned: str = ""
    """Why the orchestrator changes nothing about this pool; empty: it does."""


class Report(Struct, frozen=True, kw_only=True):
    """The record `report`. Fields that a later version adds are passed over."""

    revision: Revision = 0
    """Of the plan that it has read last."""

    pools: dict[PoolName, PoolReport]


class Kept(Struct, frozen=True, kw_only=True):
    """Both records at one moment."""

    intent: Intent
    report: Report | None
    token: int
    """Of the plan, for a write over it."""


class Records(Protocol):
    """Where the two are kept."""

    async def read(self) -> Kept:
        """Raises Unreachable."""
        ...

    async def write(self, intent: Intent, over: Kept) -> bool:
        """Whether it is written: not when the plan is another one by now. Raises Unreachable."""
        ...


class VirtualConnector:
    """Implements `fleet.planner.ports.PlanConnector`."""

    def __init__(self, records: Records, writer: PlanWriter, wall: Callable[[], datetime]) -> None:
        self._records = records
        self._writer = writer
        self._wall = wall

    async def observe(self) -> Observation:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return self._seen(await self._records.read())
        except TimeoutError as error:
            raise ConnectorUnreachable("plan and report cannot be read in time") from error

    async def apply(self, plan: Plan, seen: Observation) -> None:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._apply(plan, seen)
        except TimeoutError as error:
            raise ConnectorUnreachable("the plan cannot be written in time; perhaps it is") from error

    async def _apply(self, plan: Plan, seen: Observation) -> None:
        for _ in range(TRIES):
            kept = await self._records.read()
            left = to_write(plan, seen, self._seen(kept))
            if not left or await self._write(plan, left, kept):
                return
        raise PlanConflict(next(iter(plan.replicas)))

    async def _write(self, plan: Plan, pools: Sequence[PoolObservation], kept: Kept) -> bool:
        assert kept.report is not None, "what was seen was seen in it"
        revision = max(kept.intent.revision, kept.report.revision) + 1  # whoever lost the plan has not lost the report
        written = {
            each.name: PoolIntent(
                replicas=plan.replicas[each.name],
                plan=plan.id,
                writer=self._writer,
                revision=revision,
                before=each.before_a_write(plan.replicas[each.name]),
            )
            for each in pools
        }
        settle_by = (self._wall() + timedelta(seconds=plan.within / SECOND)).isoformat(timespec="seconds")
        intent = Intent(revision=revision, settle_by=settle_by, pools=kept.intent.pools | written)
        return await self._records.write(intent, kept)

    def _seen(self, kept: Kept) -> Observation:
        if kept.report is None:
            raise ConnectorUnreachable("no orchestrator has written a report there; is it running?")
        reports = kept.report.pools
        return Observation(tuple(self._pool(name, reports[name], kept) for name in sorted(reports)))

    def _pool(self, name: PoolName, report: PoolReport, kept: Kept) -> PoolObservation:
        assert kept.report is not None
        intent = kept.intent.pools.get(name)
        if intent is None:
            seen = PoolObservation(name=name, wanted=report.asked, ready=report.ready, draining=report.draining)
        else:
            seen = PoolObservation(
                name=name,
                wanted=intent.replicas,
                ready=report.ready,
                draining=report.draining,
                plan=intent.plan,
                before=intent.before,
                version=str(intent.revision),
            )
        if intent is not None and kept.report.revision < intent.revision:
            unread = f"the orchestrator has not read revision {intent.revision} of the plan"
            seen = structs.replace(seen, why=PoolGapReason.NOT_TAKEN_UP, message=unread)
        elif seen.ready != seen.wanted:
            seen = structs.replace(seen, why=report.why or PoolGapReason.UNDER_WAY, message=report.message)
        return structs.replace(seen, pinned=report.pinned or self._pinned(intent))

    def _pinned(self, intent: PoolIntent | None) -> str:
        if intent is None or self._writer is PlanWriter.PERSON or intent.writer == self._writer:
            return ""
        return f"pinned: {intent.writer} has set it to {intent.replicas}"
