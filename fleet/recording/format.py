"""Recordings: what a router's machine heard and said, a line of JSON an event, so that it can be made to hear it again.

Rules, in full, for who writes a reader:

1. Line 1 is a `RecordingHead`: the version of this format, the seed and the settings that the machine was made with. Each further line is
   an `RecordingEntry`; the last one may be an `RecordingEnd`, which says why no more follows. A recording without one was cut off.
2. An entry has the instant, the event's name and fields (`fleet.router.messages`), and what the machine said. `commands` is missing
   where it broke. Commands are lists that begin with their name; see `RecordedCommand`.
3. Whatever the machine cannot find out by itself is there: `prompt_tokens`, and in `keys` what its hasher answered meanwhile, in order,
   each the keys of a prompt's full blocks, 8 bytes each, little-endian, in base64.
4. Nothing that is only carried along is there: no token ids of prompts or answers, no text of forms or messages, no salts, no
   log probabilities, no parameters of hand-offs; of the settings only those that decide, so no keys, secrets or addresses of theirs.
   Names are: of requests, tenants, sessions, models and workers, with the workers' addresses. Keys are hashes of blocks, salted for
   tenants that have a salt; who guesses a whole prompt of another can find his guess confirmed.

A recording is enough for `fleet sim replay`: the machine is a pure function of it.
"""

import struct
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec
from msgspec import Raw, Struct, structs

from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, AnyObject, Finish, KvReport, Sampling
from fleet.core.roles import KvPath, Phase
from fleet.core.work import Handoff, Progress
from fleet.router.kv_index.cache_accuracy import Knowledge
from fleet.router.messages import (
    Arrived,
    AttemptRejected,
    CacheDriftChanged,
    CancelAttempt,
    Command,
    Complete,
    Dispatch,
    Emit,
    PeerLeft,
    PeerPlaced,
    PeerReserved,
    Reject,
    RequestCancelled,
    RouterEvent,
    RouterTicked,
    StartedOver,
    ThresholdsChanged,
    WorkerStepped,
)
from fleet.router.settings.router import RouterSettings
from fleet.router.tenants import TenantSettings

FORMAT = 1

Keys = tuple[int, ...]


class RecordingHead(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line."""

    recording: int  # FORMAT
    fleet: str  # version
    began: Nanos  # of the clock that instants are of
    began_unix: int  # seconds
    seed: int
    settings: RouterSettings


class RecordingEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One event."""

    now: Nanos
    name: str
    event: Raw
    prompt_tokens: int = 0  # of an `Arrived`
    keys: tuple[str, ...] = ()
    commands: "list[RecordedCommand] | None" = None


class RecordingEnd(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last line."""

    end: str


class RecordedSteps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `WorkerStepped`: of all events the one that comes most often, so it is written in short."""

    worker_id: WorkerId
    progress: "list[RecordedProgress]"


class RecordedProgress(Struct, frozen=True, array_like=True):
    """A `Progress`."""

    work_id: RequestId
    tokens: int
    finish: Finish | None
    kv: KvReport | None
    handoff: Handoff | None


class RecordedDispatch(Struct, frozen=True, array_like=True, tag="send"):
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


class RecordedCancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """A `CancelAttempt`."""

    worker_id: WorkerId
    work_id: RequestId


class RecordedEmit(Struct, frozen=True, array_like=True, tag="emit"):
    """An `Emit`."""

    request_id: RequestId
    tokens: int
    cached_tokens: int


class RecordedRestart(Struct, frozen=True, array_like=True, tag="start over"):
    """A `StartedOver`."""

    request_id: RequestId


class RecordedCompletion(Struct, frozen=True, array_like=True, tag="complete"):
    request_id: RequestId
    finish: Finish
    cached_tokens: int


class RecordedRejection(Struct, frozen=True, array_like=True, tag="refuse"):
    request_id: RequestId
    reason: Reason
    field: str
    retry_after_ms: int


class RecordedCacheDrift(Struct, frozen=True, array_like=True, tag="drift"):
    worker_id: WorkerId
    knowledge: Knowledge
    drifting: bool
    precision: float
    recall: float


RecordedCommand = (
    RecordedDispatch
    | RecordedCancel
    | RecordedEmit
    | RecordedRestart
    | RecordedCompletion
    | RecordedRejection
    | RecordedCacheDrift
)
"""A command, without what it carries along."""


WRITTEN_NAMES: dict[type, str] = {
    RequestCancelled: "Cancelled",
    WorkerStepped: "Stepped",
    RouterTicked: "Ticked",
    ThresholdsChanged: "Tuned",
    AttemptRejected: "WorkRejected",
    PeerReserved: "ReplicaBooked",
    PeerPlaced: "ReplicaPlaced",
    PeerLeft: "ReplicaLeft",
}
"""The names of events in recordings, where they differ from the names of the classes."""


def written_name(kind: type) -> str:
    """Return the name of a kind of event in recordings."""
    return WRITTEN_NAMES.get(kind, kind.__name__)


def head_line(head: RecordingHead) -> bytes:
    """Line 1; of the settings only what decides."""
    return _line(structs.replace(head, settings=deciding_settings(head.settings)))


def entry_line(now: Nanos, event: RouterEvent, keys: Sequence[Keys], commands: Sequence[Command] | None) -> bytes:
    """One event, what the hasher answered to it, and what was said; None: the machine broke."""
    entry = RecordingEntry(
        now=now,
        name=written_name(type(event)),
        event=Raw(_ENCODER.encode(without_content(event))),
        prompt_tokens=len(event.tokens) // TOKEN_BYTES if isinstance(event, Arrived) else 0,
        keys=tuple(map(_packed, keys)),
        commands=None if commands is None else list(map(record_command, commands)),
    )
    return _line(entry)


def end_line(why: str) -> bytes:
    return _line(RecordingEnd(end=why))


def deciding_settings(settings: RouterSettings) -> RouterSettings:
    """The settings on which depends what a machine does, and no others: what is not named here is not written, be it secret or not."""
    kept = {name: getattr(settings, name) for name in _DECIDING_FIELDS}
    tenants = {name: TenantSettings(weight=tenant.weight) for name, tenant in settings.tenants.items()}
    chosen = {name: table for name, table in settings.policies.items() if name == settings.policy}
    return RouterSettings(**kept, tenants=tenants, policies=chosen)


_DECIDING_FIELDS = (
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


def without_content(event: RouterEvent) -> RouterEvent | RecordedSteps:
    """The event less what it only carries along (rule 4)."""
    match event:
        case WorkerStepped():
            return RecordedSteps(worker_id=event.worker_id, progress=list(map(_step, event.progress)))
        case Arrived():
            return structs.replace(event, tokens=b"", salt=b"", sampling=_without_structured_output(event.sampling))
        case AttemptRejected():
            return structs.replace(event, rejected=structs.replace(event.rejected, message=""))
        case _:
            return event


def _step(progress: Progress) -> RecordedProgress:
    handoff = progress.handoff
    if handoff is not None:
        handoff = structs.replace(handoff, params=b"")
    return RecordedProgress(progress.request_id, len(progress.token_ids), progress.finish, progress.kv, handoff)


def _without_structured_output(sampling: Sampling) -> Sampling:
    form = None if sampling.form is None else AnyObject()
    return structs.replace(sampling, form=form, stop_token_ids=())


def record_command(command: Command) -> RecordedCommand:
    """The command less what it only carries along."""
    match command:
        case Emit():
            return RecordedEmit(command.request_id, len(command.progress.token_ids), command.cached_tokens)
        case Dispatch():
            start = command.start
            handoff: Handoff | None = start.handoff
            return RecordedDispatch(
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
        case CancelAttempt():
            return RecordedCancel(command.worker_id, command.request_id)
        case StartedOver():
            return RecordedRestart(command.request_id)
        case Complete():
            return RecordedCompletion(command.request_id, command.finish, command.cached_tokens)
        case Reject():
            return RecordedRejection(command.request_id, command.reason, command.field, command.retry_after_ms)
        case CacheDriftChanged():
            return RecordedCacheDrift(
                command.worker_id, command.knowledge, command.drifting, command.precision, command.recall
            )
        case _:
            assert_never(command)


def _line(value: object) -> bytes:
    return _encode(value) + b"\n"


def _packed(keys: Keys) -> str:
    return b64encode(struct.pack(f"<{len(keys)}Q", *keys)).decode()


_ENCODER = msgspec.json.Encoder(enc_hook=list)  # keys views and sets, as some collections are
_encode: Callable[[object], bytes] = _ENCODER.encode
