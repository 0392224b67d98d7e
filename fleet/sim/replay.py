"""A recording of a live router, heard again by the same machine: does it say the same?

Rules:

1. The machine is made with the recording's seed and settings and hears its events at their instants; it is asked nothing else. So it says
   what it said, or its code has changed since, or the recording, or it is no pure function of its history: a bug.
2. Commands are compared as they are recorded (`fleet.recording.format`), event by event. With the first difference the replay
   ends: from there on the recording tells of another history.
3. Given what profiles say of its workers, it also tells how well that predicts what they did (`fleet.router.latency_predictions`).
4. Policies that are not this package's are asked again, with all the time they need. Where one was too slow when it was recorded,
   the default policy decided, and that is a difference.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct, structs

from fleet.core.clock import SECOND
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import WorkerId
from fleet.core.requests import TokenBytes
from fleet.core.work import WorkerDescription
from fleet.recording.format import Keys, RecordedCommand, record_command, written_name
from fleet.recording.reader import RecordedEvent, Recording
from fleet.router.latency_predictions import LatencyPredictions, PredictionAccuracy, PredictionKind, WorkerProfile
from fleet.router.machine import RouterMachine
from fleet.router.messages import Arrived, Command
from fleet.router.placement.plugins import open_policy
from fleet.router.policy import PlacementPolicy
from fleet.router.settings.router import RouterSettings
from fleet.sim.decision_log import DecisionLog

UNHURRIED_MS = 1e6


class ReplayDifference(Struct, frozen=True, kw_only=True):
    """Where a replay parted from its recording."""

    line: int  # of the recording
    seconds: float  # since its beginning
    event: str
    fields: dict[str, Any]  # of the event, as recorded
    recorded: list[Any] | None  # commands; None: the machine broke
    replayed: list[Any] | None
    why: str = ""  # it breaks now, or asks for what it did not ask for
    decisions: list[str] = []  # that lead to what is said now, and all that is booked after it


class WorkerDrift(Struct, frozen=True, kw_only=True):
    """A worker became another than it was."""

    seconds: float  # since the beginning of the recording
    worker_id: WorkerId
    kind: PredictionKind  # of prediction that began to miss


class RecordingReplayResult(Struct, frozen=True, kw_only=True):
    """What a replay showed."""

    agree: bool
    events: int
    commands: int
    requests: int
    recorded_seconds: float  # from the first event to the last
    recorded_by: str  # version of Fleet
    began_unix: int
    notes: list[str]
    difference: ReplayDifference | None = None
    expected: list[PredictionAccuracy] = []  # how well profiles predict what workers did, where any were given
    drifts: list[WorkerDrift] = []


class _RecordedKeys:
    """What the hasher said when it was recorded, in order."""

    def __init__(self) -> None:
        self._keys: list[Keys] = []
        self.missed = ""  # what it is asked that it was not asked then

    def expect(self, keys: Sequence[Keys]) -> None:
        self._keys = list(reversed(keys))

    def hash(self, tokens: TokenBytes, block_tokens: int, salt: bytes) -> Keys:  # noqa: ARG002 - a `Hasher`
        if self._keys:
            return self._keys.pop()
        self.missed = (
            f"it asks for the keys of a prompt, in blocks of {block_tokens} tokens, which it did not; it gets none"
        )
        return ()


class RecordingReplay:
    """One recording and the machine that hears it; `run` it once."""

    def __init__(self, path: Path, profile_of: Callable[[WorkerDescription], WorkerProfile | None] | None = None):
        """Reads the head.

        Args:
            path: Of the recording.
            profile_of: What is known of a worker beforehand; None: nothing is expected of any.

        Raises:
            ConfigurationRefused: It is no recording, or its policy is not installed.
        """
        self._recording = Recording(path)
        self._answers = _RecordedKeys()
        self._log = DecisionLog()
        settings = structs.replace(self._recording.head.settings, policy_budget_ms=UNHURRIED_MS)
        self._machine = self._log.machine = RouterMachine(
            settings, Random(self._recording.head.seed), _policy(path, settings), self._answers.hash
        )
        self._expectations = LatencyPredictions(profile_of or (lambda _: None))
        self._expectations.machine = self._machine

    def run(self, decided: Callable[[Sequence[str]], None] | None = None) -> RecordingReplayResult:
        """Hear it to its end, or to the first difference.

        Args:
            decided: Told of the decisions of each event, as `fleet.sim.decision_log` has them.

        Raises:
            RecordingRefused: A line cannot be understood.
        """
        recording = self._recording
        first = last = recording.head.began
        events = commands = requests = 0
        difference = None
        for entry in recording.entries():
            first = entry.now if not events else first
            last = entry.now
            events += 1
            requests += isinstance(entry.event, Arrived)
            now_said, why = self._hear(entry)
            self._expectations(entry.now, entry.event, now_said)
            replayed = None if now_said is None else list(map(record_command, now_said))
            commands += len(replayed or ())
            differs = replayed != entry.commands or bool(self._answers.missed)
            if decided is not None or differs:
                self._log.lines.clear()
                self._log(entry.now, entry.event, now_said)
            if decided is not None:
                decided(self._log.lines)
            if differs:
                difference = _difference(
                    entry, replayed, why or self._answers.missed, self._log.lines, recording.head.began
                )
                break
        return RecordingReplayResult(
            agree=difference is None,
            events=events,
            commands=commands,
            requests=requests,
            recorded_seconds=_since(last, first),
            recorded_by=recording.head.fleet,
            began_unix=recording.head.began_unix,
            notes=[] if difference is not None else _notes(recording),
            difference=difference,
            expected=self._expectations.expected(departed=True),
            drifts=[
                WorkerDrift(seconds=_since(alarm.at, recording.head.began), worker_id=alarm.worker_id, kind=alarm.kind)
                for alarm in self._expectations.alarms
            ],
        )

    def _hear(self, entry: RecordedEvent) -> tuple[list[Command] | None, str]:
        """What the machine says now, and why it broke, if it did."""
        self._answers.expect(entry.keys)
        try:
            return self._machine.handle(entry.event, entry.now), ""
        except Exception as error:  # noqa: BLE001 - supervisor: a machine that breaks is what is looked for
            return None, f"{type(error).__name__}: {error}"


def _policy(path: Path, settings: RouterSettings) -> PlacementPolicy:
    try:
        return open_policy(settings)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"{path}: line 1: settings: {error}") from error


def _difference(
    entry: RecordedEvent, replayed: Sequence[RecordedCommand] | None, why: str, decisions: Sequence[str], began: int
) -> ReplayDifference:
    fields = msgspec.to_builtins(entry.event, enc_hook=list)
    fields.pop("tokens", None)
    return ReplayDifference(
        line=entry.line,
        seconds=_since(entry.now, began),
        event=written_name(type(entry.event)),
        fields=fields,
        recorded=_builtins(entry.commands),
        replayed=_builtins(replayed),
        why=why,
        decisions=list(decisions),
    )


def _since(instant: int, began: int) -> float:
    return round((instant - began) / SECOND, 6)


def _builtins(commands: Iterable[RecordedCommand] | None) -> list[Any] | None:
    return None if commands is None else [msgspec.to_builtins(each) for each in commands]


def _notes(recording: Recording) -> list[str]:
    if recording.torn:
        return ["its last line is cut off, as when a router is killed; it was replayed up to there"]
    if recording.end is None:
        return ["it has no end: the router was killed, or records on"]
    return [f"it ends because {recording.end}"]
