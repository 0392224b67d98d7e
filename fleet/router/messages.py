"""Messages of the router's machine: the events that it takes and the commands that it returns.

A request may need several attempts: a prefill and a decode, or another try after a failure. The machine gives each attempt an
id that is used once. `Start`, `Progress`, `Rejected`, `CancelAttempt` and `Undelivered` carry the id of the attempt; `Arrived`,
`RequestCancelled`, `Emit`, `StartedOver`, `Complete` and `Reject` carry the id of the request.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import final

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import Finish, KvPhase, Sampling, TokenBytes
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
    believed_for: Nanos | None = (
        None  # how long a sent prompt is assumed to be cached; None: the worker reports its cache
    )


class WorkerLeft(Struct, frozen=True, kw_only=True):
    """The stream broke or the lease ended; every attempt on the worker is lost."""

    worker_id: WorkerId


class WorkerDraining(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId


class KvPathsChanged(Struct, frozen=True, kw_only=True):
    """A worker has joined its store after it started, or its blocks can take other KV paths than before."""

    worker_id: WorkerId
    kv_paths: tuple[KvPath, ...]
    store_id: StoreId | None


class WorkerResumed(Struct, frozen=True, kw_only=True):
    """A draining worker takes requests again."""

    worker_id: WorkerId


class LoadReported(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    load: LoadReport


class KvChanged(Struct, frozen=True, kw_only=True):
    """Changes of one worker's prefix cache, without a gap since the worker joined."""

    worker_id: WorkerId
    events: tuple[KvEvent, ...]


class CacheAssumed(Struct, frozen=True, kw_only=True):
    """Block keys that a worker without KV events is assumed to hold from now on, and keys that it no longer holds."""

    worker_id: WorkerId
    stored: Sequence[int] = ()
    removed: Collection[int] = ()


class CacheAged(Struct, frozen=True, kw_only=True):
    """Time has passed: prompts that were sent to a worker long ago are no longer assumed to be cached."""

    worker_id: WorkerId


class CacheReported(Struct, frozen=True, kw_only=True):
    """The cached share of one prompt, as a server without KV events reports it in its own tokens; it comes before the attempt's end."""

    worker_id: WorkerId
    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int


class StoreChanged(Struct, frozen=True, kw_only=True):
    """Changes in one tier of a store node and one namespace; `reset` voids what was known of all its tiers."""

    store_id: StoreId
    fingerprint: str
    tier: str = POOL_TIER
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    reset: bool = False


@final
class WorkerStepped(Struct, frozen=True, kw_only=True):
    """Progress of one engine step on one worker."""

    worker_id: WorkerId
    progress: tuple[Progress, ...]


class ReservationTotals(Struct, frozen=True):
    """The sums of all reservations on one worker."""

    prefill_tokens: int
    blocks: float
    requests: int


class PeerReserved(Struct, frozen=True, kw_only=True):
    """All reservations of a peer router, by worker; they replace what it reported before."""

    replica: str
    booked: Mapping[WorkerId, ReservationTotals]


class PeerPlaced(Struct, frozen=True, kw_only=True):
    """A peer router has sent prompts to workers, or has finished with some of them (`fleet.router.kv_index.peer_prompts`)."""

    replica: str
    placed: tuple[PlacedPrompt, ...] = ()
    over: tuple[int, ...] = ()  # numbers of the prompts that are finished


class PeerLeft(Struct, frozen=True, kw_only=True):
    """A peer router has left; its reservations and its unfinished prompts go with it."""

    replica: str


class SessionsBound(Struct, frozen=True, kw_only=True):
    """A peer router has bound or forgotten sessions, or has reported its clock."""

    bindings: tuple[SessionBinding, ...] = ()
    clock: int = 0  # Unix time in nanoseconds; 0: not reported


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
# `rename`: recordings keep the old name of the field
class Arrived(Struct, frozen=True, kw_only=True, rename={"external": "second_hand"}):
    """A request that has been validated and tokenized."""

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
    pin: WorkerId | None = None  # the only worker that may answer
    labels: tuple[str, ...] = ()  # labels that the worker must have
    among: tuple[WorkerId, ...] | None = None  # the only workers that may be chosen; None: all
    adapter: LoraAdapter | None = None  # the LoRA adapter to use; `salt` keeps its blocks apart
    expected_tokens: int = 0  # length of the answer that the client expects; 0: unknown
    external: bool = False  # another program sends the request and reports its progress, so the timing teaches nothing
    keys: Mapping[int, tuple[int, ...]] = {}  # block keys of the prompt by block size, if the frontend knows them
    only_end: bool = False  # the listener sees the answer itself and is only told about its end
    whole: bool = False  # the client gets the answer in one piece, so it has seen nothing before the end
    needs: tuple[str, ...] = ()  # `fleet.core.requests.ENGINE_FIELDS` that the sampling parameters use
    most_wait: Nanos | None = (
        # a longer predicted wait rejects the request, because a hosted endpoint then takes it; None: the usual limit
        None
    )
    parsing: ParsingTask | None = None  # what workers need to parse the answer; None: they do not parse it
    answered: tuple[int, ...] = ()  # tokens of the answer that another router has sent already; fewer than `max_tokens`
    fingerprint: str = ""  # fingerprint of the worker that sent the first of these tokens; empty: unknown


class RequestCancelled(Struct, frozen=True, kw_only=True):
    """The client went away, or a stop string was found."""

    request_id: RequestId


class Undelivered(Struct, frozen=True, kw_only=True):
    """A `Dispatch` that could not be sent."""

    request_id: RequestId
    worker_id: WorkerId


class RouterTicked(Struct, frozen=True, kw_only=True):
    """Time has passed, so deadlines may be over."""


class ThresholdsChanged(Struct, frozen=True, kw_only=True):
    """An operator has set new thresholds."""

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
    """Tokens for the client, with what workers have reported about the origin of the prompt's blocks."""

    request_id: RequestId
    progress: Progress
    kv: tuple[KvPhase, ...] = ()
    cached_tokens: int = 0


@final
class Complete(Struct, frozen=True, kw_only=True):
    """The request is over; nothing follows."""

    request_id: RequestId
    finish: Finish
    kv: tuple[KvPhase, ...]
    cached_tokens: int


class StartedOver(Struct, frozen=True, kw_only=True):
    """The answer begins again on another worker, and the tokens emitted so far are void. It needs `Arrived.whole`."""

    request_id: RequestId


class Reject(Struct, frozen=True, kw_only=True):
    """The request is over without its answer, or without the rest of it; nothing follows."""

    request_id: RequestId
    reason: Reason
    message: str
    field: str = ""
    retry_after_ms: int = 0
    cause: str = ""  # a `RejectionCause`, if no worker could be chosen


class CacheDriftChanged(Struct, frozen=True, kw_only=True):
    """A worker's reported cache has begun to differ from what the router knows of it, or agrees with it again."""

    worker_id: WorkerId
    knowledge: Knowledge
    drifting: bool
    precision: float  # precision of the latest comparisons (`fleet.router.kv_index.prefix_index`)
    recall: float


Command = Dispatch | CancelAttempt | Emit | StartedOver | Complete | Reject | CacheDriftChanged
