"""Format of recordings: converts the events and commands of a router machine to lines of JSON, which can be replayed.

Rules for readers:

1. Line 1 is a `RecordingHead`: the format version, the seed and the settings of the machine. Each further line is a
   `RecordingEntry`. The last line may be a `RecordingEnd` with the reason; a recording without one was cut off.
2. An entry holds the instant, the name and fields of the event (`fleet.router.messages`), and the machine's commands.
   `commands` is missing if the machine failed. Commands are lists that start with their name; see `RecordedCommand`.
3. An entry also holds what a replay cannot compute, because the tokens are left out (rule 4): `prompt_tokens`, and in `keys` the results of
   the calls to the hasher of the machine, in order. Each result consists of the keys of a prompt's full blocks, 8 bytes each,
   little-endian, in base64. The event has the keys of a prompt with images (`Arrived.keys`); these keys include the digests of the images.
4. Payloads are left out: token ids of prompts and answers, texts of structured outputs and messages, salts, log probabilities, and
   parameters of handoffs. Of the settings, only those that affect decisions are recorded, without keys, secrets or addresses. Names of
   requests, tenants, sessions, models and workers are recorded, and also the addresses of workers. Block keys are recorded too. They are
   parts of block hashes, and the block hashes of a tenant with a salt include this salt. If the tenant has no salt, or if a reader of
   the recording knows the salt, the reader can check by the block keys whether a guess of a whole prompt is right.

A recording suffices for `fleet sim replay`, because the decisions of the machine depend only on what it contains.
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
from fleet.router.kv_index.prefix_index import Knowledge
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
    """The first line of a recording."""

    recording: int  # version of the recording format
    fleet: str  # version of Fleet
    began: Nanos  # start of the recording, by the clock that all instants in the recording use
    began_unix: int  # start of the recording in seconds of Unix time
    seed: int
    settings: RouterSettings


class RecordingEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The line of one event, with the commands that the machine returned for it."""

    now: Nanos
    name: str
    event: Raw
    prompt_tokens: int = 0  # number of tokens of the prompt; only for the event `Arrived`
    keys: tuple[str, ...] = ()
    commands: "list[RecordedCommand] | None" = None


class RecordingEnd(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last line of a recording, with the reason why it ended."""

    end: str


class RecordedSteps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The short form in which `WorkerStepped`, the most frequent event, is recorded."""

    worker_id: WorkerId
    progress: "list[RecordedProgress]"


class RecordedProgress(Struct, frozen=True, array_like=True):
    """The short form in which `Progress` is recorded."""

    work_id: RequestId
    tokens: int
    finish: Finish | None
    kv: KvReport | None
    handoff: Handoff | None


class RecordedDispatch(Struct, frozen=True, array_like=True, tag="send"):
    """The short form in which the command `Dispatch` is recorded."""

    worker_id: WorkerId
    work_id: RequestId
    phase: Phase
    prompt_tokens: int
    max_tokens: int
    kv_path: KvPath | None
    handed_over: int | None  # number of tokens whose blocks the handoff offers; None: there is no handoff
    prefill_worker: WorkerId | None
    priority: int
    timeout_ms: int


class RecordedCancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """The short form in which the command `CancelAttempt` is recorded."""

    worker_id: WorkerId
    work_id: RequestId


class RecordedEmit(Struct, frozen=True, array_like=True, tag="emit"):
    """The short form in which the command `Emit` is recorded."""

    request_id: RequestId
    tokens: int
    cached_tokens: int


class RecordedRestart(Struct, frozen=True, array_like=True, tag="start over"):
    """The short form in which the command `StartedOver` is recorded."""

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
"""A command as it is recorded, without its payload."""


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
"""The name in recordings of each event class whose recorded name differs from the name of the class."""


def written_name(kind: type) -> str:
    """Return the name that an event class has in recordings."""
    return WRITTEN_NAMES.get(kind, kind.__name__)


def head_line(head: RecordingHead) -> bytes:
    """Return the first line of a recording. It contains only the settings that affect decisions."""
    return _line(structs.replace(head, settings=deciding_settings(head.settings)))


def entry_line(now: Nanos, event: RouterEvent, keys: Sequence[Keys], commands: Sequence[Command] | None) -> bytes:
    """Return the line of one event, with the hasher's results and the commands. `commands` is None if the machine failed."""
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
    """Return the settings that affect decisions, with defaults for all others. This module lists them, so that no secret is recorded."""
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
    """Return the event without its payload (rule 4)."""
    match event:
        case WorkerStepped():
            return RecordedSteps(worker_id=event.worker_id, progress=list(map(_step, event.progress)))
        case Arrived():
            sampling = _without_texts(event.sampling)
            # A replay needs only the numbers of tokens and images, so zeros and empty contents are recorded in their places.
            answered, images = (0,) * len(event.answered), (b"",) * len(event.images)
            return structs.replace(
                event, tokens=b"", salt=b"", sampling=sampling, parsing=None, answered=answered, images=images
            )
        case AttemptRejected():
            return structs.replace(event, rejected=structs.replace(event.rejected, message=""))
        case _:
            return event


def _step(progress: Progress) -> RecordedProgress:
    handoff = progress.handoff
    if handoff is not None:
        handoff = structs.replace(handoff, params=b"")
    return RecordedProgress(progress.request_id, len(progress.token_ids), progress.finish, progress.kv, handoff)


def _without_texts(sampling: Sampling) -> Sampling:
    """Return the sampling parameters without the client's texts and token ids.

    A structured output and forbidden sequences are replaced by empty ones, because placement depends on whether a request has them.
    """
    form = None if sampling.form is None else AnyObject()
    bad_tokens = ((),) if sampling.bad_tokens else ()
    return structs.replace(
        sampling, form=form, stop_token_ids=(), logit_bias=(), allowed_token_ids=(), bad_tokens=bad_tokens
    )


def record_command(command: Command) -> RecordedCommand:
    """Return the form of a command for recordings, without its payload."""
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


_ENCODER = msgspec.json.Encoder(enc_hook=list)  # `list` converts views and sets, which msgspec cannot encode
_encode: Callable[[object], bytes] = _ENCODER.encode
