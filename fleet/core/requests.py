"""Requests: define requests and answers in the form that frontends, routers and workers share."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, RequestId
from fleet.core.roles import KvPath, Phase, Placement
from kvstore import block
from kvstore.tracing.context import TraceContext

TokenBytes = bytes
"""Token ids, each as an unsigned 32-bit little-endian integer. The code hashes, sends and compares these bytes without
converting them to integers."""

TOKEN_BYTES = block.TOKEN_BYTES


MAX_VECTOR_NUMBERS = 65_536
"""The maximum number of numbers in a vector that answers a request; public embedding models have fewer than 20,000."""

NUMBER_BYTES = 4


class PoolingTask(StrEnum):
    """Tasks of pooling models: the kinds of vectors that they compute for a prompt."""

    EMBED = "embed"  # a vector that stands for the meaning of a text
    CLASSIFY = "classify"  # a number for each class; a cross-encoder has one class, whose number is the score of a pair


class PairForm(StrEnum):
    """Forms in which a cross-encoder reads a pair of texts as one prompt."""

    NONE = "none"  # the model scores no pairs
    SEPARATED = "separated"  # the tokenizer puts the model's separator between the two texts
    JOINED = "joined"  # the second text follows the first one without a separator


class PoolingModel(Struct, frozen=True, kw_only=True):
    """Describes what a pooling model computes, and how it reads pairs of texts."""

    task: PoolingTask
    pairs: PairForm = PairForm.NONE


class Pooling(Struct, frozen=True, kw_only=True):
    """Part of a request that demands a vector for the prompt instead of generated tokens."""

    task: PoolingTask
    dimensions: int = 0  # number of dimensions of the embedding to return; 0 means all
    # True: embeddings are normalised, and the activation function is applied to the numbers of classes. False: neither is done, so the
    # numbers of classes are logits. None: the model's default is used.
    activation: bool | None = None
    # Number of tokens of the first text, if the prompt is a pair of texts; 0 for other prompts. If the tokenizer gives all tokens the same
    # token type, the number of all tokens. Workers whose model has no token types ignore this field.
    first_tokens: int = 0


Vector = bytes
"""The numbers of a vector, each as a 32-bit little-endian float. The code sends these bytes without converting them."""


class AnyObject(Struct, frozen=True, tag=True):
    """Structured output: any JSON object."""


class JsonSchema(Struct, frozen=True, tag=True):
    """Structured output: JSON that a JSON schema allows."""

    schema: str  # the schema, a JSON object as text


class Pattern(Struct, frozen=True, tag=True):
    """Structured output: text that matches a regular expression completely."""

    regex: str


class Grammar(Struct, frozen=True, tag=True):
    """Structured output: text that a grammar allows, in GBNF or another form that the grammar library reads."""

    text: str


class Choice(Struct, frozen=True, tag=True):
    """Structured output: one of the given strings."""

    strings: tuple[str, ...]


class StructuralTag(Struct, frozen=True, tag=True):
    """Structured output: free text in which only the parts after given tags have to follow rules."""

    text: str  # the tags and their rules, a JSON object in XGrammar's format


class ToolCallForm(Struct, frozen=True, tag=True):
    """Structured output: tool calls in the model's own format. Only the router sets it, for an attempt that also has a `ParsingTask`."""


StructuredOutput = AnyObject | JsonSchema | Pattern | Grammar | Choice | StructuralTag | ToolCallForm
"""The rule that the text of an answer has to follow."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Holds the sampling parameters of a request; `fleet.core.validation` checks their ranges."""

    max_tokens: int = 16  # maximum number of tokens of the answer; with 0, only the prompt is computed
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # number of most likely tokens from which one is sampled; 0 means all tokens
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    # Number of most likely tokens to return for each token of the answer; None: no log probabilities are returned.
    logprobs: int | None = None
    form: StructuredOutput | None = None  # rule for the text of the answer; None if there is no rule
    # Not every engine supports the following fields (`ENGINE_FIELDS`).
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token id and a number that is added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that may be sampled; empty if all may be
    bad_tokens: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that must not be sampled
    # Number of most likely tokens to return for each token of the prompt; None: no log probabilities are returned.
    prompt_logprobs: int | None = None
    thinking_tokens: int | None = None  # maximum number of tokens of the reasoning; None: there is no limit

    @property
    def stateless(self) -> bool:
        """True if the next token depends only on the tokens before it, and not on which engine has generated them.

        Only then may a decode worker treat the token that the prefill worker has generated as a part of its prompt. The
        effect of penalties, `min_tokens`, seeded generators, structured output and forbidden sequences depends on the
        tokens that the same engine has generated. The property is also False if log probabilities of the prompt are
        requested, because a decode worker would send them a second time.
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


DEFAULT_FIELDS = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
)
"""Fields of `Sampling` for which a model may have a sampling default (``generation_config.json`` in its folder)."""


STATE_FIELDS = (
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "form",
    "bad_tokens",
)
"""Fields of `Sampling` whose effect depends on the tokens that the engine has generated before. An engine that
continues an answer of another engine has to rebuild the sampling state, such as the counts of penalties, from the tokens
that the other engine has generated."""


def state_fields(sampling: Sampling) -> tuple[str, ...]:
    """Return those of `STATE_FIELDS` that have an effect with these sampling parameters."""
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


IMAGES = "images"
"""Name that an engine reports, in addition to names in `ENGINE_FIELDS`, if its model takes images in prompts."""

ENGINE_FIELDS = ("logit_bias", "allowed_token_ids", "bad_tokens", "prompt_logprobs", "thinking_tokens")
"""Fields of `Sampling` that some engines do not support. The router places a request only on a worker that supports all of these fields
that the request uses.
"""


def engine_fields(sampling: Sampling) -> tuple[str, ...]:
    """Return those of `ENGINE_FIELDS` that these sampling parameters use."""
    return tuple(name for name in ENGINE_FIELDS if getattr(sampling, name) not in ((), None))


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: str
    content: str
    # The texts of a message with images, with None in the place of each image; empty if the message has no images.
    parts: tuple[str | None, ...] = ()
    tool_calls: str = ""  # tool calls of the assistant, a JSON list as in the OpenAI API, or empty
    tool_call_id: str = ""  # id of the tool call whose result this message is; empty for other messages
    name: str = ""  # the name of the speaker, or of the tool that was called; empty: none was given


class ToolChoice(StrEnum):
    """Rules for the tool calls that an answer may contain."""

    NONE = "none"  # no calls, only text
    AUTO = "auto"  # the model decides whether it calls tools
    REQUIRED = "required"  # at least one call, of any tool
    NAMED = "named"  # one call, of the tool that the request names


class AnswerParsing(Struct, frozen=True, kw_only=True):
    """Part of a request that demands reasoning and tool calls separately from the text, and limits the tool calls."""

    tool_choice: ToolChoice = ToolChoice.AUTO
    function: str = ""  # name of the tool, for ToolChoice.NAMED
    parallel_calls: bool = True  # False: the answer has at most one call


REASONING_ALONE = AnswerParsing(tool_choice=ToolChoice.NONE)
"""Parsing of the answer to a chat without tools: the reasoning is separated from the text, and there are no calls."""


class TextPrompt(Struct, frozen=True, tag=True):
    text: str
    # True if the tokenizer adds the model's special tokens, such as that for the beginning of a sequence.
    special: bool = True


class ChatPrompt(Struct, frozen=True, tag=True):
    messages: tuple[ChatMessage, ...]
    tools: str = ""  # tools that the model may call, a JSON list as in the OpenAI API, or empty
    # Additional variables of the chat template, such as `enable_thinking`: a JSON object; empty: none.
    template_args: str = ""


class TokenPrompt(Struct, frozen=True, tag=True):
    tokens: TokenBytes


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class Resume(Struct, frozen=True, kw_only=True):
    """Part of a request that asks a router to continue an answer whose connection broke; another router may have begun the answer.

    The request has the same prompt and parameters as the request that began the answer. `position` may exceed the number of tokens in
    `token_ids`. The missing tokens are then generated again, but the client does not get them a second time.
    """

    token: str  # resume token (`fleet.frontend.resume_tokens`)
    # Known tokens of the answer, from the first one on. The client has sent them, or a worker has kept them.
    token_ids: tuple[int, ...] = ()
    position: int = 0  # number of tokens of the answer that the client has
    # True if the router has to return the known tokens again. The frontend then leaves out what the client has already.
    from_start: bool = False
    # The following fields contain what the client has of a parsed answer.
    text: str = ""
    reasoning: str = ""
    calls: "tuple[CallDelta, ...]" = ()


class RemoteImage(Struct, frozen=True):
    """An image of a chat that the client names by an http or https URL."""

    place: int  # index of the image in `GenerateRequest.images`
    url: str
    field: str  # path of the URL in the client's request, for errors


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Holds one request in the form that a frontend gives to `fleet.frontend.generation`, which checks it against the limits of the model."""

    id: RequestId
    model: ModelName  # name of the model or LoRA adapter; empty for the only served model
    prompt: Prompt
    sampling: Sampling = Sampling()
    # The fields in `DEFAULT_FIELDS` that the client has left out. If the model has a sampling default for such a field, it replaces the
    # value in `sampling`.
    unset: frozenset[str] = frozenset()
    # True: the answer may fill the rest of the model's context, and `sampling.max_tokens` is ignored.
    fill_context: bool = False
    # True: if `sampling.max_tokens` do not fit into the model's context, the answer may be only as long as the context allows. False: such
    # a request is refused.
    ends_with_context: bool = False
    stop: tuple[str, ...] = ()
    include_stop_string: bool = False  # True: the answer includes the stop string that ends it
    show_special_tokens: bool = False
    bad_words: tuple[str, ...] = ()  # strings that the answer must not contain; they become `Sampling.bad_tokens`
    # The prompt shares blocks only with requests that have the same text here. Requests without this text share blocks with each other.
    cache_salt: str = ""
    # Number of the prompt's last tokens that are used. -1 means as many as fit, and None means all.
    truncate_prompt: int | None = None
    priority: int = 0
    deadline: Nanos | None = None  # instant of the router's clock (`Clock`); None if there is no deadline
    session: str = ""
    tenant: str = ""
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    expected_tokens: int = 0  # length of the answer that the client expects, in tokens; 0 if the client states none
    pin: str = ""  # id of the only worker that may answer; empty if any may
    labels: tuple[str, ...] = ()  # labels that the worker must have
    whole: bool = False  # True: the answer is not streamed, so at most one `Delta` has content
    # True: another branch of the client's request has the same prompt, and the prompt's tokens are charged to that branch alone.
    sibling: bool = False
    tokens: TokenBytes = b""  # tokens of the prompt, if another branch has already computed them; otherwise empty
    # True: other branches wait for the first token of this one. So an empty `Delta` announces this token if the answer is not streamed.
    leads: bool = False
    parsing: AnswerParsing | None = None  # None: the answer is one text and is not parsed
    resumable: bool = False  # True: the client gets resume tokens
    is_kept: bool = False  # True: workers keep the tokens of the answer, because the client does not
    # True: the client gets its first resume token with the first tokens, or at the end of an answer without tokens. `Admitted` then has
    # none, which saves a signature.
    late_token: bool = False
    resume: Resume | None = None  # the answer to continue; None for a new answer
    trace: TraceContext | None = None  # trace of the request; None if the router does not trace
    # The kind of vector that the client wants instead of tokens, or None if the client wants tokens.
    pooling: Pooling | None = None
    # Content of the image files of a chat, in the order of their places in `ChatMessage.parts`.
    images: tuple[bytes, ...] = ()
    # The images that have to be fetched; `images` has empty content at their places.
    remote_images: tuple[RemoteImage, ...] = ()


class Finish(StrEnum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # the answer has reached max_tokens or the model's maximum context length
    TOOL_CALLS = "tool_calls"  # like STOP, for an answer that has tool calls; used only between router and client
    CANCELLED = "cancelled"  # used only between router and worker; clients get an error instead


class Logprobs(Struct, frozen=True):
    """Holds the natural log probabilities of the chosen token and of the most likely tokens, the likeliest first."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class Source(StrEnum):
    """Kinds of sources from which a worker got a block of the prompt."""

    ENGINE = "engine"  # the engine's own prefix cache
    STORE = "store"
    DIRECT = "direct"
    COMPUTED = "computed"


class KvOrigin(Struct, frozen=True, kw_only=True):
    source: Source
    origin: str = ""  # id of the store node or worker that gave the blocks; empty for ENGINE and COMPUTED
    blocks: int
    bytes: int = 0  # number of bytes that were transferred to the worker for these blocks
    tier: str = ""  # tier of the store node in which the blocks were; empty if unknown, or if `source` is not STORE


class KvReport(Struct, frozen=True, kw_only=True):
    """Holds the KV report of one phase: how many blocks of the prompt the worker got from which source.

    The blocks of all origins add up to `prompt_blocks`.
    """

    prompt_blocks: int
    origins: tuple[KvOrigin, ...]
    cached_tokens: int  # number of prompt tokens that this phase did not compute
    # Number of tokens that the engine added to the prompt by replacing the image placeholders.
    image_tokens: int = 0

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
    reasoning_tokens: int = 0  # number of completion tokens that belong to the reasoning


class RemainingLimit(Struct, frozen=True, kw_only=True):
    """Holds the state of one rate limit of a tenant."""

    limit: int  # requests or tokens per minute that the tenant may use
    remaining: int
    full_in_seconds: float


class RateLimitStatus(Struct, frozen=True, kw_only=True):
    """Holds the state of a tenant's rate limits; a limit that the tenant does not have is None."""

    requests: RemainingLimit | None = None
    tokens: RemainingLimit | None = None


class Admitted(Struct, frozen=True, kw_only=True):
    """First event of an answer: the request is valid and accepted."""

    request_id: RequestId
    model: ModelName
    prompt_tokens: int
    # The parameters of the answer, with the model's sampling defaults. None in a client, to which they are not sent.
    sampling: Sampling | None = None
    tokens: TokenBytes = b""  # token ids of the prompt; empty in a client, to which they are not sent
    allowance: RateLimitStatus | None = None
    # Empty if `GenerateRequest.resumable` is false, if `late_token` is true, or if the router issues no resume tokens.
    resume_token: str = ""
    resumes: RequestId = RequestId("")  # id of the request whose answer is continued; empty for a new answer
    began: int = 0  # Unix time in seconds at which the first router began the answer; 0: the answer cannot be resumed


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD in place of lone surrogates, which UTF-8 cannot encode. A pair of surrogates becomes its character.

    A lone surrogate occurs if a model writes only one half of the JSON escape of a character.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class CallDelta(Struct, frozen=True, kw_only=True):
    """Holds the next part of a tool call; the first part of a call has its id and the name of the function."""

    index: int  # number of the tool call in the answer, from 0
    id: str = ""
    name: str = ""
    arguments: str = ""  # next part of the arguments; all parts together are a JSON text


class ToolCall(Struct, frozen=True, kw_only=True):
    """Holds a complete tool call.

    `arguments` is the text of a JSON object. It is incomplete if the answer reached `max_tokens` within the call.
    """

    id: str
    name: str
    arguments: str


def join_calls(parts: Iterable[CallDelta]) -> list[ToolCall]:
    """Join the parts of tool calls; return the complete calls in the order of their indices."""
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


def merge_calls(parts: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Join the parts of each tool call to one part; return the parts in the order of their indices."""
    indices = sorted({part.index for part in parts})
    if len(indices) == len(parts):
        return tuple(sorted(parts, key=lambda part: part.index))
    return tuple(
        CallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
        for index, call in zip(indices, join_calls(parts), strict=True)
    )


class Delta(Struct, frozen=True, kw_only=True):
    """Holds new tokens of an answer, and the next parts of its text, reasoning and tool calls.

    The text of the last tokens may be missing in `text` until a character, a possible stop string or a tool call is complete. Within
    one `Delta`, reasoning comes before text, and text before tool calls. Each tool call has at most one part in a `Delta`, because some
    client libraries take several parts in one event for several calls. `reasoning` and `calls` are empty unless the request has `parsing`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    # Log probabilities of each prompt token except the first one; only in the first `Delta` of an answer.
    prompt_logprobs: tuple[Logprobs, ...] = ()
    reasoning: str = ""  # next part of the reasoning, which comes before `text`
    calls: tuple[CallDelta, ...] = ()
    resume_token: str = ""  # new resume token; empty if the earlier one stays valid
    vector: Vector = b""  # the answer to a request with `pooling`
    # True: no tokens follow. This `Delta` has the parts of the answer that a parser held back until the last token had come.
    is_last: bool = False


class Finished(Struct, frozen=True, kw_only=True):
    """Last event of an answer, unless a `RequestRejected` is raised."""

    finish: Finish
    usage: Usage
    kv: tuple[KvPhase, ...]
    text: str = ""  # the last text, which was held back as the possible beginning of a stop string or of a character
    stop_string: str = ""  # the stop string that ended the answer; empty if none did


GenerateEvent = Admitted | Delta | Finished


class AnswerParsers(Struct, frozen=True, kw_only=True):
    """Names the parsers for the answers of a model by vLLM's names; a name is empty if there is no such parser."""

    tool_calls: str = ""
    reasoning: str = ""
    in_engine: bool = False  # True if the workers parse the answers; False if the router does


class ModelCard(Struct, frozen=True, kw_only=True):
    name: ModelName
    max_model_len: int  # maximum number of tokens of prompt and answer together, on the worker that allows most
    block_tokens: int
    workers: int
    parent: ModelName = ModelName("")  # base model of a LoRA adapter; empty for a base model itself
    revision: str = ""  # revision of a LoRA adapter; empty for a base model
    parsers: AnswerParsers | None = None  # parsers that the workers report; None if no worker reports any
    pooling: PoolingModel | None = None  # what the pooling model computes; None if the model generates tokens
    takes_images: bool = False  # True if at least one worker of the model takes images in prompts
    limits_reasoning: bool = False  # True if every worker of the model supports `Sampling.thinking_tokens`
