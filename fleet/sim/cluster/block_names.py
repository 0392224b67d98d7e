"""Block names of simulated requests: prompts that have a length and block keys but no tokens, and names for answer blocks.

A trace names the blocks of prompts only. The next prompt of a conversation has all blocks of the prompt before it, and then
blocks that the rest of that prompt and its answer fill; nobody knew the names of these while the answer was generated. So:

1. `AnswerBlockNames` gives the blocks of an answer names of its own. When a prompt continues that conversation, its names for
   these blocks are translated into the given names, in this and every later prompt.
2. A prompt continues another prompt if it has all its full blocks, is at least as long as that prompt with its answer, and belongs
   to the same session where sessions are known. The last of these blocks must have been new in the other prompt; otherwise it may
   belong to a system prompt that both share.
3. `REMEMBERED` prompts and as many names are remembered; the oldest are forgotten first.
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
FIRST_OWN_NAME = 1 << 63  # names of traces are below


class BlankTokens(bytes):
    """Token ids that nobody reads: they have the length of a prompt without its memory, and its block keys by block size."""

    _length: int
    keys: Mapping[int, tuple[int, ...]]

    def __new__(cls, tokens: int, keys: Mapping[int, tuple[int, ...]]) -> Self:
        blank = super().__new__(cls)
        blank._length = TOKEN_BYTES * tokens
        blank.keys = keys
        return blank

    def __len__(self) -> int:
        return self._length

    def __add__(self, more: Any) -> Self:  # the router adds the generated tokens when another worker continues
        return type(self)((self._length + memoryview(more).nbytes) // TOKEN_BYTES, self.keys)


def keys_of(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:  # noqa: ARG001 - a `Hasher`
    """Return the block keys of a prompt. Blocks that generated tokens fill have none, because no other prompt has them."""
    assert isinstance(tokens, BlankTokens)
    return tokens.keys[block_tokens]


def hashes_of(keys: Iterable[int]) -> tuple[bytes, ...]:
    """Return block hashes with these block keys; a router reads no other part of them."""
    return tuple([key.to_bytes(KEY_BYTES, "little").ljust(HASH_BYTES, b"\0") for key in keys])


class _AnsweredPrompt(Struct, frozen=True, gc=False):
    blocks: int  # full blocks of the prompt
    tokens: int  # of prompt and answer
    answer: tuple[int, ...]  # names of the blocks that the answer fills
    session: int


class AnswerBlockNames:
    """The answer blocks of all conversations."""

    def __init__(self, block_tokens: int, remembered: int = REMEMBERED):
        self._block_tokens = block_tokens
        self._remembered = remembered
        self._answered: OrderedDict[int, _AnsweredPrompt] = OrderedDict()  # by the name of the prompt's last full block
        self._seen: OrderedDict[int, None] = OrderedDict()  # blocks of prompts
        self._own_names: OrderedDict[int, int] = OrderedDict()  # the trace's name -> the given name
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
        count = max(0, (tokens - 1) // size - blocks)  # the last token's KV is never computed
        answer = tuple(range(self._next, self._next + count))
        self._next += count
        if count and len(chain) == blocks and blocks and traced[-1] not in self._seen:
            self._answered[traced[-1]] = _AnsweredPrompt(blocks, tokens, answer, request.session)
        self._seen.update(dict.fromkeys(traced))
        self._forget()
        return chain, answer

    def _learn(self, request: TraceRequest, traced: tuple[int, ...]) -> None:
        """Learn the trace's names for the blocks of the answer that this prompt repeats."""
        for name in reversed(traced):
            before = self._answered.get(name)
            if before is None:
                continue
            if before.tokens <= request.prompt_tokens and before.session == request.session:
                names = traced[before.blocks : before.blocks + len(before.answer)]
                self._own_names.update(zip(names, before.answer, strict=False))
            del self._answered[name]  # later prompts continue this one, or regenerate the answer
            return

    def _forget(self) -> None:
        for known in (self._answered, self._seen, self._own_names):
            while len(known) > self._remembered:
                known.popitem(last=False)
