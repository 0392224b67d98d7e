"""Work: defines the messages between a router and a worker, which `fleet.wire.worker` converts to protobuf."""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import (
    TOKEN_BYTES,
    AnswerParsers,
    CallDelta,
    Finish,
    KvReport,
    Logprobs,
    Pooling,
    PoolingModel,
    Sampling,
    TokenBytes,
    ToolChoice,
    Vector,
)
from fleet.core.roles import KvPath, Phase, Role
from kvstore.layouts.fingerprint import Fingerprint
from kvstore.protocol.versions import UNSTATED, ProtocolRange
from kvstore.tracing.context import TraceContext


class LoraAdapter(Struct, frozen=True):
    """Names a LoRA adapter: extra weights for a base model, which clients request by name, like a model."""

    name: ModelName
    revision: str = ""  # digest of the weights; empty if the name alone identifies the adapter

    @property
    def identity(self) -> str:
        """Return the text that identifies the adapter, from which `kvstore.block.adapter_salt` derives the salt."""
        return f"{self.name}@{self.revision}" if self.revision else self.name


class TokenizerDigests(Struct, frozen=True, kw_only=True):
    """Holds digests for the tokenizer check (`fleet.frontend.text.tokenizer_check`). A digest that was not computed is empty."""

    tokens: str = ""
    template: str = ""
    blocks: str = ""


class WorkerDescription(Struct, frozen=True, kw_only=True, rename={"tokenizer_digests": "golden"}):
    """Describes the properties of a worker that a router has to know.

    The properties of one incarnation do not change, except `kv_paths` and `store_id`, which change if a worker connects
    to its store only after its registration. In recordings, `tokenizer_digests` has the name `golden`.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    model: ModelName
    role: Role
    block_tokens: int
    max_model_len: int
    kv_blocks: int  # capacity of the engine's KV cache in blocks
    max_running: int  # maximum number of requests in one batch of the engine
    # Hex digest of the KV namespace (`kvstore.namespace`); workers with equal digests can use each other's blocks.
    fingerprint: str
    kv_paths: tuple[KvPath, ...] = ()
    store_id: StoreId | None = None
    engine: str  # name of the engine, with its version if known, as in "vllm 0.32.0"; "openai" for an external server
    kv: Fingerprint | None = None  # meaning and memory layout of the worker's blocks; None if unknown
    # Speeds of the worker's hardware, relative to the other workers of the model: 2 means twice as fast.
    prefill_speed: float = 1.0
    decode_speed: float = 1.0
    labels: tuple[str, ...] = ()  # labels that a request can demand
    # LoRA adapters that the worker has loaded, or loads when a request needs them.
    adapters: tuple[LoraAdapter, ...] = ()
    adapter_slots: int = 0  # number of `adapters` that can be loaded at the same time; 0 means all of them
    tokenizer_digests: TokenizerDigests | None = None
    keeps_forms: bool = False  # True if the engine can enforce structured output
    # The `ENGINE_FIELDS` that the engine supports, and `IMAGES` if its model takes images (`fleet.core.requests`).
    sampling_fields: tuple[str, ...] = ()
    # `fleet.core.requests.STATE_FIELDS` that keep their effect if the engine continues an answer of another worker.
    continued_fields: tuple[str, ...] = ()
    # Seconds from the start of the worker's process to the sending of this description; 0 if unknown.
    start_seconds: float = 0.0
    generation: str = ""  # generation of the deployment; only workers of one generation form pairs
    parsers: AnswerParsers | None = None  # parsers for the worker's answers; None if the worker reports none
    pooling: PoolingModel | None = None  # None if the worker's model generates tokens
    keeps_answers: bool = False  # True if the worker keeps the tokens of answers with a `Start.answer_key`
    protocols: ProtocolRange | None = None  # protocol versions that the worker speaks; None for an external server


class Handoff(Struct, frozen=True, kw_only=True):
    """Holds the data with which a decode worker fetches the blocks that a prefill worker has computed."""

    kv_path: KvPath
    prefill_worker: WorkerId
    fingerprint: str
    num_tokens: int  # number of tokens, from the start of the prompt, whose KV the decode worker can fetch
    params: bytes = b"{}"  # data of the engine as JSON, which the router does not read
    kv: Fingerprint | None = None  # meaning and memory layout of the prefill worker's blocks; None if unknown


class ParsingTask(Struct, frozen=True, kw_only=True):
    """Part of an attempt that tells the worker to parse the answer (`fleet.core.requests.AnswerParsing`)."""

    tools: str = ""  # tools that the model may call, as in `ChatPrompt.tools`
    tool_choice: ToolChoice = ToolChoice.AUTO
    function: str = ""  # name of the tool for ToolChoice.NAMED
    parallel_calls: bool = True
    template_args: str = ""  # variables of the chat template, as in `ChatPrompt.template_args`
    stop: tuple[str, ...] = ()  # stop strings: the answer ends before the first of these strings that occurs in it
    # Number of tool calls in the conversation before this answer, because some models number their calls.
    earlier_calls: int = 0


class Start(Struct, frozen=True, kw_only=True):
    """Message to a worker: start one attempt."""

    request_id: RequestId
    phase: Phase
    tokens: TokenBytes
    sampling: Sampling
    salt: bytes = b""  # salt of the block hashes, 0 or 32 bytes (`kvstore.block.tenant_salt`)
    handoff: Handoff | None = None  # only for Phase.DECODE: the handoff of the prefill worker
    kv_path: KvPath | None = None  # only for Phase.PREFILL: the path by which the decode worker will fetch the blocks
    priority: int = 0
    timeout_ms: int = 0  # milliseconds from sending this message to the deadline; 0 if there is none
    # Session of the request. After an attempt that has generated tokens, except in Phase.PREFILL, the worker asks the store to pin the
    # blocks of prompt and answer for a limited time. Empty: the request has no session.
    session: str = ""
    adapter: str = ""  # name of the LoRA adapter to use, which the worker loads if necessary; empty for none
    parsing: ParsingTask | None = None  # None if the worker does not parse the answer
    # Number of tokens at the end of `tokens` that another worker has generated, as the beginning of the answer.
    # The engine counts these tokens as its own; the limits in `sampling` are for the rest of the answer.
    generated_tokens: int = 0
    # Trace context, by which the span of the attempt becomes a child of the router's span; None: the attempt is not traced.
    trace: TraceContext | None = None
    pooling: Pooling | None = None  # vector to compute instead of tokens; `sampling` then has no effect
    # Content of the image files of the prompt. `tokens` has a placeholder for each of them, which the engine replaces.
    images: tuple[bytes, ...] = ()
    answer_key: int = 0  # key under which the worker keeps the tokens of the answer (`AnswersWanted`); 0: it keeps none

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of the answer so far, together."""
        return len(self.tokens) // TOKEN_BYTES


class AttemptTimes(Struct, frozen=True, kw_only=True):
    """Holds instants of a traced attempt in its engine, on the host's monotonic clock; unknown ones are None."""

    scheduled: Nanos | None = None  # end of the attempt's wait in the queue of the engine
    transfer_began: Nanos | None = None  # start of the transfer of blocks from a store or another worker
    transfer_ended: Nanos | None = None


class ParsedDelta(Struct, frozen=True, kw_only=True):
    """Holds the text, reasoning and tool calls in new tokens of an answer, for an attempt with `Start.parsing`."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    stopped: bool = False  # True if a stop string has ended the text; the router then cancels the attempt
    # True in the first `ParsedDelta` of an attempt, which also has the text of the `Start.generated_tokens`.
    from_start: bool = False


class Progress(Struct, frozen=True, kw_only=True):
    """Holds the progress of one attempt in one engine step; `finish` is set in the last progress of the attempt."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish: Finish | None = None
    # KV report, sent with the first tokens, and again with `finish`; the later report replaces the first one.
    kv: KvReport | None = None
    handoff: Handoff | None = None  # only for Phase.PREFILL, sent with `finish`: the data for the decode worker
    # Log probabilities of each prompt token except the first one, sent with the first tokens.
    prompt_logprobs: tuple[Logprobs, ...] = ()
    parsed: ParsedDelta | None = None  # None if the tokens cannot be parsed yet, or if the attempt has no `parsing`
    # Instants in the engine, if the attempt is traced and the engine measures them; they are not sent to the router.
    times: AttemptTimes | None = None
    vector: Vector = b""  # answer to an attempt with `Start.pooling`, sent with `finish`


class Rejected(Struct, frozen=True, kw_only=True):
    """Message from a worker: the worker did not start an attempt, or has aborted it.

    A worker aborts an attempt because of an engine error, at the end of a drain, or at the deadline of the request.
    """

    request_id: RequestId
    reason: Reason
    message: str
    field: str = ""


class PulledBlocks(Struct, frozen=True, kw_only=True):
    """Counts the KV blocks that an engine has pulled directly from other engines, by the result of the checksum check.

    If the engine has several ranks, the part of a block that one rank pulls counts as a block.
    """

    verified: int = 0  # number of blocks whose checksums were right
    corrupt: int = 0  # number of blocks whose checksums were wrong; the engine computed these blocks itself
    unverified: int = 0  # number of blocks that were used without a check, because their checksums were not known

    def __add__(self, other: "PulledBlocks") -> "PulledBlocks":
        return PulledBlocks(
            verified=self.verified + other.verified,
            corrupt=self.corrupt + other.corrupt,
            unverified=self.unverified + other.unverified,
        )


NOTHING_PULLED = PulledBlocks()


class LoadReport(Struct, frozen=True, kw_only=True):
    running: int
    waiting: int
    kv_blocks_used: int  # number of blocks of the engine's KV cache that running requests use now
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters that are loaded now
    pulled: PulledBlocks = NOTHING_PULLED  # blocks that the engine has pulled from other engines since its start


class KvStored(Struct, frozen=True, tag=True):
    """KV event: these blocks were stored in the engine's prefix cache."""

    hashes: tuple[bytes, ...]  # block hashes of the stored blocks, of 16 bytes each


class KvRemoved(Struct, frozen=True, tag=True):
    hashes: tuple[bytes, ...]


class KvCleared(Struct, frozen=True, tag=True):
    pass


KvEvent = KvStored | KvRemoved | KvCleared


class RouterHello(Struct, frozen=True, kw_only=True):
    """Message to a worker: the first message of a router on its stream to the worker."""

    router_id: str
    protocols: ProtocolRange = UNSTATED  # protocol versions that the router speaks


class Cancel(Struct, frozen=True, kw_only=True):
    request_id: RequestId


class KeepTrace(Struct, frozen=True, kw_only=True):
    """Message to a worker: export the spans of a request, although its trace was not sampled.

    The router sends it because the request was slow or has failed.
    """

    trace_id: bytes
    # Ids of the spans that the router made for the attempts of this request. Empty: the router is older than this field,
    # and the worker exports the spans of all attempts of the trace.
    parent_ids: tuple[bytes, ...] = ()
    # True: these spans are dropped if more than `fleet.tracing.sampling.REFUSED_SHARE` of the export queue is in use, so that room is left
    # for the spans of failed requests.
    leave_room: bool = False


MAX_WANTED_ANSWERS = 1000
"""Maximum number of answers in one `AnswersWanted`; a router asks for more answers in several messages. A message with this
number of answers takes 20 kB."""


class WantedAnswer(Struct, frozen=True):
    key: int  # `Start.answer_key` of the latest attempt whose tokens the client has
    tokens: int  # number of tokens that are wanted, from the first token of the answer on


class AnswersWanted(Struct, frozen=True, kw_only=True):
    """Message to a worker: send the kept tokens of these answers, whose streams are to be resumed."""

    answers: tuple[WantedAnswer, ...]


class KeptAnswer(Struct, frozen=True):
    key: int
    tokens: TokenBytes  # the first tokens of the answer; empty if the worker does not know the answer
    wanted: int = 0  # number of tokens that the router asked for (`WantedAnswer.tokens`); `tokens` may have fewer


class KeptAnswers(Struct, frozen=True, kw_only=True):
    """Message from a worker: the kept tokens of answers. Each wanted answer is in exactly one such message."""

    answers: tuple[KeptAnswer, ...]


class Step(Struct, frozen=True, kw_only=True):
    """Message from a worker: the progress that one engine step made for the requests of one router."""

    progress: tuple[Progress, ...]


class KvEvents(Struct, frozen=True, kw_only=True):
    """Message from a worker: KV events; `sequence` starts at 0 in each stream and grows by one with each message."""

    sequence: int
    events: tuple[KvEvent, ...]


class Draining(Struct, frozen=True):
    """Message from a worker: the worker takes no new attempts from now on; running attempts continue."""


class Goodbye(Struct, frozen=True, kw_only=True):
    """Message from a worker: the last message on a stream that the worker itself ends."""

    reason: str
    # Protocol versions that the worker speaks; sent only if the router speaks none of them.
    protocols: ProtocolRange | None = None


RouterMessage = RouterHello | Start | Cancel | KeepTrace | AnswersWanted
WorkerMessage = WorkerDescription | Step | KvEvents | LoadReport | Rejected | Draining | Goodbye | KeptAnswers
