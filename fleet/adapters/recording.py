"""Recordings: what a router's machine heard and said, a line of JSON an event, so that it can be made to hear it again.

Rules, in full, for who writes a reader:

1. Line 1 is a `Head`: the version of this format, the seed and the settings that the machine was made with. Each further line is
   an `Entry`; the last one may be an `End`, which says why no more follows. A recording without one was cut off.
2. An entry has the instant, the event's name and fields (`fleet.router.messages`), and what the machine said. `commands` is missing
   where it broke. Commands are lists that begin with their name; see `Said`.
3. Whatever the machine cannot find out by itself is there: `prompt_tokens`, and in `keys` what its hasher answered meanwhile, in order,
   each the keys of a prompt's full blocks, 8 bytes each, little-endian, in base64.
4. Nothing that is only carried along is there: no token ids of prompts or answers, no text of forms or messages, no salts, no
   log probabilities, no parameters of hand-offs; of the settings only those that decide, so no keys, secrets or addresses of theirs.
   Names are: of requests, tenants, sessions, models and workers, with the workers' addresses. Keys are hashes of blocks, salted for
   tenants that have a salt; who guesses a whole prompt of another can find his guess confirmed.

A recording is enough for `fleet sim replay`: the machine is a pure function of it.
"""

import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, assert_never, get_args

import msgspec
from msgspec import Raw, Struct, structs

from fleet.clock import Nanos
from fleet.errors import ConfigurationRefused, Reason
from fleet.ids import RequestId, WorkerId
from fleet.requests import TOKEN_BYTES, AnyObject, Finish, KvReport, Sampling
from fleet.roles import KvPath, Phase
from fleet.router.messages import (
    Arrived,
    CacheDrifts,
    CancelWork,
    Command,
    Complete,
    Dispatch,
    Emit,
    Refuse,
    RouterEvent,
    Stepped,
    WorkRejected,
)
from fleet.router.settings import RouterSettings
from fleet.router.tenants import TenantSettings
from fleet.router.truth import Knowledge
from fleet.work import Handoff, Progress

FORMAT = 1
MAX_LINE_BYTES = 64 << 20  # a cache of a million blocks that a worker tells at once has 30 MB

Keys = tuple[int, ...]


class Head(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line."""

    recording: int  # FORMAT
    fleet: str  # version
    began: Nanos  # of the clock that instants are of
    began_unix: int  # seconds
    seed: int
    settings: RouterSettings


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One event."""

    now: Nanos
    name: str
    event: Raw
    prompt_tokens: int = 0  # of an `Arrived`
    keys: tuple[str, ...] = ()
    commands: "list[Said] | None" = None


class End(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last line."""

    end: str


class Steps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `Stepped`: of all events the one that comes most often, so it is written in short."""

    worker_id: WorkerId
    progress: "list[Step]"


class Step(Struct, frozen=True, array_like=True):
    """A `Progress`."""

    work_id: RequestId
    tokens: int
    finish: Finish | None
    kv: KvReport | None
    handoff: Handoff | None


class Sent(Struct, frozen=True, array_like=True, tag="send"):
    """A `Dispatch`."""

    worker_id: WorkerId
    work_id: RequestId
    phase: Phase
    prompt_tokens: int
    max_tokens: int
    kv_path: KvPath | None
    handed_over: int | None  # tokens; of them
    prefill_worker: WorkerId | None
    priority: int
    timeout_ms: int


class Stopped(Struct, frozen=True, array_like=True, tag="cancel"):
    """A `CancelWork`."""

    worker_id: WorkerId
    work_id: RequestId


class Passed(Struct, frozen=True, array_like=True, tag="emit"):
    """An `Emit`."""

    request_id: RequestId
    tokens: int
    cached_tokens: int


class Completed(Struct, frozen=True, array_like=True, tag="complete"):
    request_id: RequestId
    finish: Finish
    cached_tokens: int


class Refused(Struct, frozen=True, array_like=True, tag="refuse"):
    request_id: RequestId
    reason: Reason
    field: str
    retry_after_ms: int


class Drifted(Struct, frozen=True, array_like=True, tag="drift"):
    worker_id: WorkerId
    knowledge: Knowledge
    drifting: bool
    precision: float
    recall: float


Said = Sent | Stopped | Passed | Completed | Refused | Drifted
"""A command, without what it carries along."""


class RecordingRefused(ConfigurationRefused):
    """It cannot be read; the message names file, line and field."""


# Writing.


def head_line(head: Head) -> bytes:
    """Line 1; of the settings only what decides."""
    return _line(structs.replace(head, settings=deciding(head.settings)))


def entry_line(now: Nanos, event: RouterEvent, keys: Sequence[Keys], commands: Sequence[Command] | None) -> bytes:
    """One event, what the hasher answered to it, and what was said; None: the machine broke."""
    entry = Entry(
        now=now,
        name=type(event).__name__,
        event=Raw(_ENCODER.encode(without_content(event))),
        prompt_tokens=len(event.tokens) // TOKEN_BYTES if isinstance(event, Arrived) else 0,
        keys=tuple(map(_packed, keys)),
        commands=None if commands is None else list(map(said, commands)),
    )
    return _line(entry)


def end_line(why: str) -> bytes:
    return _line(End(end=why))


def deciding(settings: RouterSettings) -> RouterSettings:
    """The settings on which depends what a machine does, and no others: what is not named here is not written, be it secret or not."""
    kept = {name: getattr(settings, name) for name in _DECIDING}
    tenants = {name: TenantSettings(weight=tenant.weight) for name, tenant in settings.tenants.items()}
    chosen = {name: table for name, table in settings.policies.items() if name == settings.policy}
    return RouterSettings(**kept, tenants=tenants, policies=chosen)


_DECIDING = (
    "remote_prefill_min_tokens",
    "oversubscribe",
    "max_queued",
    "max_queue_seconds",
    "priority_seconds",
    "size_seconds",
    "prefer_direct",
    "retry_after_ms",
    "max_attempts",
    "running_request_blocks",
    "engine_hit_credit",
    "store_hit_credit",
    "lower_tier_hit_credit",
    "prefill_window_tokens",
    "prefill_size_seconds",
    "conversion_cost",
    "learn_remote_prefill",
    "policy",
    "policy_budget_ms",
    "session_affinity",
    "session_ttl_seconds",
    "max_sessions",
    "max_store_blocks",
    "explained_requests",
)


def without_content(event: RouterEvent) -> RouterEvent | Steps:
    """The event less what it only carries along (rule 4)."""
    match event:
        case Stepped():
            return Steps(worker_id=event.worker_id, progress=list(map(_step, event.progress)))
        case Arrived():
            return structs.replace(event, tokens=b"", salt=b"", sampling=_plain(event.sampling))
        case WorkRejected():
            return structs.replace(event, rejected=structs.replace(event.rejected, message=""))
        case _:
            return event


def _step(progress: Progress) -> Step:
    handoff = progress.handoff
    if handoff is not None:
        handoff = structs.replace(handoff, params=b"")
    return Step(progress.request_id, len(progress.token_ids), progress.finish, progress.kv, handoff)


def _stepped(steps: Steps) -> Stepped:
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
    return Stepped(worker_id=steps.worker_id, progress=tuple(progress))


def _plain(sampling: Sampling) -> Sampling:
    form = None if sampling.form is None else AnyObject()
    return structs.replace(sampling, form=form, stop_token_ids=())


def said(command: Command) -> Said:
    """The command less what it only carries along."""
    match command:
        case Emit():
            return Passed(command.request_id, len(command.progress.token_ids), command.cached_tokens)
        case Dispatch():
            start = command.start
            handoff: Handoff | None = start.handoff
            return Sent(
                command.worker_id,
                start.request_id,
                start.phase,
                len(start.tokens) // TOKEN_BYTES,
                start.sampling.max_tokens,
                start.kv_path,
                None if handoff is None else handoff.num_tokens,
                None if handoff is None else handoff.prefill_worker,
                start.priority,
                start.timeout_ms,
            )
        case CancelWork():
            return Stopped(command.worker_id, command.request_id)
        case Complete():
            return Completed(command.request_id, command.finish, command.cached_tokens)
        case Refuse():
            return Refused(command.request_id, command.reason, command.field, command.retry_after_ms)
        case CacheDrifts():
            return Drifted(command.worker_id, command.knowledge, command.drifting, command.precision, command.recall)
        case _:
            assert_never(command)


# Reading.


class Recorded(Struct, frozen=True, kw_only=True):
    """An event, read back; its prompt is as long as it was, and blank."""

    line: int
    now: Nanos
    event: RouterEvent
    keys: Sequence[Keys]
    commands: Sequence[Said] | None


class Recording:
    """A file, read from its beginning: `head`, then `entries`, once; then `end` and `torn`."""

    def __init__(self, path: Path):
        """Opens it and reads the head.

        Raises:
            RecordingRefused: There is none, or it is no recording of this format.
        """
        self._path = path
        self._number = 0
        self.end: str | None = None
        self.torn = False  # the last line is cut off
        try:
            with path.open("rb") as file:
                first = self._next(file)
        except OSError as error:
            raise RecordingRefused(f"{path}: {error.strerror}") from error
        if first is None:
            raise RecordingRefused(f"{path}: is empty, or cut off within its first line")
        version = self._decoded(first, _VERSION)
        if version.recording != FORMAT:
            raise RecordingRefused(
                f"{path}: line 1: recording: is of format {version.recording}, and this Fleet reads {FORMAT}"
            )
        self.head = self._decoded(first, _HEAD)

    def entries(self) -> Iterator[Recorded]:
        """All events, in order.

        Raises:
            RecordingRefused: A line is none; those before it were.
        """
        now = self.head.began
        self._number = 0
        with self._path.open("rb") as file:
            self._next(file)
            while (line := self._next(file)) is not None:
                if self.end is not None:
                    raise self._refused("follows the end")
                if line.startswith(b'{"end":'):
                    self.end = self._decoded(line, _END).end
                    continue
                entry = self._decoded(line, _ENTRY)
                if entry.now < now:
                    raise self._refused(f"now: {entry.now} is before {now}, that of the line before")
                now = entry.now
                yield self._recorded(entry)

    def _recorded(self, entry: Entry) -> Recorded:
        if (decoder := _EVENTS.get(entry.name)) is None:
            raise self._refused(f"name: {entry.name!r} is no event of a router")
        event = self._decoded(entry.event, decoder, "event")
        if isinstance(event, Steps):
            event = _stepped(event)
        elif isinstance(event, Arrived):
            event = structs.replace(event, tokens=bytes(TOKEN_BYTES * entry.prompt_tokens))
        try:
            keys = [_unpacked(each) for each in entry.keys]
        except (ValueError, struct.error) as error:
            raise self._refused("keys: are no base64 of 8 bytes each") from error
        return Recorded(line=self._number, now=entry.now, event=event, keys=keys, commands=entry.commands)

    def _next(self, file: BinaryIO) -> bytes | None:
        """The next whole line; None when there is none."""
        self._number += 1
        line = file.readline(MAX_LINE_BYTES)
        if line and not line.endswith(b"\n"):
            if len(line) == MAX_LINE_BYTES:
                raise self._refused(f"is longer than {MAX_LINE_BYTES} bytes")
            self.torn = True
            return None
        return line or None

    def _decoded(self, line: bytes | Raw, decoder: "msgspec.json.Decoder[Any]", where: str = "") -> Any:
        try:
            return decoder.decode(line)
        except msgspec.ValidationError as error:
            cause, _, path = str(error).partition(" - at `$")
            field = f"{where}{path.rstrip('`')}".lstrip(".")
            raise self._refused(f"{field}: {cause}" if field else cause) from error
        except AssertionError as error:  # of a value that checks itself
            raise self._refused(f"{where}: contradicts itself: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._refused(f"{where}: {error}" if where else str(error)) from error

    def _refused(self, why: str) -> RecordingRefused:
        return RecordingRefused(f"{self._path}: line {self._number}: {why}")


class _Version(Struct, frozen=True):
    recording: int


_ENCODER = msgspec.json.Encoder(enc_hook=list)  # keys views and sets, as some collections are
_VERSION = msgspec.json.Decoder(_Version)
_HEAD = msgspec.json.Decoder(Head)
_ENTRY = msgspec.json.Decoder(Entry)
_END = msgspec.json.Decoder(End)
_EVENTS: Mapping[str, "msgspec.json.Decoder[RouterEvent | Steps]"] = {
    kind.__name__: msgspec.json.Decoder(Steps if kind is Stepped else kind) for kind in get_args(RouterEvent)
}
_encode: Callable[[object], bytes] = _ENCODER.encode


def _line(value: object) -> bytes:
    return _encode(value) + b"\n"


def _packed(keys: Keys) -> str:
    return b64encode(struct.pack(f"<{len(keys)}Q", *keys)).decode()


def _unpacked(text: str) -> Keys:
    data = b64decode(text, validate=True)
    return struct.unpack(f"<{len(data) // 8}Q", data)
