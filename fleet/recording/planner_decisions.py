"""Recording of a planner: what each decision was made on, the decision, and each state of each plan. It can be decided again.

Rules:

1. The first line has the settings, each further one a decision or a plan. A decision has everything that the rule was told, so the same
   rule decides the same again, and another rule can be asked about the same demand.
2. A recording is bounded, and its beginning is kept, because a rule has a memory. An existing file is renamed to `.1`, and an earlier one
   is replaced.
3. A recording that cannot be written ends with a log message, and costs no decision.
"""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.planner.decisions import PlanDecision, ScalingRule
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation
from fleet.planner.records import PlanRecord
from fleet.planner.settings import PlannerSettings

log = logging.getLogger(__name__)

FORMAT = 1


class PlannerRecordingHead(Struct, frozen=True, kw_only=True, tag_field="type", tag="head"):
    """First line of a recording."""

    format: int
    settings: PlannerSettings


class RecordedDecision(Struct, frozen=True, kw_only=True, tag_field="type", tag="decision"):
    """One decision, and everything that the rule was told."""

    now: Nanos
    demand: DemandWindow
    seen: Observation
    decision: PlanDecision


class RecordedPlan(Struct, frozen=True, kw_only=True, tag_field="type", tag="plan"):
    """One state of a plan."""

    plan: PlanRecord


PlannerLine = PlannerRecordingHead | RecordedDecision | RecordedPlan


class PlannerRecorder:
    """Writes a recording. Implements `fleet.planner.loop.DecisionRecorder`."""

    def __init__(self, path: Path, most_bytes: int, settings: PlannerSettings) -> None:
        """Begin the recording.

        Raises:
            ConfigurationRefused: The file cannot be written.
        """
        self._path = path
        self._left = most_bytes
        try:
            if path.exists() and not path.is_file():
                raise ConfigurationRefused(f"record: {path}: is not a regular file; name another")
            if path.exists():
                path.replace(path.with_name(f"{path.name}.1"))
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationRefused(f"record: {path}: {error.strerror}") from error
        self._write(PlannerRecordingHead(format=FORMAT, settings=settings))

    def decided(self, now: Nanos, demand: DemandWindow, seen: Observation, decision: PlanDecision) -> None:
        self._write(RecordedDecision(now=now, demand=demand, seen=seen, decision=decision))

    def planned(self, plan: PlanRecord) -> None:
        self._write(RecordedPlan(plan=plan))

    def close(self) -> None:
        """End the recording."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

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


class DecidedAgain(Struct, frozen=True, kw_only=True):
    """Result of deciding again."""

    decisions: int
    different: int
    """Decisions with other replicas or another reason."""

    plans: int
    """Plans that were recorded."""

    first: int | None = None
    """Number of the first decision that differs; None: all are equal."""

    recorded: PlanDecision | None = None
    """That decision as it was recorded."""

    decided: PlanDecision | None = None
    """The decision of the rule that was asked."""


def read_recording(path: Path) -> Iterator[PlannerLine]:
    """Yield the lines of a recording, the head first; a torn last line is left out.

    Raises:
        ConfigurationRefused: The file cannot be read, or is no recording of a planner of this version.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigurationRefused(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines[:-1], start=1):
        try:
            decoded: PlannerLine = msgspec.json.decode(line, type=PlannerLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationRefused(f"{path}: line {number}: {error}") from error
        is_head = isinstance(decoded, PlannerRecordingHead)
        if is_head != (number == 1) or (isinstance(decoded, PlannerRecordingHead) and decoded.format != FORMAT):
            raise ConfigurationRefused(
                f"{path}: line {number}: is not that of a recording of a planner, format {FORMAT}"
            )
        yield decoded
    if len(lines) < 2:
        raise ConfigurationRefused(f"{path}: is empty")


def decide_again(rule: ScalingRule, lines: Iterator[PlannerLine]) -> DecidedAgain:
    """Ask a rule for each recorded decision; `lines` begin after the head."""
    decisions = different = plans = 0
    first: tuple[int, PlanDecision, PlanDecision] | None = None
    for line in lines:
        if isinstance(line, RecordedPlan):
            plans += 1
        elif isinstance(line, RecordedDecision):
            decisions += 1
            decided = rule.decide(line.now, line.demand, line.seen)
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
