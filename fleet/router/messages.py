"""Events that the router's machine hears, and commands that it gives.

A request may take several pieces of work: a prefill and a decode, or another attempt after a failure. Each piece has an
id of its own, made by the machine and used once. `Start`, `Progress`, `Rejected`, `CancelAttempt` and `Undelivered` carry
the id of the work; `Arrived`, `RequestCancelled`, `Emit`, `StartedOver`, `Complete` and `Reject` that of the request.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import final

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import Finish, KvPhase, Sampling, TokenBytes
from fleet.core.roles import KvPath, Placement
from fleet.core.work import KvEvent, LoadReport, LoraAdapter, Progress, Rejected, Start, WorkerDescription
from fleet.router.kv_index.cache_accuracy import Knowledge
from fleet.router.kv_index.peer_prompts import PlacedPrompt
from fleet.router.sessions import SessionBinding
from fleet.router.settings.router import Thresholds
from kvstore.messages import POOL_TIER


class WorkerJoined(Struct, frozen=True, kw_only=True):
    description: WorkerDescription
    address: str
    knowledge: Knowledge = Knowledge.EXACT  # of what it has cached
    believed_for: Nanos | None = None  # how long what was sent there is believed to be cached; None: that is told


class WorkerLeft(Struct, frozen=True, kw_only=True):
    """The stream broke or the lease ended; whatever ran there is lost."""

    worker_id: WorkerId


class WorkerDraining(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId


class KvPathsChanged(Struct, frozen=True, kw_only=True):
    """A worker has joined its store, without which it had started, or says otherwise anew by which ways its blocks can go."""

    worker_id: WorkerId
    kv_paths: tuple[KvPath, ...]
    store_id: StoreId | None


class WorkerResumed(Struct, frozen=True, kw_only=True):
    """A worker that was draining takes requests again."""

    worker_id: WorkerId


class LoadReported(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    load: LoadReport


class KvChanged(Struct, frozen=True, kw_only=True):
    """Changes of one worker's prefix cache, gap-free since it joined."""

    worker_id: WorkerId
    events: tuple[KvEvent, ...]


class CacheAssumed(Struct, frozen=True, kw_only=True):
    """What a worker that tells nothing of its prefix cache is believed to hold now, and no longer, by key."""

    worker_id: WorkerId
    stored: Sequence[int] = ()
    removed: Collection[int] = ()


class CacheAged(Struct, frozen=True, kw_only=True):
    """Time has passed: what was sent to a worker long ago is believed to be cached no longer."""

    worker_id: WorkerId


class CacheReported(Struct, frozen=True, kw_only=True):
    """How much of a prompt a server that tells nothing else had cached, in its own tokens; before the work's end."""

    worker_id: WorkerId
    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int


class StoreChanged(Struct, frozen=True, kw_only=True):
    """Changes of what a tier of a store node holds in one namespace; `reset` voids what was known of all its tiers."""

    store_id: StoreId
    fingerprint: str
    tier: str = POOL_TIER
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    reset: bool = False


@final
class WorkerStepped(Struct, frozen=True, kw_only=True):
    """One decode step of one worker."""

    worker_id: WorkerId
    progress: tuple[Progress, ...]


class ReservationTotals(Struct, frozen=True):
    """What is booked on one worker."""

    prefill_tokens: int
    blocks: float
    requests: int


class PeerReserved(Struct, frozen=True, kw_only=True):
    """All that another router of the cluster has booked now, by worker; it voids what it told before."""

    replica: str
    booked: Mapping[WorkerId, ReservationTotals]


class PeerPlaced(Struct, frozen=True, kw_only=True):
    """Another router has sent prompts to workers, or is done with some (`fleet.router.kv_index.peer_prompts`)."""

    replica: str
    placed: tuple[PlacedPrompt, ...] = ()
    over: tuple[int, ...] = ()  # numbers


class PeerLeft(Struct, frozen=True, kw_only=True):
    """Another router is gone, and with it its bookings, and what it has placed and was not done with."""

    replica: str


class SessionsBound(Struct, frozen=True, kw_only=True):
    """Another router has bound or forgotten sessions, or has said what its clock says."""

    bindings: tuple[SessionBinding, ...] = ()
    clock: int = 0  # Unix time in nanoseconds; 0: it has not


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
class Arrived(Struct, frozen=True, kw_only=True, rename={"external": "second_hand"}):  # recordings keep the old name
    """A validated, tokenised request."""

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
    labels: tuple[str, ...] = ()  # that this worker must have
    among: tuple[WorkerId, ...] | None = None  # the only workers that may take part; None: all
    adapter: LoraAdapter | None = None  # to run with; `salt` keeps its blocks apart
    expected_tokens: int = 0  # of the answer, as the client believes; 0: it does not say
    external: bool = (
        False  # its progress is told by others than workers, at times of their own: nothing is learned of it
    )
    keys: Mapping[int, tuple[int, ...]] = {}  # of the prompt's full blocks by block size, where the front knows them
    only_end: bool = False  # its listener sees the answer itself, and is told of its end only
    whole: bool = False  # its client gets the answer in one piece, and so has seen nothing of it before its end


class RequestCancelled(Struct, frozen=True, kw_only=True):
    """The client went away, or a stop string was reached."""

    request_id: RequestId


class Undelivered(Struct, frozen=True, kw_only=True):
    """A `Dispatch` that could not be performed."""

    request_id: RequestId
    worker_id: WorkerId


class RouterTicked(Struct, frozen=True, kw_only=True):
    """Time passed: deadlines may have."""


class ThresholdsChanged(Struct, frozen=True, kw_only=True):
    """An operator has set thresholds anew."""

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
    """Tokens for the client, and where its blocks came from as far as workers have told."""

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
    """The answer begins anew on another worker, and the tokens emitted so far are void. Only where `Arrived.whole` is set."""

    request_id: RequestId


class Reject(Struct, frozen=True, kw_only=True):
    """The request is over without (the rest of) an answer; nothing follows."""

    request_id: RequestId
    reason: Reason
    message: str
    field: str = ""
    retry_after_ms: int = 0
    cause: str = ""  # a `fleet.router.placement.rejection.RejectionCause`, where that is why


class CacheDriftChanged(Struct, frozen=True, kw_only=True):
    """What a worker reports to have cached has parted from what is known of it, or agrees with it again."""

    worker_id: WorkerId
    knowledge: Knowledge
    drifting: bool
    precision: float  # of the latest comparisons, see `fleet.router.kv_index.cache_accuracy`
    recall: float


Command = Dispatch | CancelAttempt | Emit | StartedOver | Complete | Reject | CacheDriftChanged


def attempt_id(request_id: RequestId, number: int) -> RequestId:
    """The id of a piece of work."""
    return RequestId(f"{request_id}#{number}")


def request_of(work: RequestId) -> RequestId:
    """The request that a piece of work is for."""
    return RequestId(work.rpartition("#")[0])
