"""Block names of simulated requests: prompts with a length and block keys but without tokens, and names for answer blocks.

A trace names only the blocks of prompts. The next prompt of a conversation has all blocks of the prompt before it, followed by
blocks that contain the rest of that prompt and its answer. The trace does not name these blocks at the time of the answer. So:

1. `AnswerBlockNames` creates new names for the blocks of an answer. When a later prompt continues the conversation, the names that
   the trace gives these blocks are translated into the created names, in this prompt and in all later ones.
2. A prompt B continues a prompt A if B has all full blocks of A, is at least as long as A with its answer, and belongs to the same
   session if sessions are known. The last full block of A must have been new when A arrived; otherwise the block may belong to a
   system prompt that A and B share.
3. At most `REMEMBERED` prompts and as many names are remembered; the oldest are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Self

from msgspec import Struct

from fleet.core.requests import TOKEN_BYTES, TokenBytes
from fleet.router.kv_index.prefix_index import KEY_BYTES
from kvstore.block import HASH_BYTES
from kvstore.eviction.trace_replay import TraceRequest

REMEMBERED = 1 << 18
FIRST_OWN_NAME = 1 << 63  # Created names start here; the names in traces are smaller.


class BlankTokens(bytes):
    """Placeholder for the token ids of a prompt: it has a length in bytes and block keys by block size, but stores no tokens."""

    _length: int
    keys: Mapping[int, tuple[int, ...]]

    def __new__(cls, tokens: int, keys: Mapping[int, tuple[int, ...]]) -> Self:
        blank = super().__new__(cls)
        blank._length = TOKEN_BYTES * tokens
        blank.keys = keys
        return blank

    def __len__(self) -> int:
        return self._length

    # Called by the router when another worker continues an answer: it appends the generated tokens to the prompt.
    def __add__(self, more: Any) -> Self:
        return type(self)((self._length + memoryview(more).nbytes) // TOKEN_BYTES, self.keys)


def keys_of(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:  # noqa: ARG001 - a `Hasher`
    """Return the block keys of a prompt. Blocks that generated tokens fill have none, because no other prompt has them."""
    assert isinstance(tokens, BlankTokens)
    return tokens.keys[block_tokens]


def hashes_of(keys: Iterable[int]) -> tuple[bytes, ...]:
    """Return block hashes whose first bytes are these block keys, which is the only part that a router reads; the rest is zero."""
    return tuple([key.to_bytes(KEY_BYTES, "little").ljust(HASH_BYTES, b"\0") for key in keys])


class _AnsweredPrompt(Struct, frozen=True, gc=False):
    blocks: int  # number of full blocks of the prompt
    tokens: int  # number of tokens of the prompt and its answer
    answer: tuple[int, ...]  # names of the blocks that the answer fills
    session: int


class AnswerBlockNames:
    """Creates names for the blocks of answers, and translates the trace's names of these blocks (rules 1 to 3)."""

    def __init__(self, block_tokens: int, remembered: int = REMEMBERED):
        self._block_tokens = block_tokens
        self._remembered = remembered
        # the key is the trace's name of the prompt's last full block
        self._answered: OrderedDict[int, _AnsweredPrompt] = OrderedDict()
        # block names of earlier prompts, in the order of their last use
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._own_names: OrderedDict[int, int] = OrderedDict()  # from a name in the trace to the created name
        self._next = FIRST_OWN_NAME

    def named(self, request: TraceRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the names of a prompt's full blocks, and of the blocks that its answer will fill."""
        size = self._block_tokens
        blocks = request.prompt_tokens // size
        traced = request.chain[:blocks]
        self._learn(request, traced)
        own = self._own_names
        chain = tuple([own.get(name, name) for name in traced]) if own else traced
        tokens = request.prompt_tokens + request.output_tokens
        # minus 1, because an engine never computes the KV of the last token
        count = max(0, (tokens - 1) // size - blocks)
        answer = tuple(range(self._next, self._next + count))
        self._next += count
        if count and len(chain) == blocks and blocks and traced[-1] not in self._seen:
            self._answered[traced[-1]] = _AnsweredPrompt(blocks, tokens, answer, request.session)
        self._seen.update(dict.fromkeys(traced))
        self._forget()
        return chain, answer

    def _learn(self, request: TraceRequest, traced: tuple[int, ...]) -> None:
        """If this prompt continues an answered prompt, map its names for the answer's blocks to the created names."""
        for name in reversed(traced):
            before = self._answered.get(name)
            if before is None:
                continue
            if before.tokens <= request.prompt_tokens and before.session == request.session:
                names = traced[before.blocks : before.blocks + len(before.answer)]
                self._own_names.update(zip(names, before.answer, strict=False))
            # Each answered prompt is matched once: a later prompt extends this longer prompt, or has another answer to it.
            del self._answered[name]
            return

    def _forget(self) -> None:
        for known in (self._answered, self._seen, self._own_names):
            while len(known) > self._remembered:
                known.popitem(last=False)
