"""Attempts of a modelled engine: defines the data that the engine gets for each attempt, and the state that its scheduler keeps."""

from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from fleet.core.ids import RequestId

Name = TypeVar("Name", bound=Hashable)
"""Name of a KV block: an integer in the simulator, a hash in an engine with real bytes."""


class StepTimes(Protocol):
    """Port that predicts the duration of an engine step in seconds.

    The step computes `prefill_tokens` tokens of prompts. `prefill_pairs` is the number of pairs of such a token and a token
    that it attends to. The step also generates one token for each of `decodes` sequences, which have `decode_context`
    tokens in total.
    """

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float: ...


class EngineLimits(Struct, frozen=True, kw_only=True):
    """Limits of an engine: its number of KV blocks, its batch size, and the tokens of a step."""

    kv_blocks: int
    block_tokens: int
    max_running: int  # maximum number of sequences in one batch
    step_tokens: int  # maximum number of tokens of one step, prompts and answers together


class Job(Struct, Generic[Name], frozen=True, kw_only=True):
    """One attempt, as a worker passes it to its engine."""

    attempt_id: RequestId
    prompt_tokens: int
    answer_tokens: int  # maximum number of tokens that the attempt may generate
    keys: Sequence[Name]  # names of the prompt's full blocks
    answer_keys: Sequence[Name] = ()  # names of the blocks that the answer will fill; the last ones may be missing
    fetched_tokens: int = 0  # number of prompt tokens whose KV comes from a prefill worker
    handed_off: bool = False  # True if the blocks are kept after the attempt's end, until `BatchScheduler.release`
    priority: int = 0  # attempts of a higher priority are admitted first


class BlockSupply(Protocol[Name]):
    """Port by which an engine fetches blocks that it does not have, from a prefill worker or from the store."""

    def offer(self, job: Job[Name], here: int) -> int:
        """Return the number of leading prompt tokens whose KV the engine would have after a fetch.

        Args:
            job: The attempt.
            here: Number of leading blocks of the prompt that the engine has already.

        Returns:
            The number of tokens, including those of the `here` blocks. If it is not more than the tokens of these blocks, nothing is
            worth fetching.
        """
        ...

    def fetch(self, job: Job[Name], here: int) -> None:
        """Begin to fetch the blocks that `offer` has just counted. When the fetch has ended, `BatchScheduler.fetched` must be called."""
        ...


class BatchedAttempt(Generic[Name]):
    """The state of an attempt in its engine. The class is not a frozen Struct, because most fields change often."""

    __slots__ = (
        "admitted",
        "asked",
        "begun_at",
        "cached",
        "coming",
        "computed",
        "generated",
        "held",
        "job",
        "own",
        "prompt_tokens",
        "reported",
    )

    def __init__(self, job: Job[Name], coming: int = 0, *, asked: bool = False) -> None:
        self.job = job
        # Number of tokens to compute before the next token is generated: the prompt and, after a preemption, the tokens generated so far.
        self.prompt_tokens = job.prompt_tokens
        # Number of generated tokens, valid only while the attempt does not run; see `BatchScheduler.generated`.
        self.generated = 0
        self.reported = 0  # number of generated tokens that were reported to the worker
        self.computed = 0  # number of prompt tokens whose KV is in this engine
        self.coming = coming  # number of prompt tokens whose KV will be in this engine after the fetch
        self.asked = asked  # True if the scheduler has already called the block supply for this attempt
        self.cached: int | None = None
        self.held: list[Name] = []  # names of the attempt's blocks that have a name
        self.own = 0  # number of the attempt's blocks without a name
        # Number of the engine's decode steps when the attempt joined the batch, minus the attempt's generated tokens then.
        self.begun_at = 0
        self.admitted = 0  # number of the attempt in the order of admission
