"""What passes between a router and a worker, as values; `fleet.wire` has the same as protobuf."""

from msgspec import Struct

from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import Finish, KvReport, Logprobs, Sampling, TokenBytes
from fleet.core.roles import KvPath, Phase, Role
from kvstore.layouts.fingerprint import Fingerprint


class LoraAdapter(Struct, frozen=True):
    """Weights that are added to those of a model (LoRA); clients ask for it by its name, as for a model."""

    name: ModelName
    revision: str = ""  # digest of its weights; empty: adapters of this name are one and the same

    @property
    def identity(self) -> str:
        """What `kvstore.block.adapter_salt` takes."""
        return f"{self.name}@{self.revision}" if self.revision else self.name


class TokenizerDigests(Struct, frozen=True, kw_only=True):
    """What a worker makes of the golden prompts, as digests (`fleet.frontend.text.tokenizer_check`); empty: it does not say."""

    tokens: str = ""
    template: str = ""
    blocks: str = ""


class WorkerDescription(Struct, frozen=True, kw_only=True):
    """The description of a worker; for one incarnation fixed but for `kv_paths` and `store_id`, which follow when it joins its store late."""

    worker_id: WorkerId
    incarnation: Incarnation
    model: ModelName
    role: Role
    block_tokens: int
    max_model_len: int
    kv_blocks: int  # capacity of the engine's KV cache
    max_running: int  # requests in one batch
    fingerprint: str  # hex digest of the KV namespace, see kvstore.namespace: equal where blocks hold the same values
    kv_paths: tuple[KvPath, ...] = ()
    store_id: StoreId | None = None
    engine: str  # name and version
    kv: Fingerprint | None = None  # what its blocks are and how they lie in its memory; None: it does not say
    prefill_speed: float = 1.0  # of its hardware, in proportion to the others of its model
    decode_speed: float = 1.0
    labels: tuple[str, ...] = ()  # that a request may ask for
    adapters: tuple[LoraAdapter, ...] = ()  # that it has, or can load when work for them comes
    adapter_slots: int = 0  # adapters that are loaded at a time; 0: it has all of them at once
    golden: TokenizerDigests | None = None
    keeps_forms: bool = (
        False  # whether it can see to it that an answer is of a form (`fleet.core.requests.StructuredOutput`)
    )
    generation: str = ""  # of what is deployed: only workers of the same one hand prompts over to each other


class Handoff(Struct, frozen=True, kw_only=True):
    """What a decode worker needs to fetch the blocks that a prefill worker computed."""

    kv_path: KvPath
    prefill_worker: WorkerId
    fingerprint: str
    num_tokens: int  # whose KV it covers
    params: bytes = b"{}"  # JSON, the engine's own; opaque to the router
    kv: Fingerprint | None = None  # of the prefill worker's blocks


class Start(Struct, frozen=True, kw_only=True):
    """Begin a piece of work."""

    request_id: RequestId
    phase: Phase
    tokens: TokenBytes
    sampling: Sampling
    salt: bytes = b""  # 0 or 32 bytes, see kvstore.block.tenant_salt
    handoff: Handoff | None = None  # for Phase.DECODE
    kv_path: KvPath | None = None  # for Phase.PREFILL: the way the decode side will fetch the blocks
    priority: int = 0
    timeout_ms: int = 0  # left when sent; 0: no deadline
    session: str = ""  # that the request belongs to; its blocks are kept while it waits
    adapter: str = ""  # name of the one to run with, loaded first where it is not; `salt` keeps its blocks apart


class Progress(Struct, frozen=True, kw_only=True):
    """One request's share of a decode step. With `finish`, the last one."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish: Finish | None = None
    kv: KvReport | None = None  # with the first tokens; again with the finish, unless cancelled, which counts
    handoff: Handoff | None = None  # with the finish of prefill work


class Rejected(Struct, frozen=True, kw_only=True):
    """Work that never started, or that the engine gave up."""

    request_id: RequestId
    reason: Reason
    message: str
    field: str = ""


class LoadReport(Struct, frozen=True, kw_only=True):
    running: int
    waiting: int
    kv_blocks_used: int  # held by running requests
    adapters: tuple[str, ...] = ()  # that are loaded


class KvStored(Struct, frozen=True, tag=True):
    """Blocks that the engine's prefix cache now holds."""

    hashes: tuple[bytes, ...]  # chain hashes, 16 bytes each


class KvRemoved(Struct, frozen=True, tag=True):
    hashes: tuple[bytes, ...]


class KvCleared(Struct, frozen=True, tag=True):
    pass


KvEvent = KvStored | KvRemoved | KvCleared


class RouterHello(Struct, frozen=True, kw_only=True):
    """First message of a router on its stream."""

    router_id: str


class Cancel(Struct, frozen=True, kw_only=True):
    request_id: RequestId


class Step(Struct, frozen=True, kw_only=True):
    """What one decode step brought to the requests of one router."""

    progress: tuple[Progress, ...]


class KvEvents(Struct, frozen=True, kw_only=True):
    """Changes of a worker's prefix cache; `sequence` goes up by one a message from 0 in each stream."""

    sequence: int
    events: tuple[KvEvent, ...]


class Draining(Struct, frozen=True):
    """The worker takes no more work; what runs goes on."""


class Goodbye(Struct, frozen=True, kw_only=True):
    """The last message on a stream that the worker ends before its time."""

    reason: str


RouterMessage = RouterHello | Start | Cancel
WorkerMessage = WorkerDescription | Step | KvEvents | LoadReport | Rejected | Draining | Goodbye
