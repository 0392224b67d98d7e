"""What a client asks for and what it gets: the values that fronts, router and workers share."""

from enum import StrEnum

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, RequestId
from fleet.core.roles import KvPath, Phase, Placement
from kvstore import block

TokenBytes = bytes
"""Token ids, unsigned 32-bit little-endian, 4 bytes each: hashed, sent and compared without being unpacked."""

TOKEN_BYTES = block.TOKEN_BYTES


class AnyObject(Struct, frozen=True, tag=True):
    """Some JSON object."""


class JsonSchema(Struct, frozen=True, tag=True):
    """JSON that a schema allows."""

    schema: str  # a JSON object


class Pattern(Struct, frozen=True, tag=True):
    """Text that the whole of an expression matches."""

    regex: str


class Grammar(Struct, frozen=True, tag=True):
    """Text of a grammar: EBNF as llama.cpp has it (GBNF), or what else the engine's grammar library reads."""

    text: str


class Choice(Struct, frozen=True, tag=True):
    """One of these."""

    strings: tuple[str, ...]


StructuredOutput = AnyObject | JsonSchema | Pattern | Grammar | Choice
"""What an answer must be, as text."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Ranges are checked by `fleet.core.validation`, not here."""

    max_tokens: int = 16
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
    form: StructuredOutput | None = None  # None: any

    @property
    def stateless(self) -> bool:
        """Whether the next token depends on nothing but the tokens before it.

        Only then may a decode worker take a token sampled by the prefill worker as part of its prompt: penalties,
        `min_tokens`, a seeded generator and a form all go by the tokens that *this* engine has generated.
        """
        return (
            (self.temperature == 0 or self.seed is None)
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.repetition_penalty == 1
            and self.min_tokens <= 1
            and self.form is None
        )


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: str
    content: str
    tool_calls: str = ""  # that the assistant made: a JSON list as the OpenAI API has it; empty: none
    tool_call_id: str = ""  # that a tool answers
    name: str = ""  # of who speaks, or of the tool


class TextPrompt(Struct, frozen=True, tag=True):
    text: str


class ChatPrompt(Struct, frozen=True, tag=True):
    messages: tuple[ChatMessage, ...]
    tools: str = ""  # that the model may call: a JSON list as the OpenAI API has it; empty: none


class TokenPrompt(Struct, frozen=True, tag=True):
    tokens: TokenBytes


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One prompt as a front hands it on: syntactically sound, not yet validated against the model."""

    id: RequestId
    model: ModelName  # empty: the only one served
    prompt: Prompt
    sampling: Sampling = Sampling()
    fill_context: bool = False  # the answer may take all that the prompt leaves; `sampling.max_tokens` is not looked at
    stop: tuple[str, ...] = ()
    priority: int = 0
    deadline: Nanos | None = None  # instant of the server's clock
    session: str = ""
    tenant: str = ""
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    expected_tokens: int = 0  # of the answer; 0: not known
    pin: str = ""  # the only worker that may answer
    labels: tuple[str, ...] = ()  # that it must have
    whole: bool = False  # the client gets the answer in one piece; then it comes as one `Delta` at most


class Finish(StrEnum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    CANCELLED = "cancelled"  # only between router and worker; a client sees an error instead


class Logprobs(Struct, frozen=True):
    """Natural logarithms, of the chosen token and of the most likely ones, most likely first."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class Source(StrEnum):
    """Where a block of the prompt came from."""

    ENGINE = "engine"  # the engine's own prefix cache
    STORE = "store"
    DIRECT = "direct"
    COMPUTED = "computed"


class KvOrigin(Struct, frozen=True, kw_only=True):
    source: Source
    origin: str = ""  # the store node or worker that gave the blocks; empty for ENGINE and COMPUTED
    blocks: int
    bytes: int = 0  # that moved
    tier: str = ""  # of the store node, that had them; empty where that is not known, and for other sources


class KvReport(Struct, frozen=True, kw_only=True):
    """Where one phase's prompt blocks came from, as the worker counted them: the origins add up to `prompt_blocks`."""

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
    """What is left of a limit."""

    limit: int  # a minute
    remaining: int
    full_in_seconds: float


class RateLimitStatus(Struct, frozen=True, kw_only=True):
    """What is left to a tenant; None where it has no limit."""

    requests: RemainingLimit | None = None
    tokens: RemainingLimit | None = None


class Admitted(Struct, frozen=True, kw_only=True):
    """First thing a front hears: the request is valid and was taken."""

    request_id: RequestId
    model: ModelName
    prompt_tokens: int
    allowance: RateLimitStatus | None = None


class Delta(Struct, frozen=True, kw_only=True):
    """New tokens. `text` may lag behind while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()


class Finished(Struct, frozen=True, kw_only=True):
    """Last thing a front hears, unless a `Refused` was raised."""

    finish: Finish
    usage: Usage
    kv: tuple[KvPhase, ...]
    text: str = ""  # held back for a possible stop string


GenerateEvent = Admitted | Delta | Finished


class ModelCard(Struct, frozen=True, kw_only=True):
    name: ModelName
    max_model_len: int  # prompt plus answer, tokens
    block_tokens: int
    workers: int
    parent: ModelName = ModelName("")  # of an adapter: the model that it belongs to
    revision: str = ""  # of an adapter
