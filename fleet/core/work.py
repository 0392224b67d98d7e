"""Values that a router and a worker exchange; `fleet.wire.worker` translates them to protobuf."""

from msgspec import Struct

from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import AnswerParsers, CallDelta, Finish, KvReport, Logprobs, Sampling, TokenBytes, ToolChoice
from fleet.core.roles import KvPath, Phase, Role
from kvstore.layouts.fingerprint import Fingerprint


class LoraAdapter(Struct, frozen=True):
    """LoRA adapter: extra weights for a base model. Clients ask for it by its name, as for a model."""

    name: ModelName
    revision: str = ""  # digest of the weights; empty: the name alone identifies the adapter

    @property
    def identity(self) -> str:
        """Return the text from which `kvstore.block.adapter_salt` derives the salt."""
        return f"{self.name}@{self.revision}" if self.revision else self.name


class TokenizerDigests(Struct, frozen=True, kw_only=True):
    """Digests for the tokenizer check (`fleet.frontend.text.tokenizer_check`); empty: the worker did not compute them."""

    tokens: str = ""
    template: str = ""
    blocks: str = ""


class WorkerDescription(Struct, frozen=True, kw_only=True, rename={"tokenizer_digests": "golden"}):
    """Description of a worker. Recordings call its tokenizer digests `golden`.

    It is constant for one incarnation, except `kv_paths` and `store_id`: they change when a worker joins its store
    late.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    model: ModelName
    role: Role
    block_tokens: int
    max_model_len: int
    kv_blocks: int  # capacity of the engine's KV cache
    max_running: int  # requests in one batch
    # hex digest of the KV namespace (kvstore.namespace); blocks of workers with equal digests hold the same values
    fingerprint: str
    kv_paths: tuple[KvPath, ...] = ()
    store_id: StoreId | None = None
    engine: str  # name and version
    kv: Fingerprint | None = None  # how its blocks are built and laid out in memory; None: unknown
    prefill_speed: float = 1.0  # speed of its hardware relative to the other workers of the model
    decode_speed: float = 1.0
    labels: tuple[str, ...] = ()  # labels that a request can demand
    adapters: tuple[LoraAdapter, ...] = ()  # adapters that are loaded, or that it loads when a request needs them
    adapter_slots: int = 0  # adapters that can be loaded at a time; 0: all of them
    tokenizer_digests: TokenizerDigests | None = None
    keeps_forms: bool = False  # True if the engine can enforce structured output
    sampling_fields: tuple[str, ...] = ()  # the fields of `fleet.core.requests.ENGINE_FIELDS` that the engine supports
    # `fleet.core.requests.STATE_FIELDS` whose state the engine rebuilds when it continues an answer (`Start.generated_tokens`)
    continued_fields: tuple[str, ...] = ()
    start_seconds: float = 0.0  # from the start of its process to this description; 0: unknown
    generation: str = ""  # deployment generation; only workers of one generation hand prompts over to each other
    parsers: AnswerParsers | None = None  # parsers of its answers; None: none


class Handoff(Struct, frozen=True, kw_only=True):
    """Handoff: what a decode worker needs to fetch the blocks that a prefill worker computed."""

    kv_path: KvPath
    prefill_worker: WorkerId
    fingerprint: str
    num_tokens: int  # tokens whose KV is covered
    params: bytes = b"{}"  # JSON of the engine, opaque to the router
    kv: Fingerprint | None = None  # KV layout of the prefill worker's blocks


class ParsingTask(Struct, frozen=True, kw_only=True):
    """Demand to a worker to parse the answer (`fleet.core.requests.AnswerParsing`), with what its parser needs."""

    tools: str = ""  # as in `ChatPrompt.tools`
    tool_choice: ToolChoice = ToolChoice.AUTO
    function: str = ""  # the tool of ToolChoice.NAMED
    parallel_calls: bool = True
    template_args: str = ""  # as in `ChatPrompt.template_args`
    stop: tuple[str, ...] = ()  # the answer ends before any of these strings
    earlier_calls: int = 0  # tool calls of the conversation so far, because the ids of some models number them


class Start(Struct, frozen=True, kw_only=True):
    """Start one attempt."""

    request_id: RequestId
    phase: Phase
    tokens: TokenBytes
    sampling: Sampling
    salt: bytes = b""  # 0 or 32 bytes, see kvstore.block.tenant_salt
    handoff: Handoff | None = None  # only for Phase.DECODE
    kv_path: KvPath | None = None  # only for Phase.PREFILL: the path by which the decode worker will fetch the blocks
    priority: int = 0
    timeout_ms: int = 0  # time left when it was sent; 0: no deadline
    session: str = ""  # session of the request; its blocks are kept while it waits
    adapter: str = ""  # LoRA adapter to run with; the worker loads it if necessary, and `salt` keeps its blocks apart
    parsing: ParsingTask | None = None  # None: the answer is not parsed
    # The last tokens of `tokens` that are the beginning of the answer, which another worker has generated. A parser begins with them.
    # The engine counts them as its own, for penalties, seeds, structured output and forbidden sequences. The limits in `sampling` are
    # those of the rest of the answer.
    generated_tokens: int = 0


class ParsedDelta(Struct, frozen=True, kw_only=True):
    """Meaning of the new tokens of an answer, for an attempt with `Start.parsing`."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    stopped: bool = False  # a stop string ended the text; the router cancels the attempt
    # True in the first one of an attempt: it begins with the answer, so it repeats what `Start.generated_tokens` mean.
    from_start: bool = False


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of one request in a decode step. The last one has `finish`."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish: Finish | None = None
    # sent with the first tokens, and again (then it counts) with the finish, unless cancelled
    kv: KvReport | None = None
    handoff: Handoff | None = None  # sent with the finish of a prefill attempt
    prompt_logprobs: tuple[Logprobs, ...] = ()  # sent with the first tokens: of each token of the prompt but the first
    parsed: ParsedDelta | None = None  # None: the tokens have no meaning yet, or the attempt has no `parsing`


class Rejected(Struct, frozen=True, kw_only=True):
    """An attempt that never started, or that the engine gave up."""

    request_id: RequestId
    reason: Reason
    message: str
    field: str = ""


class LoadReport(Struct, frozen=True, kw_only=True):
    running: int
    waiting: int
    kv_blocks_used: int  # blocks that running requests hold
    adapters: tuple[str, ...] = ()  # loaded adapters


class KvStored(Struct, frozen=True, tag=True):
    """KV event: the engine's prefix cache now holds these blocks."""

    hashes: tuple[bytes, ...]  # block hashes of 16 bytes each


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
    """Progress that one decode step made for the requests of one router."""

    progress: tuple[Progress, ...]


class KvEvents(Struct, frozen=True, kw_only=True):
    """KV events of a worker. `sequence` starts at 0 in each stream and grows by one per message."""

    sequence: int
    events: tuple[KvEvent, ...]


class Draining(Struct, frozen=True):
    """The worker takes no new attempts; running ones continue."""


class Goodbye(Struct, frozen=True, kw_only=True):
    """Last message of a stream that the worker ends early."""

    reason: str


RouterMessage = RouterHello | Start | Cancel
WorkerMessage = WorkerDescription | Step | KvEvents | LoadReport | Rejected | Draining | Goodbye
