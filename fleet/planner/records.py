"""Plan records: what a planner decided, why, what it expected, and what happened. Kept in memory and in a file of JSON lines.

Rules:

1. A record is written when its plan begins, and again with the same id when it ends and when it was scored. The last line of an id counts.
2. The file is rotated at `MOST_BYTES`; one older file remains, with the suffix `.1`. A file that cannot be written is reported once and costs no plan.
3. Several planners may append to one file, each record by one write.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Generator
from contextlib import closing, suppress
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct

from fleet.planner.decisions import DecisionReason, PlanCondition
from fleet.planner.messages import PlanId, PoolName, PoolObservation
from fleet.planner.ports import RehearsalResult
from fleet.planner.settings import PlannerMode

log = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
KEPT_RECORDS = 200
APPENDING = (
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
)  # treat a pipe without a reader as an error


class PlanState(StrEnum):
    """State of a plan."""

    SHADOW = "shadow"  # shown and scored, but not applied
    REHEARSED = "rehearsed"  # the rehearsal runs, and nothing is written yet
    UNDER_WAY = "under_way"
    SETTLED = "settled"
    ROLLED_BACK = "rolled_back"
    UNSETTLED = "unsettled"  # unfinished at the deadline, and the roll-back changed nothing
    SUPERSEDED = "superseded"
    HELD_BACK = "held_back"  # the rehearsal missed a goal that the present pools keep
    CONFLICT = "conflict"  # another writer changed a pool at the same time
    REFUSED = "refused"
    FAILED = "failed"  # the orchestrator did not answer
    HANDED_OVER = "handed_over"  # this planner ended or lost the leadership; the next leader continues the plan


class PlanScore(Struct, frozen=True, kw_only=True):
    """Measured effects of a plan, to be compared with its prediction."""

    ttft_seconds: float | None
    tpot_seconds: float | None
    attainment: float | None
    gpu_hours: float
    """GPU-hours of one hour."""

    dollars: float
    """Dollars of one hour for the replicas."""

    overflow_dollars: float = 0.0
    """Dollars of one hour for requests that a hosted endpoint has answered instead."""

    ttft_error: float | None = None
    """Relative error of the prediction for the pools that really ran; None: nothing was predicted, or nothing served."""

    tpot_error: float | None = None


class PlanRecord(Struct, frozen=True, kw_only=True):
    """One plan."""

    id: PlanId
    at_ms: int
    """Wall-clock time in milliseconds."""

    planner: str
    mode: PlannerMode
    state: PlanState
    reason: DecisionReason
    message: str
    before: dict[PoolName, int]
    replicas: dict[PoolName, int]
    numbers: dict[str, float] = {}
    conditions: tuple[PlanCondition, ...] = ()
    rehearsal: RehearsalResult | None = None
    rehearsal_skipped: str = ""
    """Why there is no rehearsal."""

    ended_ms: int = 0
    """0: it has not ended."""

    detail: str = ""
    """Why it ended as it did, or what the orchestrator says."""

    score: PlanScore | None = None


class PlannerStatus(Struct, frozen=True, kw_only=True):
    """State of a planner, for `fleet plan`."""

    planner: str
    model: str
    mode: PlannerMode
    leads: bool
    rule: str
    at_ms: int
    reason: DecisionReason | None = None
    """Reason of the last decision; None: there is none yet."""

    message: str = ""
    """Why it decided so; without a decision, what it waits for."""

    replicas: dict[PoolName, int] = {}
    """Replicas that it would have now."""

    numbers: dict[str, float] = {}
    conditions: tuple[PlanCondition, ...] = ()
    pools: tuple[PoolObservation, ...] = ()
    demand: dict[str, float | None] = {}
    """The last window: rates, lengths and latencies."""

    overflow: dict[str, float] = {}
    """Requests that a hosted endpoint has answered since this planner started, and their `dollars`."""

    error: float | None = None
    """The larger running error of predicted TTFT and TPOT; None: nothing was scored yet."""

    errors: dict[str, float] = {}
    """Running relative errors of predicted `ttft` and `tpot`."""

    plans: tuple[PlanRecord, ...] = ()
    """The last plans, the newest first."""


class PlanHistory:
    """Records of one planner process, and of those before it in the same file."""

    def __init__(self, path: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._records: OrderedDict[PlanId, PlanRecord] = OrderedDict()
        self._trouble = ""
        for record in self._in_file():
            self._keep(record)

    def keep(self, record: PlanRecord) -> None:
        """Keep a record, or the new state of one; write it to the file."""
        self._keep(record)
        if self._path is None:
            return
        try:
            with suppress(FileNotFoundError):
                if self._path.stat().st_size > self._most_bytes:
                    self._path.replace(_older(self._path))
            descriptor = os.open(self._path, APPENDING, 0o600)
            try:
                os.write(descriptor, msgspec.json.encode(record) + b"\n")
            finally:
                os.close(descriptor)
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("plan record not written", extra={"file": str(self._path), "cause": error.strerror})

    def latest(self, count: int) -> tuple[PlanRecord, ...]:
        """Return the last records, the newest first."""
        return tuple(self._records[each] for each in list(reversed(self._records))[:count])

    def find(self, plan: PlanId) -> PlanRecord | None:
        """Return a record from memory or the file; None if there is none."""
        if (found := self._records.get(plan)) is None:
            with closing(self._in_file()) as records:
                for record in records:
                    found = record if record.id == plan else found
        return found

    def _keep(self, record: PlanRecord) -> None:
        self._records[record.id] = record
        if len(self._records) > KEPT_RECORDS:
            self._records.popitem(last=False)

    def _in_file(self) -> Generator[PlanRecord]:
        if self._path is None:
            return
        for path in (_older(self._path), self._path):
            if not path.is_file():  # opening a device or a pipe could block for ever
                continue
            try:
                with path.open("rb") as file:
                    for line in file:
                        # a line that is incomplete or was written by another program
                        with suppress(msgspec.DecodeError, UnicodeDecodeError):
                            yield msgspec.json.decode(line, type=PlanRecord)
            except OSError:
                continue


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
