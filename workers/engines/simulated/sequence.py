"""Sequence: one request inside the simulated engine, with its tokens, its blocks and its remaining work."""

from collections.abc import Mapping
from collections.abc import Sequence as Many

import numpy as np
from msgspec import Struct

from fleet.batching.attempts import Job
from fleet.core.requests import (
    TOKEN_BYTES,
    Finish,
    KvOrigin,
    KvReport,
    Logprobs,
    Sampling,
    Source,
    TokenBytes,
    state_fields,
)
from fleet.core.roles import Phase
from fleet.core.work import AttemptTimes, Start
from kvstore import block
from kvstore.block import BlockHash
from workers.engines.simulated.layout import EngineLayout
from workers.engines.simulated.model import Digest, SampledToken, SimulatedModel
from workers.engines.simulated.scripts import Script, ScriptWriter


class SequenceContext(Struct, frozen=True, kw_only=True):
    """Holds the parts and properties of an engine that all its sequences use."""

    model: SimulatedModel
    layout: EngineLayout
    block_tokens: int
    max_model_len: int
    adapters: Mapping[str, str] = {}  # `LoraAdapter.identity` of each LoRA adapter, by the adapter's name
    writer: ScriptWriter | None = None  # makes the scripts of answers (`scripts`); None: all answers are random text

    def beginning(self, adapter: str) -> Digest:
        return self.model.beginning_with(self.adapters[adapter]) if adapter else self.model.beginning


class SequenceSample(Struct, frozen=True, kw_only=True):
    token: int
    logprobs: tuple[Logprobs, ...]
    finish: Finish | None


class Sequence:
    """Holds one request with its tokens and the bytes of its blocks. KV exists for the first `computed` tokens."""

    def __init__(self, start: Start, shape: SequenceContext) -> None:
        """Begin with the tokens of an attempt and without blocks.

        Raises:
            ValueError: The engine cannot write the structured output or the tool calls that the request demands (`ScriptWriter.write`).
        """
        self.start = start
        self.prompt_tokens = len(start.tokens) // TOKEN_BYTES
        self.computed = 0
        self.blocks: dict[BlockHash, bytearray] = {}  # full blocks of the first `computed` tokens, in the chain's order
        self.fetched: tuple[KvOrigin, ...] = ()  # origins of the blocks that came from the store or another engine
        self.generated = 0  # number of tokens that this attempt has generated, without `start.generated_tokens`
        self.has_slot = False  # True while a LoRA slot is reserved for the sequence
        self.loads_adapter = False  # True if this sequence has to load its LoRA adapter into the slot
        # The attempt's times for its trace; None: the attempt is not traced, or the engine has not begun with it.
        self.times: AttemptTimes | None = None
        self._hits: int | None = None
        self._tokens = bytearray(start.tokens)
        self._digest: Digest = shape.beginning(start.adapter)
        self._shape = shape
        self._block_bytes = shape.block_tokens * TOKEN_BYTES
        self._script = None if shape.writer is None else shape.writer.write(start)
        self._keeps_state = bool(state_fields(start.sampling))
        # Position of the answer's first byte in the bytes of the tokens.
        self._answer_at = len(start.tokens) - start.generated_tokens * TOKEN_BYTES
        self.prompt_names = block.chain(start.tokens, shape.block_tokens, salt=start.salt)

    # The sizes of the request.
    @property
    def answer_tokens(self) -> int:
        """The maximum number of tokens that the sequence can generate."""
        if self.start.phase is Phase.PREFILL:
            return 1
        if self.start.pooling is not None:
            return 1  # the scheduler ends the request after one token; the vector itself takes none
        return min(self.start.sampling.max_tokens, self._shape.max_model_len - self.prompt_tokens)

    @property
    def job(self) -> Job[BlockHash]:
        return Job(
            attempt_id=self.start.request_id,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            keys=self.prompt_names,
            handed_off=self.start.phase is Phase.PREFILL,
            priority=self.start.priority,
        )

    @property
    def has_ended(self) -> bool:
        """True if the tokens that another worker has generated are already the whole scripted answer, so that no token is left."""
        script, earlier = self._script, self.start.generated_tokens
        if script is None or not script.is_whole or self.start.sampling.ignore_eos:
            return False
        return earlier >= len(script.tokens)

    @property
    def most_blocks(self) -> int:
        """The maximum number of blocks that the request can need, for its prompt and the longest possible answer."""
        return block.blocks_for(self.prompt_tokens + self.answer_tokens, self._shape.block_tokens)

    @property
    def reusable_names(self) -> list[BlockHash]:
        """Names of the prompt's blocks that the sequence can take from a cache, the store or another engine.

        Every full block of the prompt can be taken, with one exception. If the full blocks contain the whole prompt,
        the last block is left out. The engine has to compute at least one prompt token to get the first new token (as
        in vLLM).
        """
        return self.prompt_names[: (self.prompt_tokens - 1) // self._shape.block_tokens]

    # The progress of the request.
    def begin(self, cached: Many[bytearray]) -> None:
        """Start with the leading blocks of the prompt that were found in the engine's own cache."""
        if self._hits is None:
            self._hits = len(cached)
        for name, content in zip(self.prompt_names, cached, strict=False):
            self._complete(name, content)
        self.computed = len(cached) * self._shape.block_tokens

    def reset(self) -> None:
        """Drop all blocks after a preemption, so that their KV is computed again; the tokens stay."""
        self.blocks, self.computed, self._digest = {}, 0, self._shape.beginning(self.start.adapter)

    def accept(self, contents: Many[bytes], source: Source, origin: str, tiers: Mapping[str, int]) -> None:
        """Add fetched blocks of the prompt, which follow the blocks that the sequence has.

        Args:
            contents: The bytes of the blocks.
            source: The store, or another engine (direct transfer).
            origin: Id of the worker or store node that sent the blocks.
            tiers: The number of blocks by the store's tier that they came from; empty if they came from another engine.
        """
        for content in contents:
            self._complete(self.reusable_names[len(self.blocks)], bytearray(content))
        self.computed = len(self.blocks) * self._shape.block_tokens
        if contents:
            size = len(contents[0])
            self.fetched = tuple(
                KvOrigin(source=source, origin=origin, blocks=blocks, bytes=blocks * size, tier=tier)
                for tier, blocks in (tiers or {"": len(contents)}).items()
            )

    def compute(self, num_tokens: int) -> list[BlockHash]:
        """Compute the KV of the next tokens; return the names of the blocks that have become full."""
        assert self.computed + num_tokens <= len(self._tokens) // TOKEN_BYTES
        self.computed += num_tokens
        filled = []
        while (len(self.blocks) + 1) * self._shape.block_tokens <= self.computed:
            filled.append(self._fill())
        return filled

    def sample(self) -> SequenceSample:
        """Sample the next token and append it; the KV of all earlier tokens must exist."""
        sampling = self.start.sampling
        assert self.computed == len(self._tokens) // TOKEN_BYTES
        may_end = not sampling.ignore_eos and self.generated >= sampling.min_tokens
        model, forbidden, shifts = self._shape.model, set[int](), None
        if self._keeps_state:
            prompt, answer = self.start.tokens[: self._answer_at], bytes(self._tokens[self._answer_at :])
            forbidden = _forbidden(answer, sampling)
            shifts = model.penalty_shifts(sampling, prompt, answer)
        drawn = model.draw(
            self._digest,
            self._tokens[len(self.blocks) * self._block_bytes :],
            sampling,
            may_end=may_end,
            forbidden=forbidden,
            shifts=shifts,
        )
        ended = False
        if self._script is not None:
            drawn, ended = self._scripted(self._script, drawn)
        self._tokens += drawn.token.to_bytes(TOKEN_BYTES, "little")
        self.generated += 1
        logprobs: tuple[Logprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (self._shape.model.logprobs(drawn.token, sampling.logprobs),)
        stops = drawn.token in sampling.stop_token_ids and self.generated >= sampling.min_tokens
        finish = None
        if drawn.ends or stops or ended:
            finish = Finish.STOP
        elif self.generated >= self.answer_tokens:
            finish = Finish.LENGTH
        return SequenceSample(token=drawn.token, logprobs=logprobs, finish=finish)

    def prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Return log probabilities of each prompt token except the first; empty if the client did not request them."""
        if (wanted := self.start.sampling.prompt_logprobs) is None:
            return ()
        ids = np.frombuffer(self.start.tokens, "<u4")[1:].tolist()
        return tuple(self._shape.model.logprobs(token, wanted) for token in ids)

    def _scripted(self, script: Script, drawn: SampledToken) -> tuple[SampledToken, bool]:
        """Return the next token, and whether the script ends the answer with it.

        Within the script, the token is the script's. After its end, the token is the one that the model has sampled.
        """
        position = self.start.generated_tokens + self.generated
        if position >= len(script.tokens):
            return drawn, False
        ends = script.is_whole and position + 1 == len(script.tokens) and not self.start.sampling.ignore_eos
        return SampledToken(script.tokens[position], ends=False), ends

    def report(self) -> KvReport:
        """Return the KV report: how many of the prompt's blocks came from the engine's cache, from elsewhere, or were computed."""
        total = block.blocks_for(self.prompt_tokens, self._shape.block_tokens)
        hits, fetched = self._hits or 0, sum(origin.blocks for origin in self.fetched)
        origins = [
            KvOrigin(source=Source.ENGINE, blocks=hits),
            *self.fetched,
            KvOrigin(source=Source.COMPUTED, blocks=total - hits - fetched),
        ]
        return KvReport(
            prompt_blocks=total,
            origins=tuple(origin for origin in origins if origin.blocks),
            cached_tokens=(hits + fetched) * self._shape.block_tokens,
        )

    def _fill(self) -> BlockHash:
        """Compute the bytes of the next block; all tokens of the block must be known."""
        shape = self._shape
        position = len(self.blocks)
        tokens = self._tokens[position * self._block_bytes : (position + 1) * self._block_bytes]
        if position < len(self.prompt_names):
            name = self.prompt_names[position]
        else:
            parent = next(reversed(self.blocks), None) or block.root(self.start.salt)
            (name,) = block.extend(parent, bytes(tokens), shape.block_tokens)
        self._complete(name, bytearray(shape.layout.lay_out(shape.model.compute(self._digest, tokens))))
        return name

    def _complete(self, name: BlockHash, content: bytearray) -> None:
        """Add a full block; all later blocks and tokens depend on the bytes that the block really has in memory."""
        self.blocks[name] = content
        self._digest = self._shape.model.read(self._digest, self._shape.layout.values(content))


def _forbidden(answer: TokenBytes, sampling: Sampling) -> set[int]:
    """Return the tokens that must not come next because they would complete a forbidden sequence of the request."""
    ids = np.frombuffer(answer, "<u4").tolist()
    return {last for *lead, last in sampling.bad_tokens if not lead or ids[-len(lead) :] == lead}
