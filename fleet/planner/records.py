"""Plan records: store for each plan what the planner decided and why, what it predicted, and what happened.

The records are kept in memory and in a file of JSON lines.

Rules:

1. A record is written when its plan begins, when the plan's rehearsal has ended, when the plan ends, and when the plan has its score.
   The score (`PlanScore`) is what was measured after the plan, and the errors of the predictions. Each time, the record is a new line
   with the same id; the last line with an id is the valid one.
2. The file is rotated at `MOST_BYTES`; one older file remains, with the suffix `.1`. If the file cannot be written, a warning is logged
   once for each cause, and plans are still carried out.
3. Several planners may append to one file, each record by one write. The file is locked while it is renamed, so that only one of them
   rotates it. On a file system without locks, it is renamed without a lock. If the disk is full in the middle of a record, the next record begins on a new line.
"""

import errno
import fcntl
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
# The path may lead to a named pipe. With O_NONBLOCK, opening a pipe without a reader fails instead of blocking.
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


class PlanState(StrEnum):
    """States that a plan can have."""

    SHADOW = "shadow"  # the plan is shown, and gets a score (`PlanScore`), but it is not applied
    REHEARSED = "rehearsed"  # the rehearsal runs, and the plan is not written yet
    UNDER_WAY = "under_way"
    SETTLED = "settled"
    ROLLED_BACK = "rolled_back"
    UNSETTLED = "unsettled"  # the plan was unfinished at its deadline, and nothing could be rolled back
    SUPERSEDED = "superseded"
    HELD_BACK = "held_back"  # the rehearsal predicts that the plan misses a goal that the present pools keep
    CONFLICT = "conflict"  # another writer changed a pool of the plan after the planner had observed it
    REFUSED = "refused"
    FAILED = "failed"  # the orchestrator did not answer, or has ended
    # This planner ended or lost the leadership. If the plan was written already, the next leader continues it.
    HANDED_OVER = "handed_over"


class PlanScore(Struct, frozen=True, kw_only=True):
    """Holds the latencies and costs that were measured after a plan, and the errors of their predictions."""

    ttft_seconds: float | None
    tpot_seconds: float | None
    attainment: float | None
    gpu_hours: float
    """GPU-hours that the pools used, for each hour of the measured time."""

    dollars: float
    """Dollars that the replicas cost, for each hour of the measured time."""

    overflow_dollars: float = 0.0
    """Dollars that a hosted endpoint cost for requests that it answered instead of the pools, for each hour of the measured
    time."""

    ttft_error: float | None = None
    """Error of the predicted TTFT (`fleet.planner.sizing.prediction_error`), or None if nothing was predicted or no request was
    served. The prediction is that for the planned pools, or in shadow mode, that for the present pools."""

    tpot_error: float | None = None


class PlanRecord(Struct, frozen=True, kw_only=True):
    """Holds everything that is known about one plan: the decision, its state, the rehearsal and the score."""

    id: PlanId
    at_ms: int
    """Wall-clock time of the decision, in milliseconds since 1970."""

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
    """Why the plan has no result of a rehearsal; empty if it has one, or if the rehearsal has not ended."""

    ended_ms: int = 0
    """Wall-clock time at which the plan ended, in milliseconds since 1970, or 0 if it has not ended."""

    detail: str = ""
    """Why the plan ended as it did, or the last message of the orchestrator; shortened (`fleet.planner.messages.shortened`)."""

    score_due_ms: int = 0
    """Wall-clock time at which the plan gets its score, in milliseconds since 1970. 0 if the plan has not ended, or gets no
    score: only plans that settled, and those of shadow mode, are scored."""

    score: PlanScore | None = None
    """The measurement after the plan, with the errors of the predictions; None if the plan has no score yet, or never gets one."""


class PlannerStatus(Struct, frozen=True, kw_only=True):
    """Describes the present state of a planner, which `fleet plan` shows."""

    planner: str
    model: str
    mode: PlannerMode
    leads: bool
    rule: str
    at_ms: int
    reason: DecisionReason | None = None
    """Reason of the last decision, or None before the first decision."""

    message: str = ""
    """Explanation of the last decision, or, before the first one, what the planner waits for."""

    replicas: dict[PoolName, int] = {}
    """Number of replicas of each pool, as the last decision requests it."""

    numbers: dict[str, float] = {}
    conditions: tuple[PlanCondition, ...] = ()
    pools: tuple[PoolObservation, ...] = ()
    demand: dict[str, float | None] = {}
    """Numbers of the last demand window by name, such as rates, lengths and latencies; None if not measured."""

    overflow: dict[str, float] = {}
    """Overflow since this planner started: the number of requests that a hosted endpoint has answered (`requests`), and the
    cost of these requests (`dollars`)."""

    error: float | None = None
    """The largest value in `errors`, or None if `errors` is empty."""

    errors: dict[str, float] = {}
    """Running means of the errors of the predicted latencies (`fleet.planner.sizing.prediction_error`), by name: `ttft` and `tpot`."""

    plans: tuple[PlanRecord, ...] = ()
    """The last plans, the newest first."""


class PlanHistory:
    """Keeps the latest plan records in memory, and appends all records to a file, if there is one (`path`).

    The constructor reads the records in this file and in the older file (rule 2).
    """

    def __init__(self, path: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._records: OrderedDict[PlanId, PlanRecord] = OrderedDict()
        self._trouble = ""
        for record in self._in_file():
            self._keep(record)

    def keep(self, record: PlanRecord) -> None:
        """Keep a new record, or replace the one with the same id. Append it to the file, if there is one; log a warning if this fails."""
        self._keep(record)
        if self._path is None:
            return
        try:
            self._rotate(self._path)
            descriptor = os.open(self._path, APPENDING, 0o600)
            try:
                content = _line_break(self._path) + msgspec.json.encode(record) + b"\n"
                if os.write(descriptor, content) < len(content):  # the disk is full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("plan record not written", extra={"file": str(self._path), "cause": error.strerror})

    def _rotate(self, path: Path) -> None:
        """Rename the file if it is full, unless another planner that has the same file is doing it.

        The file is locked (flock) while it is renamed. Otherwise two planners could both see a full file, and the second one would
        replace the full file with a new one.
        """
        try:
            if path.stat().st_size <= self._most_bytes:
                return
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            _lock(descriptor)
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                path.replace(_older(path))
        except (BlockingIOError, FileNotFoundError):  # another planner renames the file, or has renamed it
            pass
        finally:
            os.close(descriptor)

    def latest(self, count: int) -> tuple[PlanRecord, ...]:
        """Return at most `count` of the last records, the newest first."""
        return tuple(self._records[each] for each in list(reversed(self._records))[:count])

    def find(self, plan: PlanId) -> PlanRecord | None:
        """Return a record from memory or from the file, or None if there is none."""
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
            if not path.is_file():  # opening a pipe or a device could block for ever
                continue
            try:
                with path.open("rb") as file:
                    for line in file:
                        # skip a line that is incomplete or was written by another program
                        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                            yield msgspec.json.decode(line, type=PlanRecord)
            except OSError:
                continue


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _lock(descriptor: int) -> None:
    """Lock a file, if its file system has locks.

    Raises:
        BlockingIOError: Another process has locked the file.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # rotating without a lock is better than a file that grows or takes no more records
        log.debug("plan records cannot be locked", exc_info=True)


def _line_break(path: Path) -> bytes:
    """Return a line break if a file ends within a line, and nothing otherwise. A pipe or a device is not read."""
    with suppress(OSError):  # the file is not readable, or another planner has just renamed it
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                return b"" if file.read(1) == b"\n" else b"\n"
    return b""
