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

    schema: str  # the schema, a JSON object as text


class Pattern(Struct, frozen=True, tag=True):
    """Structured output: text that matches a regular expression completely."""

    regex: str


class Grammar(Struct, frozen=True, tag=True):
    """Structured output: text of a grammar, in GBNF or another form that the engine's grammar library reads."""

    text: str


class Choice(Struct, frozen=True, tag=True):
    """Structured output: one of the given strings."""

    strings: tuple[str, ...]


class StructuralTag(Struct, frozen=True, tag=True):
    """Structured output: text in which some parts, which begin with given tags, follow rules of their own."""

    text: str  # the tags and their rules, a JSON object in XGrammar's format


class ToolCallForm(Struct, frozen=True, tag=True):
    """Structured output: tool calls in the model's own format, as `ParsingTask` demands. Only the router sets it."""


StructuredOutput = AnyObject | JsonSchema | Pattern | Grammar | Choice | StructuralTag | ToolCallForm
"""The rule that an answer's text must follow."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling parameters. `fleet.core.validation` checks their ranges."""

    max_tokens: int = 16  # most tokens of the answer; 0: only the prompt is computed
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # number of most likely tokens among which one is sampled; 0: all tokens
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # number of alternatives per token; None: no log probabilities
    form: StructuredOutput | None = None  # rule for the text of the answer; None: no rule
    # The following fields are not supported by every engine, see `ENGINE_FIELDS`.
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token id and a number that is added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that may be sampled; empty: all
    bad_tokens: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that must not be sampled
    prompt_logprobs: int | None = None  # number of alternatives per token of the prompt; None: no log probabilities

    @property
    def stateless(self) -> bool:
        """True if the next token depends only on the tokens before it.

        Only then may a decode worker treat the prefill worker's first token as a part of its prompt. Penalties,
        `min_tokens`, seeded generators, structured output and forbidden sequences depend on the tokens that *this* engine
        has generated. Log probabilities of the prompt are sent only once.
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
    """Return the fields among `STATE_FIELDS` that have an effect in a request."""
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
    """Return the fields among `ENGINE_FIELDS` that a request uses."""
    return tuple(name for name in ENGINE_FIELDS if getattr(sampling, name) not in ((), None))


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: str
    content: str
    tool_calls: str = ""  # the assistant's tool calls, a JSON list as in the OpenAI API; empty: none
    tool_call_id: str = ""  # id of the tool call that this message answers
    name: str = ""  # the name of the speaker or of the tool


class ToolChoice(StrEnum):
    """Rule for the tool calls that an answer may have."""

    NONE = "none"  # only text, no calls
    AUTO = "auto"  # the model decides whether it calls tools
    REQUIRED = "required"  # at least one call, of any tool
    NAMED = "named"  # one call, of the tool that the request names


class AnswerParsing(Struct, frozen=True, kw_only=True):
    """Demand to return reasoning and tool calls apart from the text, and which calls the answer may have."""

    tool_choice: ToolChoice = ToolChoice.AUTO
    function: str = ""  # name of the tool for ToolChoice.NAMED
    parallel_calls: bool = True  # False: at most one call


class TextPrompt(Struct, frozen=True, tag=True):
    text: str
    # True if the model's special tokens, such as the beginning of a sequence, are put before the text.
    special: bool = True


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
    """Demand to continue an answer that another router has begun, or that this router has begun on a lost connection.

    The client's request is the same as before. `position` may exceed the number of known tokens. Then the missing tokens
    are generated again, but the client does not get them twice.
    """

    token: str  # resume token (`fleet.frontend.resume_tokens`)
    token_ids: tuple[int, ...] = ()  # known tokens of the answer, from the first one on
    position: int = 0  # number of the answer's tokens that the client has
    # The following fields are the parts of a parsed answer that the client has.
    text: str = ""
    reasoning: str = ""
    calls: "tuple[CallDelta, ...]" = ()


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One request from a frontend; its syntax is correct, but it is not yet validated against the model."""

    id: RequestId
    model: ModelName  # name of the model or LoRA adapter; empty: the only model that is served
    prompt: Prompt
    sampling: Sampling = Sampling()
    # True: the answer may fill the rest of the context, and `sampling.max_tokens` is ignored.
    fill_context: bool = False
    stop: tuple[str, ...] = ()
    include_stop_string: bool = False  # True: the stop string that ends the answer is a part of the answer
    show_special_tokens: bool = False
    bad_words: tuple[str, ...] = ()  # strings that the answer must not contain; they become `Sampling.bad_tokens`
    cache_salt: str = ""  # the prompt shares blocks only with requests that have the same salt
    # Only so many of the prompt's last tokens are used; -1: as many as fit; None: all.
    truncate_prompt: int | None = None
    priority: int = 0
    deadline: Nanos | None = None  # instant of the server's clock; None: no deadline
    session: str = ""
    tenant: str = ""
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    expected_tokens: int = 0  # expected answer length; 0: unknown
    pin: str = ""  # id of the only worker that may answer; empty: any worker
    labels: tuple[str, ...] = ()  # labels that the worker must have
    whole: bool = False  # True: the client gets the answer in one piece, so there is at most one `Delta`
    sibling: bool = False  # True: the prompt's tokens are counted for another branch of the client's request
    tokens: TokenBytes = (
        b""  # the prompt's tokens, as that branch has computed them; empty: they are computed from `prompt`
    )
    # True: other branches wait for this one's first token. If `whole` holds the token back, an empty `Delta` announces it.
    leads: bool = False
    parsing: AnswerParsing | None = None  # None: the answer is not parsed, and is one text
    resumable: bool = False  # True: the client gets resume tokens
    journaled: bool = False  # True: routers keep the answer's tokens, because the client keeps none
    resume: Resume | None = None  # the answer to continue; None: a new answer begins


class Finish(StrEnum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # the answer has reached max_tokens or the model's longest context
    TOOL_CALLS = "tool_calls"  # as STOP, but the answer has tool calls; used only between router and client
    CANCELLED = "cancelled"  # used only between router and worker; clients get an error instead


class Logprobs(Struct, frozen=True):
    """Natural logarithms of the probabilities of the chosen token and of the most likely tokens, the most likely first."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class Source(StrEnum):
    """Kind of place from which a worker got a prompt block."""

    ENGINE = "engine"  # the engine's own prefix cache
    STORE = "store"
    DIRECT = "direct"
    COMPUTED = "computed"


class KvOrigin(Struct, frozen=True, kw_only=True):
    source: Source
    origin: str = ""  # id of the store node or worker that gave the blocks; empty for ENGINE and COMPUTED
    blocks: int
    bytes: int = 0  # number of transferred bytes
    tier: str = ""  # tier of the store node in which the blocks were; empty if unknown, and for other sources


class KvReport(Struct, frozen=True, kw_only=True):
    """KV report of one phase: the source of each prompt block, as the worker counted them.

    The origins add up to `prompt_blocks`.
    """

    prompt_blocks: int
    origins: tuple[KvOrigin, ...]
    cached_tokens: int  # number of prompt tokens that this phase did not compute

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

    limit: int  # requests or tokens per minute that the tenant may use
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
    tokens: TokenBytes = b""  # token ids of the prompt; empty at a client
    allowance: RateLimitStatus | None = None
    resume_token: str = ""  # resume token, if `GenerateRequest.resumable` is set
    resumes: RequestId = RequestId("")  # id of the request whose answer is continued; empty: a new answer begins
    began: int = 0  # Unix time in seconds of that request; 0: a new answer begins


class CallDelta(Struct, frozen=True, kw_only=True):
    """Next part of a tool call. The first part of each call has the call's id and the function's name."""

    index: int  # number of the call in the answer, from 0
    id: str = ""
    name: str = ""
    arguments: str = ""  # next part of the arguments; all parts together are JSON text


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
    # Only in the first delta: log probabilities of each prompt token except the first.
    prompt_logprobs: tuple[Logprobs, ...] = ()
    reasoning: str = ""  # next part of the reasoning, which comes before the text
    calls: tuple[CallDelta, ...] = ()
    resume_token: str = ""  # new resume token, which replaces the earlier one; empty: the earlier one stays valid


class Finished(Struct, frozen=True, kw_only=True):
    """Last event of an answer, unless a `RequestRejected` is raised."""

    finish: Finish
    usage: Usage
    kv: tuple[KvPhase, ...]
    text: str = ""  # last text, which was held back because it might have begun a stop string
    stop_string: str = ""  # the stop string that ended the answer; empty if none did


GenerateEvent = Admitted | Delta | Finished


class AnswerParsers(Struct, frozen=True, kw_only=True):
    """Names of the parsers of a model's answers, as vLLM names them; empty: there is no parser."""

    tool_calls: str = ""
    reasoning: str = ""
    in_engine: bool = False  # True if the workers parse; False if the router does


class ModelCard(Struct, frozen=True, kw_only=True):
    name: ModelName
    max_model_len: int  # most tokens of prompt and answer together
    block_tokens: int
    workers: int
    parent: ModelName = ModelName("")  # for a LoRA adapter: its base model
    revision: str = ""  # for a LoRA adapter: its revision
    parsers: AnswerParsers | None = None  # parsers that the workers name; None: no worker names a parser
