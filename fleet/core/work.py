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
    kv_blocks: int  # capacity of the engine's KV cache in blocks
    max_running: int  # most requests in one batch
    # hex digest of the KV namespace (kvstore.namespace); blocks of workers with equal digests hold the same values
    fingerprint: str
    kv_paths: tuple[KvPath, ...] = ()
    store_id: StoreId | None = None
    engine: str  # name and version of the engine
    kv: Fingerprint | None = None  # meaning and memory layout of the worker's blocks; None: unknown
    prefill_speed: float = 1.0  # speed of the worker's hardware, relative to the other workers of the model
    decode_speed: float = 1.0
    labels: tuple[str, ...] = ()  # labels that a request can demand
    # Adapters that are loaded, or that the worker loads when a request needs them.
    adapters: tuple[LoraAdapter, ...] = ()
    adapter_slots: int = 0  # number of adapters that can be loaded at a time; 0: all adapters
    tokenizer_digests: TokenizerDigests | None = None
    keeps_forms: bool = False  # True if the engine can enforce structured output
    sampling_fields: tuple[str, ...] = ()  # the fields of `fleet.core.requests.ENGINE_FIELDS` that the engine supports
    # `fleet.core.requests.STATE_FIELDS` whose state the engine rebuilds when it continues an answer (`Start.generated_tokens`)
    continued_fields: tuple[str, ...] = ()
    start_seconds: float = 0.0  # seconds from the start of the worker's process to this description; 0: unknown
    generation: str = ""  # deployment generation; only workers of one generation hand prompts over to each other
    parsers: AnswerParsers | None = None  # parsers of the worker's answers; None: it names no parsers


class Handoff(Struct, frozen=True, kw_only=True):
    """Handoff: what a decode worker needs to fetch the blocks that a prefill worker computed."""

    kv_path: KvPath
    prefill_worker: WorkerId
    fingerprint: str
    num_tokens: int  # number of prompt tokens whose KV can be fetched
    params: bytes = b"{}"  # the engine's own data as JSON, which the router does not read
    kv: Fingerprint | None = None  # KV layout of the prefill worker's blocks


class ParsingTask(Struct, frozen=True, kw_only=True):
    """Demand to a worker to parse the answer (`fleet.core.requests.AnswerParsing`), with what its parser needs."""

    tools: str = ""  # tools that the model may call, as in `ChatPrompt.tools`
    tool_choice: ToolChoice = ToolChoice.AUTO
    function: str = ""  # name of the tool for ToolChoice.NAMED
    parallel_calls: bool = True
    template_args: str = ""  # variables of the chat template, as in `ChatPrompt.template_args`
    stop: tuple[str, ...] = ()  # the answer ends before any of these strings
    earlier_calls: int = 0  # number of tool calls in the conversation so far, because some models number their calls


class Start(Struct, frozen=True, kw_only=True):
    """Start one attempt."""

    request_id: RequestId
    phase: Phase
    tokens: TokenBytes
    sampling: Sampling
    salt: bytes = b""  # salt of the block hashes, 0 or 32 bytes (`kvstore.block.tenant_salt`)
    handoff: Handoff | None = None  # the prefill worker's handoff; only for Phase.DECODE
    kv_path: KvPath | None = None  # only for Phase.PREFILL: the path by which the decode worker will fetch the blocks
    priority: int = 0
    timeout_ms: int = 0  # time left to the deadline when the message was sent; 0: no deadline
    session: str = ""  # session of the request; its blocks are kept while it waits
    adapter: str = ""  # LoRA adapter to run with; the worker loads it if necessary, and `salt` keeps its blocks apart
    parsing: ParsingTask | None = None  # None: the answer is not parsed
    # Number of tokens at the end of `tokens` that another worker has generated; they are the beginning of the answer. A parser begins
    # with them. The engine counts them as its own, for penalties, seeds, structured output and forbidden sequences. The limits in
    # `sampling` are for the remaining tokens of the answer.
    generated_tokens: int = 0


class ParsedDelta(Struct, frozen=True, kw_only=True):
    """Parsed form of the new tokens of an answer, for an attempt with `Start.parsing`."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    stopped: bool = False  # True if a stop string ended the text; the router then cancels the attempt
    # True in the first `ParsedDelta` of an attempt, which begins at the start of the answer: it repeats the parsed form of the
    # tokens in `Start.generated_tokens`.
    from_start: bool = False


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of one request in a decode step. The last progress of a request has `finish`."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish: Finish | None = None
    # Sent with the first tokens, and again with the finish unless the attempt was cancelled. The later report is the valid one.
    kv: KvReport | None = None
    handoff: Handoff | None = None  # sent with the finish of a prefill attempt
    # Sent with the first tokens: log probabilities of each prompt token except the first.
    prompt_logprobs: tuple[Logprobs, ...] = ()
    parsed: ParsedDelta | None = None  # None: the tokens cannot be parsed yet, or the attempt has no `parsing`


class Rejected(Struct, frozen=True, kw_only=True):
    """An attempt that never started, or that the engine gave up."""

    request_id: RequestId
    reason: Reason
    message: str
    field: str = ""


class LoadReport(Struct, frozen=True, kw_only=True):
    running: int
    waiting: int
    kv_blocks_used: int  # number of blocks that running requests use
    adapters: tuple[str, ...] = ()  # names of the loaded adapters


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
