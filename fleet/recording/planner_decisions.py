"""Recording of a planner: writes each decision with its inputs, and each state of each plan, so that decisions can be repeated.

Rules:

1. The first line has the settings, and each further line a decision or a plan. A decision is recorded with all inputs of the scaling rule.
   So the same rule can repeat its decision, and another rule can be tried on the same demand.
2. The size of a recording is limited. When the limit is reached, later decisions are lost. The first ones are kept, because a rule
   remembers earlier inputs, so it can repeat its decisions only from the start. An existing file is renamed to `.1`, and replaces an
   earlier `.1`.
3. A recorder locks its file (flock). If another recorder holds the lock, this one leaves the file as it is, records nothing, and logs a
   warning. So a second planner with the same settings does not take the file away from the first one. It tries again at decisions, at
   most every `RETRY_SECONDS`, and begins its recording when the lock is free: a planner may start before its predecessor has ended.
4. If a line cannot be written, the recording ends, this is logged, and the planner continues.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.planner.decisions import PlanDecision, ScalingRule
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation
from fleet.planner.records import PlanRecord
from fleet.planner.settings import PlannerSettings

log = logging.getLogger(__name__)

FORMAT = 1
RETRY_SECONDS = 5
"""Minimum time between two tries to begin a recording in a file that another recorder has locked."""

MOST_LINE = 16 << 20
"""Maximum length of a line. A decision with 10,000 workers has 2 MB."""


class PlannerRecordingHead(Struct, frozen=True, kw_only=True, tag_field="type", tag="head"):
    """The first line of a recording: the version of the format, and the planner's settings."""

    format: int
    settings: PlannerSettings


class RecordedDecision(Struct, frozen=True, kw_only=True, tag_field="type", tag="decision"):
    """The line of one decision, with all inputs of the scaling rule."""

    now: Nanos
    demand: DemandWindow
    seen: Observation
    decision: PlanDecision


class RecordedPlan(Struct, frozen=True, kw_only=True, tag_field="type", tag="plan"):
    """The line that states one plan and its state at one instant."""

    plan: PlanRecord


PlannerLine = PlannerRecordingHead | RecordedDecision | RecordedPlan


class PlannerRecorder:
    """Writes the recording of a planner. The planner's loop uses it as its `fleet.planner.loop.DecisionRecorder`."""

    def __init__(self, path: Path, most_bytes: int, settings: PlannerSettings) -> None:
        """Open the recording and write its first line; if another recorder has the file, begin later (rule 3).

        Raises:
            ConfigurationRefused: The path is not a regular file, or cannot be written.
        """
        self._path = path
        self._left = most_bytes
        self._head = PlannerRecordingHead(format=FORMAT, settings=settings)
        self._file: int | None = None
        self._next_try: Nanos | None = None  # None: the recording has begun or has ended
        try:
            begun = self._begin()
        except OSError as error:
            raise ConfigurationRefused(f"record: {path}: {error.strerror}") from error
        if not begun:
            self._next_try = Nanos(0)
            log.warning("planner records nothing", extra={"file": str(path), "cause": "another planner records there"})

    def decided(self, now: Nanos, demand: DemandWindow, seen: Observation, decision: PlanDecision) -> None:
        if self._next_try is not None and now >= self._next_try:
            self._try_again(now)
        self._write(RecordedDecision(now=now, demand=demand, seen=seen, decision=decision))

    def planned(self, plan: PlanRecord) -> None:
        self._write(RecordedPlan(plan=plan))

    def close(self) -> None:
        """End the recording, and close its file."""
        self._next_try = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self) -> bool:
        """Open the file and write the first line; return False if another recorder has the file.

        Raises:
            ConfigurationRefused: The path is not a regular file.
            OSError: The file cannot be opened, locked or renamed.
        """
        if (file := _new_file(self._path)) is None:
            return False
        self._file = file
        self._write(self._head)
        return True

    def _try_again(self, now: Nanos) -> None:
        """Begin the recording if the other recorder has ended its own; end it if the file cannot be used (rule 4)."""
        self._next_try = Nanos(now + RETRY_SECONDS * SECOND)
        try:
            if self._begin():
                self._next_try = None
                log.info("planner recording begun", extra={"file": str(self._path)})
        except (ConfigurationRefused, OSError) as error:
            log.warning("planner recording ended", extra={"file": str(self._path), "cause": str(error)})
            self.close()

    def _write(self, line: PlannerLine) -> None:
        if self._file is None:
            return
        content = msgspec.json.encode(line) + b"\n"
        self._left -= len(content)
        try:
            if self._left < 0:
                log.info("planner recording complete", extra={"file": str(self._path)})
                self.close()
            elif os.write(self._file, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.warning("planner recording ended", extra={"file": str(self._path), "cause": error.strerror})
            self.close()


def _new_file(path: Path) -> int | None:
    """Open and lock an empty file at the path, and return its descriptor. A file with content that is there is renamed to `.1`.

    Return None if another process has locked the file.

    Raises:
        ConfigurationRefused: The path is not a regular file.
        OSError: A file cannot be opened, locked or renamed.
    """
    while True:
        if path.exists() and not path.is_file():
            raise ConfigurationRefused(f"record: {path}: is not a regular file; name another")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = path.exists() and os.path.samestat(path.stat(), os.fstat(file))
            if here and not os.fstat(file).st_size:
                return file
            if here:
                path.replace(path.with_name(f"{path.name}.1"))
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:
            os.close(file)
            raise
        os.close(file)  # it was renamed, by this process or by another one: open the file that is at the path now


class DecidedAgain(Struct, frozen=True, kw_only=True):
    """The result of repeating recorded decisions: how many differ from the recorded ones, and the first one that differs."""

    decisions: int
    different: int
    """Number of decisions whose replicas or reason differ from those that were recorded."""

    plans: int
    """Number of lines in the recording that state a plan; a plan has a line for each of its recorded states."""

    first: int | None = None
    """Number of the first decision that differs, counted from 1 over all recorded decisions; None: no decision differs."""

    recorded: PlanDecision | None = None
    """The first different decision as it was recorded."""

    decided: PlanDecision | None = None
    """The first different decision as the rule decides it now."""


def read_recording(path: Path) -> Iterator[PlannerLine]:
    """Yield the lines of a recording, beginning with the first one. A last line that is cut off is left out.

    Raises:
        ConfigurationRefused: The file cannot be read, or is no recording of a planner of this version.
    """
    number = 0
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            decoded: PlannerLine = msgspec.json.decode(line, type=PlannerLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationRefused(f"{path}: line {number}: {error}") from error
        is_head = isinstance(decoded, PlannerRecordingHead)
        if is_head != (number == 1) or (isinstance(decoded, PlannerRecordingHead) and decoded.format != FORMAT):
            raise ConfigurationRefused(
                f"{path}: line {number}: is not that of a recording of a planner, format {FORMAT}"
            )
        yield decoded
    if not number:
        raise ConfigurationRefused(f"{path}: is empty")


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without a last line that is cut off.

    Raises:
        ConfigurationRefused: The file cannot be read, or a line is longer than `MOST_LINE`.
    """
    try:
        with path.open("rb") as file:
            while line := file.readline(MOST_LINE):
                if line.endswith(b"\n"):
                    yield line
                elif len(line) == MOST_LINE:
                    raise ConfigurationRefused(
                        f"{path}: is no recording of a planner: it has a line of more than {MOST_LINE >> 20} MiB"
                    )
    except OSError as error:
        raise ConfigurationRefused(f"{path}: {error.strerror}") from error


def decide_again(rule: ScalingRule, lines: Iterator[PlannerLine]) -> DecidedAgain:
    """Let a scaling rule decide again on the recorded inputs of each decision. `lines` are all lines after the first one.

    Raises:
        ConfigurationRefused: The inputs have numbers with which the rule cannot compute.
    """
    decisions = different = plans = 0
    first: tuple[int, PlanDecision, PlanDecision] | None = None
    for line in lines:
        if isinstance(line, RecordedPlan):
            plans += 1
        elif isinstance(line, RecordedDecision):
            decisions += 1
            try:
                decided = rule.decide(line.now, line.demand, line.seen)
            except (ArithmeticError, ValueError) as error:
                raise ConfigurationRefused(f"decision {decisions}: cannot be repeated: {error}") from error
            if (decided.replicas, decided.reason) != (line.decision.replicas, line.decision.reason):
                different += 1
                first = first or (decisions, line.decision, decided)
    return DecidedAgain(
        decisions=decisions,
        different=different,
        plans=plans,
        first=None if first is None else first[0],
        recorded=None if first is None else first[1],
        decided=None if first is None else first[2],
    )
