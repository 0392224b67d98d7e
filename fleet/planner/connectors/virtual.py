"""Virtual connector: writes plans into one record for an external orchestrator, and reads its reports from another.

Rules:

1. There are two records. Connectors write the plan record: a revision that grows by one with every write, and for each
   pool the number of replicas with its plan, revision and writer. The orchestrator writes the plan report: the revision
   of the plan that it has read, and the state of each pool.
2. One write contains a whole plan, and it fails if the plan record has changed since it was read. The connector then
   reads the record again. If another writer has changed a pool of the plan, the plan ends with a conflict; otherwise
   the connector tries the write again, at most `TRIES` times.
3. If a pool's revision is newer than the report's, the orchestrator has not read the pool's number yet. The records do
   not show whether an orchestrator runs. So the planner waits for the replicas of a plan only for a limited time. Then
   it writes another revision without the replicas that are still missing. If the planner ends earlier, nothing is
   rolled back, and the plan record keeps the requested numbers and the numbers before the plan.
4. The report lists the pools that exist. If there is no report, no orchestrator has run, and the connector writes
   nothing.
5. The numbers in a report have the same limits as those in a plan, because the connector copies them into the plan. A
   plan that could not be read again would never be replaced.
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
from fleet.planner.ports import CALL_SECONDS, ConnectorUnreachable, PlanConflict, PlanRefused

TRIES = 4  # maximum number of attempts to write the plan record, if other writers change it between reading and writing

MOST_REVISION = (1 << 53) - 1  # highest integer that every JSON library reads exactly, because some use floating point

Revision = Annotated[int, Meta(ge=0, le=MOST_REVISION)]


class PoolIntent(Struct, frozen=True, kw_only=True):
    """Holds the entry of the plan record for one pool: the requested number of replicas, and who wrote it."""

    replicas: Replicas
    plan: PlanId
    writer: str
    revision: Revision
    """Revision of the plan record with which the number was written."""

    before: Replicas | None = None
    """Number of replicas before the plan; null if this number is unknown. Replicas that an earlier plan had added and that
    did not serve do not count."""


class Intent(Struct, frozen=True, kw_only=True):
    """Holds the content of the plan record. Unknown fields, which later versions may add, are ignored."""

    revision: Revision = 0
    settle_by: str = ""
    """Time in RFC 3339 until which the planner waits for the replicas of the plan that was written last; empty before
    the first plan."""

    pools: dict[PoolName, PoolIntent] = {}


class PoolReport(Struct, frozen=True, kw_only=True):
    """Holds the entry of the plan report for one pool: its state, as the orchestrator knows it."""

    asked: Replicas
    """Number of replicas that the orchestrator keeps running or is about to start."""

    ready: Replicas
    draining: Replicas = 0
    why: PoolGapReason | None = None
    """Why the number of ready replicas differs from the plan; null if the number is the planned one, or if the orchestrator
    is about to reach the planned number."""

    message: str = ""
    pinned: str = ""
    """Why the orchestrator does not carry out plans for this pool; empty if the orchestrator carries out plans."""


class PlanReport(Struct, frozen=True, kw_only=True):
    """Holds the content of the plan report. Unknown fields, which later versions may add, are ignored."""

    revision: Revision = 0
    """Revision of the plan record that the orchestrator has read last."""

    pools: dict[PoolName, PoolReport]


class RecordsSnapshot(Struct, frozen=True, kw_only=True):
    """Holds the plan record and the plan report as they were read."""

    intent: Intent
    report: PlanReport | None
    token: int
    """Version of the plan record in the storage. A write succeeds only if the version is still the same."""


class PlanRecords(Protocol):
    """Port of the storage that holds the plan record and the plan report."""

    async def read(self) -> RecordsSnapshot:
        """Read both records.

        Raises:
            ConnectorUnreachable: The storage does not answer, or a record is invalid.
            OrchestratorGone: The orchestrator has ended without reporting it.
        """
        ...

    async def write(self, intent: Intent, over: RecordsSnapshot) -> bool:
        """Write the plan record and return True; return False if the record has changed since `over` was read.

        Raises:
            ConnectorUnreachable: The storage does not answer; the record may be written or not.
        """
        ...


class VirtualConnector:
    """Writes plans into records that an external orchestrator reads. Implements `fleet.planner.ports.PlanConnector`."""

    def __init__(self, records: PlanRecords, writer: PlanWriter, wall: Callable[[], datetime]) -> None:
        self.records = records
        self._writer = writer
        self._wall = wall

    async def observe(self) -> Observation:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return self._seen(await self.records.read())
        except TimeoutError as error:
            raise ConnectorUnreachable("plan and report cannot be read in time") from error

    async def apply(self, plan: Plan, seen: Observation) -> None:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._apply(plan, seen)
        except TimeoutError as error:
            raise ConnectorUnreachable("the plan cannot be written in time; perhaps it is") from error

    async def release(self, pools: Sequence[PoolName]) -> None:
        """Give pools back to the planner: they keep their numbers, and the planner may change them again.

        Raises:
            PlanConflict: Another write interfered with each of `TRIES` attempts; nothing is written.
            PlanRefused: A pool does not exist; nothing is written.
            ConnectorUnreachable: There is no plan report, or the storage does not answer; the pools may be released or not.
            OrchestratorGone: The orchestrator has ended without reporting it.
        """
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._release(pools)
        except TimeoutError as error:
            raise ConnectorUnreachable("the pools cannot be released in time; perhaps they are") from error

    async def _release(self, pools: Sequence[PoolName]) -> None:
        for _ in range(TRIES):
            kept = await self.records.read()
            there = {each.name for each in self._seen(kept).pools}
            for name in pools:
                if name not in there:
                    raise PlanRefused(name, f"there is no such pool; there are {', '.join(sorted(there))}")
            released = {
                name: structs.replace(kept.intent.pools[name], writer=PlanWriter.PLANNER)
                for name in pools
                if name in kept.intent.pools and kept.intent.pools[name].writer != PlanWriter.PLANNER
            }
            if not released:
                return
            revision = _after(kept.intent.revision)
            intent = structs.replace(kept.intent, revision=revision, pools=kept.intent.pools | released)
            if await self.records.write(intent, kept):
                return
        raise PlanConflict(pools[0])

    async def _apply(self, plan: Plan, seen: Observation) -> None:
        for _ in range(TRIES):
            kept = await self.records.read()
            left = to_write(plan, seen, self._seen(kept))
            if not left or await self._write(plan, left, kept):
                return
        raise PlanConflict(next(iter(plan.replicas)))

    async def _write(self, plan: Plan, pools: Sequence[PoolObservation], kept: RecordsSnapshot) -> bool:
        assert kept.report is not None, "the observation was made on a report"
        # If the plan record was lost, its revisions begin at 0 again, but the report still has the old revision. The new
        # revision must be higher than the report's, or the orchestrator would count as having read the new plan already.
        revision = _after(max(kept.intent.revision, kept.report.revision))
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
        return await self.records.write(intent, kept)

    def _seen(self, kept: RecordsSnapshot) -> Observation:
        if kept.report is None:
            raise ConnectorUnreachable("no orchestrator has written a report there; is it running?")
        reports = kept.report.pools
        return Observation(tuple(self._pool(name, reports[name], kept) for name in sorted(reports)))

    def _pool(self, name: PoolName, report: PoolReport, kept: RecordsSnapshot) -> PoolObservation:
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
        return structs.replace(seen, pinned=report.pinned or self._pinned(name, intent))

    def _pinned(self, name: PoolName, intent: PoolIntent | None) -> str:
        if intent is None or self._writer is PlanWriter.PERSON or intent.writer == self._writer:
            return ""
        return f"pinned: {intent.writer} has set it to {intent.replicas}; fleet scale --release {name} gives it back"


def _after(revision: int) -> int:
    """Return the next revision of the plan record.

    Raises:
        ConnectorUnreachable: There is none, because a record has the highest revision that is allowed.
    """
    if revision >= MOST_REVISION:
        raise ConnectorUnreachable(
            f"revision: the plan or the report has {revision}, after which there is none; set it to 0 in both"
        )
    return revision + 1
