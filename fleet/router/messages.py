"""Messages of the router's machine: the events that it takes and the commands that it returns.

A request may need several attempts: a prefill and a decode, or another try after a failure. The machine gives each attempt an id that is
used once. `Start`, `Progress`, `Rejected`, `CacheReported`, `CancelAttempt` and `Undelivered` carry the id of the attempt; `Arrived`,
`RequestCancelled`, `Emit`, `StartedOver`, `Complete` and `Reject` carry the id of the request.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import final

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import Finish, KvPhase, Pooling, Sampling, TokenBytes
from fleet.core.roles import KvPath, Placement
from fleet.core.work import KvEvent, LoadReport, LoraAdapter, ParsingTask, Progress, Rejected, Start, WorkerDescription
from fleet.router.kv_index.peer_prompts import PlacedPrompt
from fleet.router.kv_index.prefix_index import Knowledge
from fleet.router.sessions import SessionBinding
from fleet.router.settings.router import Thresholds
from kvstore.messages import POOL_TIER


class WorkerJoined(Struct, frozen=True, kw_only=True):
    description: WorkerDescription
    address: str
    knowledge: Knowledge = Knowledge.EXACT  # how the router knows what the worker has cached
    # How long the router assumes that a sent prompt stays cached; None: the worker reports its cache.
    believed_for: Nanos | None = None


class WorkerLeft(Struct, frozen=True, kw_only=True):
    """Event: the stream to a worker has ended, or an external server is gone. Every attempt on the worker is lost."""

    worker_id: WorkerId


class WorkerDraining(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId


class KvPathsChanged(Struct, frozen=True, kw_only=True):
    """Event: a worker has joined its store after its own start, or its blocks can take other KV paths than before."""

    worker_id: WorkerId
    kv_paths: tuple[KvPath, ...]
    store_id: StoreId | None


class WorkerResumed(Struct, frozen=True, kw_only=True):
    """Event: a worker that was draining does not drain any more, and takes requests again."""

    worker_id: WorkerId


class LoadReported(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    load: LoadReport


class KvChanged(Struct, frozen=True, kw_only=True):
    """Event: the prefix cache of one worker has changed. The events since the worker joined contain all changes; none is missing."""

    worker_id: WorkerId
    events: tuple[KvEvent, ...]


class CacheAssumed(Struct, frozen=True, kw_only=True):
    """Event: the blocks that a worker without KV events is assumed to hold have changed. `stored` and `removed` are block keys."""

    worker_id: WorkerId
    stored: Sequence[int] = ()
    removed: Collection[int] = ()


class CacheAged(Struct, frozen=True, kw_only=True):
    """Event: time has passed, so prompts that were sent to this worker long ago are no longer assumed to be cached."""

    worker_id: WorkerId


class CacheReported(Struct, frozen=True, kw_only=True):
    """Event: a server without KV events reports how many tokens of a prompt were cached. The event comes before the end of the attempt."""

    worker_id: WorkerId
    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int


class StoreChanged(Struct, frozen=True, kw_only=True):
    """Event: one tier of a store node has stored and removed blocks of one namespace, which `fingerprint` names.

    If `reset` is true, the router first forgets the blocks of this namespace in all tiers of the node.
    """

    store_id: StoreId
    fingerprint: str
    tier: str = POOL_TIER
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    reset: bool = False


@final
class WorkerStepped(Struct, frozen=True, kw_only=True):
    """Event: the progress of all attempts that one engine step on one worker has advanced."""

    worker_id: WorkerId
    progress: tuple[Progress, ...]


class ReservationTotals(Struct, frozen=True):
    """The sums of all reservations that one router has on one worker."""

    prefill_tokens: int
    blocks: float
    requests: int


class PeerReserved(Struct, frozen=True, kw_only=True):
    """Event: all reservations of a peer router, by worker. They replace the ones that the peer reported before."""

    replica: str
    booked: Mapping[WorkerId, ReservationTotals]


class PeerPlaced(Struct, frozen=True, kw_only=True):
    """Event: a peer router announces prompts that it has sent to workers, or that the reservations of announced prompts have ended.

    See `fleet.router.kv_index.peer_prompts`.
    """

    replica: str
    placed: tuple[PlacedPrompt, ...] = ()
    over: tuple[int, ...] = ()  # numbers of the announced prompts whose reservations have ended


class PeerLeft(Struct, frozen=True, kw_only=True):
    """Event: a peer router has left. Its reservations and its unfinished prompts are forgotten."""

    replica: str


class SessionsBound(Struct, frozen=True, kw_only=True):
    """Event: a peer router has bound or forgotten sessions, or this router or a peer has stated its Unix time.

    The latest stated time advances the common clock of session bindings (`fleet.router.sessions`).
    """

    bindings: tuple[SessionBinding, ...] = ()
    clock: int = 0  # Unix time of a router in nanoseconds; 0: none was stated


PeerEvent = PeerReserved | PeerPlaced | PeerLeft | SessionsBound


class AttemptRejected(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    rejected: Rejected


WorkerEvent = (
    WorkerJoined
    | WorkerLeft
    | WorkerDraining
    | KvPathsChanged
    | WorkerResumed
    | LoadReported
    | KvChanged
    | CacheAssumed
    | CacheAged
    | CacheReported
    | StoreChanged
    | WorkerStepped
    | AttemptRejected
)


@final
# `rename` is needed because recordings keep the old name of the field `external`
class Arrived(Struct, frozen=True, kw_only=True, rename={"external": "second_hand"}):
    """Event: a request has arrived. It is validated and tokenized."""

    request_id: RequestId
    model: ModelName
    tokens: TokenBytes
    salt: bytes = b""
    tenant: str = ""
    sampling: Sampling
    priority: int = 0
    deadline: Nanos | None = None
    session: str = ""
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    pin: WorkerId | None = None  # the only worker that the client lets answer; None: any worker may answer
    labels: tuple[str, ...] = ()  # labels that the worker that answers must have
    among: tuple[WorkerId, ...] | None = None  # the only workers that may answer; None: all may
    # The LoRA adapter to use; `salt` then separates its blocks from those of the base model. None: the base model is used.
    adapter: LoraAdapter | None = None
    expected_tokens: int = 0  # length of the answer that the client expects; 0: unknown
    # Another program sends the request to the worker and reports the progress, so the router does not measure the request's timing.
    external: bool = False
    keys: Mapping[int, tuple[int, ...]] = {}  # block keys of the prompt by block size, if the frontend knows them
    # True if the frontend gets only the end of the answer from the router, and the tokens in another way.
    only_end: bool = False
    whole: bool = False  # the client gets the answer in one piece, so it has seen nothing before the end
    needs: tuple[str, ...] = ()  # the fields of `fleet.core.requests.ENGINE_FIELDS` that the sampling parameters use
    most_wait: Nanos | None = (
        # A request with a longer predicted wait is rejected, because a hosted endpoint then takes it. None: no hosted endpoint takes it now.
        None
    )
    parsing: ParsingTask | None = None  # what workers need to parse the answer; None: they do not parse it
    answered: tuple[int, ...] = ()  # tokens of the answer that another router has sent already; fewer than `max_tokens`
    fingerprint: str = ""  # fingerprint of the worker that generated the first token in `answered`; empty: unknown
    # The vector that the client wants instead of tokens; `sampling.max_tokens` is then 0. None: the client wants tokens.
    pooling: Pooling | None = None
    images: tuple[bytes, ...] = ()  # content of the image files of the prompt (`Start.images`)
    # Key under which workers keep the tokens of the answer (`LiveRequest.answer_key`); 0: they keep none.
    answer_key: int = 0


class RequestCancelled(Struct, frozen=True, kw_only=True):
    """Event: the client has gone, or the frontend needs no more of the answer, because a stop string has ended it."""

    request_id: RequestId


class Undelivered(Struct, frozen=True, kw_only=True):
    """Event: a `Dispatch` command could not be sent to its worker."""

    request_id: RequestId
    worker_id: WorkerId


class RouterTicked(Struct, frozen=True, kw_only=True):
    """Event: time has passed, so the deadlines of requests may have passed."""


class ThresholdsChanged(Struct, frozen=True, kw_only=True):
    """Event: the thresholds were changed, at this router or at a peer."""

    thresholds: Thresholds


RouterEvent = WorkerEvent | PeerEvent | Arrived | RequestCancelled | Undelivered | RouterTicked | ThresholdsChanged


@final
class Dispatch(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    start: Start


class CancelAttempt(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    request_id: RequestId


@final
class Emit(Struct, frozen=True, kw_only=True):
    """Command: send tokens to the client, with what workers have reported about the origin of the prompt's blocks."""

    request_id: RequestId
    progress: Progress
    kv: tuple[KvPhase, ...] = ()
    cached_tokens: int = 0


@final
class Complete(Struct, frozen=True, kw_only=True):
    """Command: tell the client that its answer is complete. No other command for the request follows."""

    request_id: RequestId
    finish: Finish
    kv: tuple[KvPhase, ...]
    cached_tokens: int


class StartedOver(Struct, frozen=True, kw_only=True):
    """Command: tell the client that all tokens so far are void, because the answer starts over. Only requests with `Arrived.whole` get this."""

    request_id: RequestId


class Reject(Struct, frozen=True, kw_only=True):
    """Command: tell the client that its request has ended before the answer was complete. No other command for the request follows."""

    request_id: RequestId
    reason: Reason
    message: str
    field: str = ""
    retry_after_ms: int = 0
    # A `RejectionCause`, if no worker can serve the request or continue its answer; otherwise empty.
    cause: str = ""


class CacheDriftChanged(Struct, frozen=True, kw_only=True):
    """Command: report that a worker's cache has begun to drift, or no longer drifts (`fleet.router.kv_index.prefix_index`, rule 12)."""

    worker_id: WorkerId
    knowledge: Knowledge
    drifting: bool
    precision: float  # precision over the worker's latest comparisons (rules 6 and 7 there)
    recall: float


Command = Dispatch | CancelAttempt | Emit | StartedOver | Complete | Reject | CacheDriftChanged
