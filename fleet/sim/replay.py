"""Replay of a live router's recording: gives its events to a new router machine, and compares the machine's commands with the recording.

`fleet.sim.workload.traffic` replays traces of requests instead.

Rules:

1. The machine gets only what the recording contains: the seed, the settings, the events at their instants, and the block
   keys of prompts. If the machine's commands differ from the recorded ones, the machine's code or the recording has
   changed. If neither has changed, the machine's commands depend on something else, which is a bug.
2. Commands are compared event by event, in the form in which they are recorded (`fleet.recording.format`). The replay ends at the
   first difference, because the later events of the recording depend on the recorded commands.
3. If the caller gives profiles of the workers, the replay also measures how well these predict the recorded latencies
   (`fleet.router.latency_predictions`).
4. The replay calls policies of other packages without a time limit. A live router has a time limit: if such a policy
   was too slow while the recording was made, the default policy decided instead. The replay then reports a
   difference if the two policies decide differently.
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
    """The first event for which the replayed commands differ from the recorded ones."""

    line: int  # number of the event's line in the recording
    seconds: float  # time since the beginning of the recording
    event: str
    fields: dict[str, Any]  # fields of the event, as recorded
    recorded: list[Any] | None  # recorded commands; None: the router's machine raised an error
    replayed: list[Any] | None
    # why the commands differ: the machine raises an error now, or requests block keys that are not in the recording; empty: for neither
    # of these reasons
    why: str = ""
    decisions: list[str] = []  # lines of the decision log for this event, from the replay


class WorkerDrift(Struct, frozen=True, kw_only=True):
    """An alarm of the replay: measured latencies of a worker no longer fit the predictions (latency drift)."""

    seconds: float  # time since the beginning of the recording
    worker_id: WorkerId
    kind: PredictionKind  # kind of latency that is predicted wrongly


class RecordingReplayResult(Struct, frozen=True, kw_only=True):
    """Result of a replay; `fleet sim replay --json` prints it."""

    agree: bool
    events: int
    commands: int
    requests: int
    recorded_seconds: float  # recorded time from the first event to the last, in seconds
    recorded_by: str  # version of Fleet that made the recording
    began_unix: int
    notes: list[str]
    difference: ReplayDifference | None = None
    # how well profiles predicted the latencies of workers; empty if the caller gave no profiles
    expected: list[PredictionAccuracy] = []
    drifts: list[WorkerDrift] = []


class _RecordedKeys:
    """Answers the machine's requests for block keys with the recorded answers, in order."""

    def __init__(self) -> None:
        self._keys: list[Keys] = []
        self.missed = ""  # error message if the machine requested keys that are not in the recording; otherwise empty

    def expect(self, keys: Sequence[Keys]) -> None:
        self._keys = list(reversed(keys))

    def hash(self, tokens: TokenBytes, block_tokens: int, salt: bytes) -> Keys:  # noqa: ARG002 - signature of a `PromptHasher`
        if self._keys:
            return self._keys.pop()
        self.missed = (
            f"it asks for the keys of a prompt, in blocks of {block_tokens} tokens, which it did not; it gets none"
        )
        return ()


class RecordingReplay:
    """Replays one recording with a new machine; `run` works only once."""

    def __init__(self, path: Path, profile_of: Callable[[WorkerDescription], WorkerProfile | None] | None = None):
        """Read the head of a recording. The replay predicts latencies for each worker for which `profile_of` returns a profile.

        Raises:
            ConfigurationRefused: The file is no recording, or its policy is not installed.
        """
        self._recording = Recording(path)
        self._recorded_keys = _RecordedKeys()
        self._log = DecisionLog()
        settings = structs.replace(self._recording.head.settings, policy_budget_ms=UNHURRIED_MS)
        self._machine = self._log.machine = RouterMachine(
            settings, Random(self._recording.head.seed), _policy(path, settings), self._recorded_keys.hash
        )
        self._predictions = LatencyPredictions(profile_of or (lambda _: None))
        self._predictions.machine = self._machine

    def run(self, decided: Callable[[Sequence[str]], None] | None = None) -> RecordingReplayResult:
        """Replay the recording to its end, or to the first difference.

        Args:
            decided: Called for each event with the decisions that follow from it, as lines of `fleet.sim.decision_log`; or None.

        Raises:
            RecordingError: A line of the recording cannot be read as an event with its commands.
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
            commands_now, why = self._handle(entry)
            self._predictions(entry.now, entry.event, commands_now)
            replayed = None if commands_now is None else list(map(record_command, commands_now))
            commands += len(replayed or ())
            differs = replayed != entry.commands or bool(self._recorded_keys.missed)
            if decided is not None or differs:
                self._log.lines.clear()
                self._log(entry.now, entry.event, commands_now)
            if decided is not None:
                decided(self._log.lines)
            if differs:
                difference = _difference(
                    entry, replayed, why or self._recorded_keys.missed, self._log.lines, recording.head.began
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
            expected=self._predictions.expected(departed=True),
            drifts=[
                WorkerDrift(seconds=_since(alarm.at, recording.head.began), worker_id=alarm.worker_id, kind=alarm.kind)
                for alarm in self._predictions.alarms
            ],
        )

    def _handle(self, entry: RecordedEvent) -> tuple[list[Command] | None, str]:
        """Return the machine's commands and an empty text, or None and the error message if the machine raised an error."""
        self._recorded_keys.expect(entry.keys)
        try:
            return self._machine.handle(entry.event, entry.now), ""
        except Exception as error:  # noqa: BLE001 - supervisor: the replay reports any error of the machine as a difference
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
