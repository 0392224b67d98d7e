"""Sequence: one request inside the simulated engine, with its tokens, its blocks and its remaining work."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from enum import StrEnum

from msgspec import Struct

from fleet.core.requests import TOKEN_BYTES, Finish, KvOrigin, KvReport, Logprobs, Source
from fleet.core.roles import Phase
from fleet.core.work import Start
from kvstore import block
from kvstore.block import BlockHash
from workers.engines.simulated.layout import EngineLayout
from workers.engines.simulated.memory import BlockIndex, BlockMemory
from workers.engines.simulated.model import Digest, SimulatedModel


class SequenceStage(StrEnum):
    WAITING = "waiting"  # for a place in the batch and for blocks
    LOADING = "loading"  # its blocks are being fetched
    PREFILLING = "prefilling"  # the prompt is being computed, chunk by chunk
    DECODING = "decoding"
    PUBLISHING = "publishing"  # computed, but the decode side cannot find its blocks yet
    ENDED = "ended"


class SequenceContext(Struct, frozen=True, kw_only=True):
    """The properties of an engine that its sequences need."""

    model: SimulatedModel
    layout: EngineLayout
    memory: BlockMemory
    block_tokens: int
    max_model_len: int
    adapters: Mapping[str, str] = {}  # identity by name

    def beginning(self, adapter: str) -> Digest:
        return self.model.beginning_with(self.adapters[adapter]) if adapter else self.model.beginning


class SequenceSample(Struct, frozen=True, kw_only=True):
    token: int
    logprobs: tuple[Logprobs, ...]
    finish: Finish | None


class Sequence:
    """A request that holds blocks from `begin` until `release`. KV exists for its first `computed` tokens."""

    def __init__(self, start: Start, shape: SequenceContext) -> None:
        self.start = start
        self.stage = SequenceStage.WAITING
        self.prompt_tokens = len(start.tokens) // TOKEN_BYTES
        self.computed = 0
        self.blocks: list[BlockIndex] = []
        self.names: list[BlockHash] = []  # names of the full blocks that are computed or fetched
        self.reserve = 0  # blocks that are reserved for it and not yet taken
        self.fetched: tuple[KvOrigin, ...] = ()  # origins of the blocks that came from elsewhere
        self.generated = 0  # tokens
        self.loads_adapter = False  # true if a LoRA adapter has to be loaded first
        self._hits = 0
        self._tokens = bytearray(start.tokens)
        self._digest: Digest = shape.beginning(start.adapter)
        self._shape = shape
        self._block_bytes = shape.block_tokens * TOKEN_BYTES
        self.prompt_names = block.chain(start.tokens, shape.block_tokens, salt=start.salt)

    # Sizes.
    @property
    def answer_tokens(self) -> int:
        """The most tokens that it can generate here."""
        if self.start.phase is Phase.PREFILL:
            return 1
        return min(self.start.sampling.max_tokens, self._shape.max_model_len - self.prompt_tokens)

    @property
    def most_blocks(self) -> int:
        """The most blocks that it can hold: the last generated token needs no KV."""
        return block.blocks_for(self.prompt_tokens + self.answer_tokens - 1, self._shape.block_tokens)

    @property
    def reusable_names(self) -> list[BlockHash]:
        """The names of the prompt's blocks that need not be computed.

        These are all full blocks, but at least one token has to be computed, because computing it gives the first new
        token (as in vLLM).
        """
        return self.prompt_names[: (self.prompt_tokens - 1) // self._shape.block_tokens]

    @property
    def missing_tokens(self) -> int:
        """The number of prompt tokens without KV."""
        return max(0, self.prompt_tokens - self.computed)

    # Progress.
    def begin(self, hits: Many[BlockIndex]) -> None:
        """Take a place: the cached blocks are already held for the sequence, and the rest is reserved."""
        self._hits = len(hits)
        self.blocks = list(hits)
        self.reserve = self.most_blocks - len(hits)
        for name, index in zip(self.reusable_names, hits, strict=False):
            self._complete(name, index)
        self.computed = len(hits) * self._shape.block_tokens

    def accept(self, contents: Many[bytes], source: Source, origin: str, tiers: Mapping[str, int]) -> None:
        """Take blocks of the prompt from elsewhere, those after the blocks that it has.

        Args:
            contents: The bytes of the blocks.
            source: The kind of place that they came from.
            origin: The worker or store node that gave them.
            tiers: The number of blocks by tier of the store; empty: no tiers.
        """
        for content in contents:
            name = self.reusable_names[len(self.names)]
            index = self._take_block()
            self._shape.memory.view(index)[:] = content
            self._shape.memory.publish(index, name)
            self._complete(name, index)
        self.computed = len(self.names) * self._shape.block_tokens
        if contents:
            size = len(contents[0])
            self.fetched = tuple(
                KvOrigin(source=source, origin=origin, blocks=blocks, bytes=blocks * size, tier=tier)
                for tier, blocks in (tiers or {"": len(contents)}).items()
            )

    def compute(self, num_tokens: int) -> list[tuple[BlockHash, BlockIndex]]:
        """Compute KV of the next tokens; return the blocks that became full."""
        assert self.computed + num_tokens <= len(self._tokens) // TOKEN_BYTES
        self.computed += num_tokens
        while len(self.blocks) < block.blocks_for(self.computed, self._shape.block_tokens):
            self._take_block()
        filled = []
        while (len(self.names) + 1) * self._shape.block_tokens <= self.computed:
            filled.append(self._fill())
        return filled

    def sample(self) -> SequenceSample:
        """Sample the next token and append it, when KV exists for all tokens so far."""
        sampling = self.start.sampling
        assert self.computed == len(self._tokens) // TOKEN_BYTES
        may_end = not sampling.ignore_eos and self.generated >= sampling.min_tokens
        drawn = self._shape.model.draw(
            self._digest, self._tokens[len(self.names) * self._block_bytes :], sampling, may_end=may_end
        )
        self._tokens += drawn.token.to_bytes(TOKEN_BYTES, "little")
        self.generated += 1
        logprobs: tuple[Logprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (self._shape.model.logprobs(drawn.token, sampling.logprobs),)
        stops = drawn.token in sampling.stop_token_ids and self.generated >= sampling.min_tokens
        finish = None
        if drawn.ends or stops:
            finish = Finish.STOP
        elif self.generated >= self.answer_tokens:
            finish = Finish.LENGTH
        return SequenceSample(token=drawn.token, logprobs=logprobs, finish=finish)

    def release(self) -> None:
        """Release its blocks and its reservation."""
        self.stage = SequenceStage.ENDED
        self._shape.memory.release(self.blocks)
        self.blocks = []
        self.reserve = 0

    def report(self) -> KvReport:
        """Return where the prompt's blocks came from."""
        total = block.blocks_for(self.prompt_tokens, self._shape.block_tokens)
        fetched = sum(origin.blocks for origin in self.fetched)
        origins = [
            KvOrigin(source=Source.ENGINE, blocks=self._hits),
            *self.fetched,
            KvOrigin(source=Source.COMPUTED, blocks=total - self._hits - fetched),
        ]
        return KvReport(
            prompt_blocks=total,
            origins=tuple(origin for origin in origins if origin.blocks),
            cached_tokens=(self._hits + fetched) * self._shape.block_tokens,
        )

    def _fill(self) -> tuple[BlockHash, BlockIndex]:
        """Compute the bytes of the next full block."""
        shape = self._shape
        position = len(self.names)
        tokens = self._tokens[position * self._block_bytes : (position + 1) * self._block_bytes]
        if position < len(self.prompt_names):
            name = self.prompt_names[position]
        else:
            parent = self.names[-1] if self.names else block.root(self.start.salt)
            (name,) = block.extend(parent, bytes(tokens), shape.block_tokens)
        index = self.blocks[position]
        shape.memory.view(index)[:] = shape.layout.lay_out(shape.model.compute(self._digest, tokens))
        shape.memory.publish(index, name)
        self._complete(name, index)
        return name, index

    def _complete(self, name: BlockHash, index: BlockIndex) -> None:
        """Add a block to the context; the bytes that it really holds decide what follows."""
        self.names.append(name)
        values = self._shape.layout.values(self._shape.memory.view(index))
        self._digest = self._shape.model.read(self._digest, values)

    def _take_block(self) -> BlockIndex:
        assert self.reserve > 0, "admission reserved enough"
        self.reserve -= 1
        index = self._shape.memory.allocate()
        self.blocks.append(index)
        return index
