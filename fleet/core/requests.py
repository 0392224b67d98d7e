"""Requests and answers: the values that frontends, router and workers share."""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, RequestId
from fleet.core.roles import KvPath, Phase, Placement
from kvstore import block

TokenBytes = bytes
"""Token ids as unsigned 32-bit little-endian integers; code hashes, sends and compares them without unpacking."""

TOKEN_BYTES = block.TOKEN_BYTES


class AnyObject(Struct, frozen=True, tag=True):
    """Structured output: any JSON object."""


class JsonSchema(Struct, frozen=True, tag=True):
    """Structured output: JSON that a JSON schema allows."""

    schema: str  # the schema, itself a JSON object


class Pattern(Struct, frozen=True, tag=True):
    """Structured output: text that matches a regular expression completely."""

    regex: str


class Grammar(Struct, frozen=True, tag=True):
    """Structured output: text of a grammar (GBNF, or what else the engine's grammar library reads)."""

    text: str


class Choice(Struct, frozen=True, tag=True):
    """Structured output: one of the given strings."""

    strings: tuple[str, ...]


class StructuralTag(Struct, frozen=True, tag=True):
    """Structured output: text in which some parts, which begin with given tags, follow rules of their own."""

    text: str  # a JSON object, as XGrammar reads it


class ToolCallForm(Struct, frozen=True, tag=True):
    """Structured output: tool calls in the model's own format, as `ParsingTask` demands. Only the router sets it."""


StructuredOutput = AnyObject | JsonSchema | Pattern | Grammar | Choice | StructuralTag | ToolCallForm
"""The rule that an answer's text must follow."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling parameters. `fleet.core.validation` checks their ranges."""

    max_tokens: int = 16  # 0: only the prompt is computed
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives per token
    form: StructuredOutput | None = None  # None: no rule
    # Fields that not every engine supports, see `ENGINE_FIELDS`.
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, and what is added to their logits
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that may be sampled; empty: all
    bad_tokens: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that must not be sampled
    prompt_logprobs: int | None = None  # alternatives per token of the prompt

    @property
    def stateless(self) -> bool:
        """True if the next token depends only on the tokens before it.

        Only then may a decode worker treat the prefill worker's first token as a part of its prompt. Penalties,
        `min_tokens`, seeded generators, structured output and forbidden sequences depend on the tokens that *this* engine
        has generated. Log probabilities of the prompt are told once.
        """
        return (
            (self.temperature == 0 or self.seed is None)
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.repetition_penalty == 1
            and self.min_tokens <= 1
            and self.form is None
            and not self.bad_tokens
            and self.prompt_logprobs is None
        )


STATE_FIELDS = (
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "form",
    "bad_tokens",
)
"""Fields of `Sampling` whose effect depends on the tokens that the engine has generated. An engine that continues an
answer has to rebuild this state from the tokens that were generated elsewhere."""


def state_fields(sampling: Sampling) -> tuple[str, ...]:
    """Return those of `STATE_FIELDS` that have an effect in a request."""
    if sampling.stateless:
        return ()
    has_effect = (
        sampling.seed is not None and sampling.temperature > 0,
        sampling.presence_penalty != 0,
        sampling.frequency_penalty != 0,
        sampling.repetition_penalty != 1,
        sampling.min_tokens > 1,
        sampling.form is not None,
        bool(sampling.bad_tokens),
    )
    return tuple(field for field, has in zip(STATE_FIELDS, has_effect, strict=True) if has)


ENGINE_FIELDS = ("logit_bias", "allowed_token_ids", "bad_tokens", "prompt_logprobs")
"""Fields of `Sampling` that a worker must know; an engine may lack them. The router places a request only on a
worker that supports all of these fields that the request uses."""


def engine_fields(sampling: Sampling) -> tuple[str, ...]:
    """Return those of `ENGINE_FIELDS` that a request uses."""
    return tuple(name for name in ENGINE_FIELDS if getattr(sampling, name) not in ((), None))


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: str
    content: str
    tool_calls: str = ""  # calls by the assistant, a JSON list as in the OpenAI API; empty: none
    tool_call_id: str = ""  # the call that this tool message answers
    name: str = ""  # the name of the speaker or of the tool


class ToolChoice(StrEnum):
    """The tool calls that an answer may have."""

    NONE = "none"  # text alone
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # at least one call, of any tool
    NAMED = "named"  # one call, of the tool that the request names


class AnswerParsing(Struct, frozen=True, kw_only=True):
    """Demand to return reasoning and tool calls apart from the text, and which calls the answer may have."""

    tool_choice: ToolChoice = ToolChoice.AUTO
    function: str = ""  # the tool of ToolChoice.NAMED
    parallel_calls: bool = True  # False: at most one call


class TextPrompt(Struct, frozen=True, tag=True):
    text: str
    special: bool = True  # the model's special tokens (such as a beginning of sequence) precede the text


class ChatPrompt(Struct, frozen=True, tag=True):
    messages: tuple[ChatMessage, ...]
    tools: str = ""  # tools that the model may call, a JSON list as in the OpenAI API; empty: none
    template_args: str = (
        ""  # further variables of the chat template, such as `enable_thinking`: a JSON object; empty: none
    )


class TokenPrompt(Struct, frozen=True, tag=True):
    tokens: TokenBytes


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class Resume(Struct, frozen=True, kw_only=True):
    """Demand to go on with an answer that another router has begun, or this one on a connection that was lost.

    The client's request is the same as before. `position` may exceed the known tokens; then the missing ones are generated
    again, and the client does not get them twice.
    """

    token: str  # resume token, see `fleet.frontend.resume_tokens`
    token_ids: tuple[int, ...] = ()  # known tokens of the answer, from the first one on
    position: int = 0  # tokens of the answer that the client has
    # What the client has of an answer that a worker parses.
    text: str = ""
    reasoning: str = ""
    calls: "tuple[CallDelta, ...]" = ()


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One request from a frontend; its syntax is correct, but it is not yet validated against the model."""

    id: RequestId
    model: ModelName  # empty: the only model that is served
    prompt: Prompt
    sampling: Sampling = Sampling()
    fill_context: bool = False  # the answer may fill the rest of the context; `sampling.max_tokens` is ignored
    stop: tuple[str, ...] = ()
    include_stop_string: bool = False  # the stop string that ends the answer is a part of it
    show_special_tokens: bool = False
    bad_words: tuple[str, ...] = ()  # strings that the answer must not contain; they become `Sampling.bad_tokens`
    cache_salt: str = ""  # keeps the blocks of the prompt apart from those of requests with another one
    truncate_prompt: int | None = None  # keep so many of the prompt's last tokens; -1: as many as fit
    priority: int = 0
    deadline: Nanos | None = None  # instant of the server's clock
    session: str = ""
    tenant: str = ""
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    expected_tokens: int = 0  # expected answer length; 0: unknown
    pin: str = ""  # the only worker that may answer; empty: any
    labels: tuple[str, ...] = ()  # labels that the worker must have
    whole: bool = False  # the client gets the answer in one piece, so there is at most one `Delta`
    sibling: bool = False  # another branch of the client's request counts the prompt's tokens
    tokens: TokenBytes = (
        b""  # the prompt's tokens, as that branch has computed them; empty: they are computed from `prompt`
    )
    leads: bool = False  # siblings wait for its first token; where `whole` holds it back, an empty `Delta` tells of it
    parsing: AnswerParsing | None = None  # None: the answer is one text, as the model writes it
    resumable: bool = False  # the client gets resume tokens
    journaled: bool = False  # its tokens are kept by the routers, because the client keeps none
    resume: Resume | None = None  # None: the answer begins


class Finish(StrEnum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    TOOL_CALLS = "tool_calls"  # as STOP, and the answer has tool calls; only between router and client
    CANCELLED = "cancelled"  # only between router and worker; clients see an error instead


class Logprobs(Struct, frozen=True):
    """Natural logarithms of the chosen token's probability and of the most likely ones, most likely first."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class Source(StrEnum):
    """The place that a prompt block came from."""

    ENGINE = "engine"  # the engine's own prefix cache
    STORE = "store"
    DIRECT = "direct"
    COMPUTED = "computed"


class KvOrigin(Struct, frozen=True, kw_only=True):
    source: Source
    origin: str = ""  # id of the store node or worker that gave the blocks; empty for ENGINE and COMPUTED
    blocks: int
    bytes: int = 0  # transferred bytes
    tier: str = ""  # tier of the store node that held the blocks; empty if unknown, and for other sources


class KvReport(Struct, frozen=True, kw_only=True):
    """KV report of one phase: the source of each prompt block, as the worker counted them.

    The origins add up to `prompt_blocks`.
    """

    prompt_blocks: int
    origins: tuple[KvOrigin, ...]
    cached_tokens: int  # prompt tokens that this phase did not compute

    def __post_init__(self) -> None:
        assert sum(origin.blocks for origin in self.origins) == self.prompt_blocks, self


class KvPhase(Struct, frozen=True, kw_only=True):
    phase: Phase
    worker_id: str
    report: KvReport


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class RemainingLimit(Struct, frozen=True, kw_only=True):
    """State of one rate limit."""

    limit: int  # per minute
    remaining: int
    full_in_seconds: float


class RateLimitStatus(Struct, frozen=True, kw_only=True):
    """Rate limits of a tenant; None where the tenant has no limit."""

    requests: RemainingLimit | None = None
    tokens: RemainingLimit | None = None


class Admitted(Struct, frozen=True, kw_only=True):
    """First event of an answer: the request is valid and accepted."""

    request_id: RequestId
    model: ModelName
    prompt_tokens: int
    tokens: TokenBytes = b""  # the prompt; empty at a client
    allowance: RateLimitStatus | None = None
    resume_token: str = ""  # for `GenerateRequest.resumable`
    resumes: RequestId = RequestId("")  # the request whose answer goes on; empty: the answer begins
    began: int = 0  # Unix time in seconds of that request; 0: the answer begins


class CallDelta(Struct, frozen=True, kw_only=True):
    """Next part of a tool call. The first part of each call has the id and the name."""

    index: int  # number of the call in the answer, from 0
    id: str = ""
    name: str = ""
    arguments: str = ""  # more of the arguments, whose parts together are JSON text


class ToolCall(Struct, frozen=True, kw_only=True):
    """A whole call. `arguments` is a JSON object as text, unless `max_tokens` ended the answer within it."""

    id: str
    name: str
    arguments: str


def join_calls(parts: Iterable[CallDelta]) -> list[ToolCall]:
    """Return the calls whose parts are given, in the order of their indices."""
    calls: dict[int, list[CallDelta]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return [
        ToolCall(
            id="".join([part.id for part in calls[index]]),
            name="".join([part.name for part in calls[index]]),
            arguments="".join([part.arguments for part in calls[index]]),
        )
        for index in sorted(calls)
    ]


class Delta(Struct, frozen=True, kw_only=True):
    """New tokens. `text` may lag behind while a character, a stop string or a tool call is incomplete.

    `reasoning` precedes `text`, and `text` precedes `calls`. Both are empty unless the request has `parsing`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()  # in the first delta: of each token of the prompt but the first
    reasoning: str = ""  # more of the reasoning before the answer
    calls: tuple[CallDelta, ...] = ()
    resume_token: str = ""  # replaces the earlier one; empty: that one stays


class Finished(Struct, frozen=True, kw_only=True):
    """Last event of an answer, unless a `RequestRejected` is raised."""

    finish: Finish
    usage: Usage
    kv: tuple[KvPhase, ...]
    text: str = ""  # text that was held back for a possible stop string
    stop_string: str = ""  # the stop string that ended the answer; empty if none did


GenerateEvent = Admitted | Delta | Finished


class AnswerParsers(Struct, frozen=True, kw_only=True):
    """The parsers of a model's answers, by vLLM's names; an empty name: none."""

    tool_calls: str = ""
    reasoning: str = ""
    in_engine: bool = False  # True if the workers parse; False if the router does


class ModelCard(Struct, frozen=True, kw_only=True):
    name: ModelName
    max_model_len: int  # prompt plus answer
    block_tokens: int
    workers: int
    parent: ModelName = ModelName("")  # for a LoRA adapter: its base model
    revision: str = ""  # for a LoRA adapter: its revision
    parsers: AnswerParsers | None = None  # None: no worker names a parser
