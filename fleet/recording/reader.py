"""Reader of recordings: reads files in the form of `fleet.recording.format`, also if gzip has compressed them."""

import struct
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
from msgspec import Raw, Struct, structs

from fleet.core.clock import Nanos
from fleet.core.errors import ConfigurationRefused, split_validation_error
from fleet.core.requests import TOKEN_BYTES
from fleet.core.work import Progress
from fleet.recording.format import (
    FORMAT,
    Keys,
    RecordedCommand,
    RecordedSteps,
    RecordingEnd,
    RecordingEntry,
    RecordingHead,
    written_name,
)
from fleet.recording.trace_rows import READ_ERRORS, open_plain_or_gzip, read_error_cause
from fleet.router.messages import Arrived, RouterEvent, WorkerStepped

# Maximum number of bytes of a line; a longer one is an error. The line of an event with a million cached blocks has 30 MB.
MAX_LINE_BYTES = 64 << 20


class RecordingError(ConfigurationRefused):
    """Error: the recording cannot be read. The message names the file, the line and the field."""


class RecordedEvent(Struct, frozen=True, kw_only=True):
    """One event of a recording, with its commands. The prompt's tokens are zeros, because only their number is recorded."""

    line: int
    now: Nanos
    event: RouterEvent
    keys: Sequence[Keys]
    commands: Sequence[RecordedCommand] | None


class Recording:
    """Reads a recording. The constructor sets `head`. `entries` may be called only once; after its last event, `end` and `torn` are set.

    `end` is the reason why the recording ended, or None if the recording was cut off.
    """

    def __init__(self, path: Path):
        """Open the file and read its first line.

        Raises:
            RecordingError: The file cannot be read, is cut off in its first line, or is no recording of this format.
        """
        self._path = path
        self._line_number = 0
        self.end: str | None = None
        self.torn = False  # True if the last line was cut off, as when the router was killed
        try:
            with open_plain_or_gzip(path) as file:
                first = self._next_line(file)
        except READ_ERRORS as error:
            raise RecordingError(f"{path}: {read_error_cause(error)}") from error
        if first is None:
            raise RecordingError(f"{path}: is empty, or cut off within its first line")
        version = self._decode(first, _VERSION)
        if version.recording != FORMAT:
            raise RecordingError(
                f"{path}: line 1: recording: is of format {version.recording}, and this Fleet reads {FORMAT}"
            )
        self.head = self._decode(first, _HEAD)

    def entries(self) -> Iterator[RecordedEvent]:
        """Yield all events in order.

        Raises:
            RecordingError: A line is malformed, or the file cannot be read. The events that were yielded before are valid.
        """
        try:
            yield from self._entries()
        except READ_ERRORS as error:
            raise RecordingError(f"{self._path}: {read_error_cause(error)}") from error

    def _entries(self) -> Iterator[RecordedEvent]:
        now = self.head.began
        self._line_number = 0
        with open_plain_or_gzip(self._path) as file:
            self._next_line(file)
            while (line := self._next_line(file)) is not None:
                if self.end is not None:
                    raise self._error("follows the end")
                if line.startswith(b'{"end":'):
                    self.end = self._decode(line, _END).end
                    continue
                entry = self._decode(line, _ENTRY)
                if entry.now < now:
                    raise self._error(f"now: {entry.now} is before {now}, that of the line before")
                now = entry.now
                yield self._read_event(entry)

    def _read_event(self, entry: RecordingEntry) -> RecordedEvent:
        if (decoder := _events().get(entry.name)) is None:
            raise self._error(f"name: {entry.name!r} is not an event of a router")
        event = self._decode(entry.event, decoder, "event")
        if isinstance(event, RecordedSteps):
            event = _stepped(event)
        elif isinstance(event, Arrived):
            event = structs.replace(event, tokens=bytes(TOKEN_BYTES * entry.prompt_tokens))
        try:
            keys = [_unpacked(each) for each in entry.keys]
        except (ValueError, struct.error) as error:
            raise self._error("keys: are not base64 of 8 bytes each") from error
        return RecordedEvent(line=self._line_number, now=entry.now, event=event, keys=keys, commands=entry.commands)

    def _next_line(self, file: BinaryIO) -> bytes | None:
        """Return the next line that is complete and not empty; None at the end of the file, or at a line that is cut off (`torn`)."""
        while True:
            self._line_number += 1
            line = file.readline(MAX_LINE_BYTES)
            if line and not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise self._error(f"is longer than {MAX_LINE_BYTES} bytes")
                self.torn = True
                return None
            if not line.isspace():
                return line or None

    def _decode(self, line: bytes | Raw, decoder: "msgspec.json.Decoder[Any]", where: str = "") -> Any:
        try:
            return decoder.decode(line)
        except msgspec.ValidationError as error:
            cause, path = split_validation_error(error)
            field = f"{where}{path}".removeprefix(".")
            raise self._error(f"{field}: {cause}" if field else cause) from error
        except AssertionError as error:  # raised by values that check their fields in `__post_init__`
            raise self._error(f"{where}: contradicts itself: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error(f"{where}: {error}" if where else str(error)) from error

    def _error(self, why: str) -> RecordingError:
        return RecordingError(f"{self._path}: line {self._line_number}: {why}")


class _RecordingVersion(Struct, frozen=True):
    recording: int


def _stepped(steps: RecordedSteps) -> WorkerStepped:
    progress = [
        Progress(
            request_id=step.work_id,
            token_ids=(0,) * step.tokens,
            finish=step.finish,
            kv=step.kv,
            handoff=step.handoff,
        )
        for step in steps.progress
    ]
    return WorkerStepped(worker_id=steps.worker_id, progress=tuple(progress))


def _unpacked(text: str) -> Keys:
    data = b64decode(text, validate=True)
    return struct.unpack(f"<{len(data) // 8}Q", data)


_VERSION = msgspec.json.Decoder(_RecordingVersion)
_HEAD = msgspec.json.Decoder(RecordingHead)
_ENTRY = msgspec.json.Decoder(RecordingEntry)
_END = msgspec.json.Decoder(RecordingEnd)


@cache
def _events() -> "Mapping[str, msgspec.json.Decoder[RouterEvent | RecordedSteps]]":
    """Return the decoder of each event by its recorded name. The decoders are made at the first use, because that takes some time."""
    kinds = get_args(RouterEvent)
    return {
        written_name(kind): msgspec.json.Decoder(RecordedSteps if kind is WorkerStepped else kind) for kind in kinds
    }
