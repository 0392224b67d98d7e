"""Block names of simulated requests.

The prompt of a simulated request has a length and block keys, but no tokens. The blocks of its answer get names, too.

A trace names only the blocks of prompts. The next prompt of a conversation begins with all full blocks of the previous
prompt. The blocks after these contain the end of the previous prompt, and its answer. The trace names these blocks only
in the next prompt. But an engine caches them as soon as the answer ends, so the simulation needs names for them at that
time:

1. `AnswerBlockNames` creates new names for the blocks of an answer. A later prompt may continue the conversation. In this prompt and in
   all later ones, the names that the trace gives these blocks are then translated into the created names.
2. A prompt B continues a prompt A under these conditions: B begins with all full blocks of A. B is at least as long as
   A and its answer together. Both belong to the same session (or to none). The last full block of A was new when A
   arrived; otherwise the block may belong to a system prompt that A and B share.
3. At most `REMEMBERED` prompts, names of the trace, and translations of names are remembered each; the oldest are forgotten first.
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
FIRST_OWN_NAME = 1 << 63  # the first block name that this module creates; all block names in traces are smaller numbers


class BlankTokens(bytes):
    """Stands for the token ids of a prompt.

    The object has the length in bytes of these ids, and the block keys for each block size, but no token ids.
    """

    _length: int
    keys: Mapping[int, tuple[int, ...]]

    def __new__(cls, tokens: int, keys: Mapping[int, tuple[int, ...]]) -> Self:
        blank = super().__new__(cls)
        blank._length = TOKEN_BYTES * tokens
        blank.keys = keys
        return blank

    def __len__(self) -> int:
        return self._length

    # The router calls this when another worker continues an answer: the new prompt is the old one, followed by the generated tokens.
    def __add__(self, more: Any) -> Self:
        return type(self)((self._length + memoryview(more).nbytes) // TOKEN_BYTES, self.keys)


def keys_of(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:  # noqa: ARG001 - signature of a `PromptHasher`
    """Return the block keys of a prompt. If the prompt ends with tokens of an interrupted answer, the blocks with these tokens get none."""
    assert isinstance(tokens, BlankTokens)
    return tokens.keys[block_tokens]


def hashes_of(keys: Iterable[int]) -> tuple[bytes, ...]:
    """Return block hashes whose first 8 bytes are these block keys.

    The other bytes are zero, because a router reads only the keys.
    """
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
        # answered prompts; the key is the name that the trace gives the prompt's last full block
        self._answered: OrderedDict[int, _AnsweredPrompt] = OrderedDict()
        # block names that the trace used in earlier prompts, in the order of their first use
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._own_names: OrderedDict[int, int] = OrderedDict()  # maps a block's name in the trace to the created name
        self._next = FIRST_OWN_NAME

    def named(self, request: TraceRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return two tuples: the names of a prompt's full blocks, and the names of the blocks that its answer will fill."""
        size = self._block_tokens
        blocks = request.prompt_tokens // size
        traced = request.chain[:blocks]
        self._learn(request, traced)
        own = self._own_names
        chain = tuple([own.get(name, name) for name in traced]) if own else traced
        tokens = request.prompt_tokens + request.output_tokens
        # minus 1, because an engine never computes the KV of an answer's last token
        count = max(0, (tokens - 1) // size - blocks)
        answer = tuple(range(self._next, self._next + count))
        self._next += count
        if count and len(chain) == blocks and blocks and traced[-1] not in self._seen:
            self._answered[traced[-1]] = _AnsweredPrompt(blocks, tokens, answer, request.session)
        self._seen.update(dict.fromkeys(traced))
        self._forget()
        return chain, answer

    def _learn(self, request: TraceRequest, traced: tuple[int, ...]) -> None:
        """If this prompt continues an answered prompt, map the trace's names of the answer's blocks to the created names."""
        for name in reversed(traced):
            before = self._answered.get(name)
            if before is None:
                continue
            if before.tokens <= request.prompt_tokens and before.session == request.session:
                names = traced[before.blocks : before.blocks + len(before.answer)]
                self._own_names.update(zip(names, before.answer, strict=False))
            # Each answered prompt is matched at most once. The next prompts of the conversation continue the present prompt.
            del self._answered[name]
            return

    def _forget(self) -> None:
        for known in (self._answered, self._seen, self._own_names):
            while len(known) > self._remembered:
                known.popitem(last=False)
