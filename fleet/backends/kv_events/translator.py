"""KV event translator: turns an engine's published cache events into events with the block hashes of `kvstore.block`.

Rules:

1. Engines name blocks by hashes that have no meaning outside the process. The translator computes the block hash of a
   stored block from its parent, its tokens and the salt of its chain. The first block of the chain states the salt.
2. A cache may contain equal blocks twice, under one engine hash or several. A block hash is removed when its last copy
   is removed.
3. To follow a block means to report it to the router under its block hash. The translator only follows whole blocks in
   the engine's own memory. Their contents must depend on nothing but tokens, a LoRA adapter's name and a salt, because
   Fleet's block hashes contain nothing else. Blocks that also depend on images or embeddings are skipped, with all blocks
   after them; `passed_over` counts them by reason. The blocks of text before them are followed.
4. If an engine groups its layers by kind of attention, the first group with full attention is followed. Groups that
   keep only a part of a chain (sliding window, chunks) or a state (Mamba) are skipped. If such a group loses a prefix
   that the followed group still has, the router believes that the prefix is cached, but the engine computes it again.
5. If more blocks are followed than the engine can hold, events of removed blocks were lost, and the translator starts
   again with an empty cache.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, assert_never

import msgspec
import numpy as np

from fleet.backends.kv_events.formats import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    UnreadableEngineEvent,
    decode,
)
from fleet.core.work import KvCleared, KvEvent, KvRemoved, KvStored
from kvstore import block
from kvstore.block import SALT_BYTES, BlockHash, HashAlgorithm

log = logging.getLogger(__name__)

FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""vLLM's kinds of attention whose blocks cover the whole chain."""

OWN_MEMORY = frozenset({None, "GPU"})


class SkipReason(StrEnum):
    """Reasons why the translator does not report a published block to the router (rules 3 and 4)."""

    OTHER_BLOCK_SIZE = "other_block_size"  # the block's number of tokens differs from the router's block size
    PART_OF_A_BLOCK = "part_of_a_block"
    OTHER_TIER = "other_tier"
    OTHER_GROUP = "other_group"  # the block belongs to a group with full attention that is not followed (rule 4)
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_ATTENTION = "chunked_attention"
    MAMBA = "mamba"
    OTHER_ATTENTION = "other_attention"  # the kind of attention is that of an encoder, or is unknown
    NAMELESS_ADAPTER = "nameless_adapter"  # the block's LoRA adapter has only a number and no name
    NOT_ONLY_TOKENS = "not_only_tokens"
    UNKNOWN_PARENT = "unknown_parent"  # the previous block was skipped, or was stored before the router listened


ATTENTION = {
    "sliding_window": SkipReason.SLIDING_WINDOW,
    "sliding_window_mla": SkipReason.SLIDING_WINDOW,
    "chunked_local_attention": SkipReason.CHUNKED_ATTENTION,
    "mamba": SkipReason.MAMBA,
}

SaltOf = Callable[[str, str], bytes]
"""Function that computes the salt of a chain from the name of its LoRA adapter and the salt that the engine reports.

The name and the salt are empty if the chain has none.

Raises:
    ValueError: No chain of a router can have such a salt."""


def salt_of_router(adapter: str, salt_text: str) -> bytes:
    """Return the salt of a chain.

    `salt_text` is the salt in hexadecimal. The router gave it to the engine, and it already covers the LoRA adapter.

    Raises:
        ValueError: The text is not a router's salt, or it is empty although the chain has a LoRA adapter.
    """
    salt = bytes.fromhex(salt_text)
    if len(salt) != (SALT_BYTES if salt_text or adapter else 0):
        raise ValueError("this is not a router's salt")
    return salt


class _CachedBlock(msgspec.Struct):
    name: BlockHash
    copies: int


class KvEventTranslator:
    """Translates the published cache events of one engine. The cache counts as empty at first."""

    def __init__(
        self,
        *,
        block_tokens: int,
        algorithm: HashAlgorithm,
        capacity: int,
        salt_of: SaltOf = salt_of_router,
    ):
        """Create a translator that knows no blocks.

        Args:
            block_tokens: Number of tokens in a block of the router. Published blocks of other sizes are skipped.
            algorithm: Hash algorithm of the block hashes.
            capacity: Number of blocks that the engine can hold (rule 5).
            salt_of: Computes the salt of a chain.
        """
        self._block_tokens = block_tokens
        self._algorithm = algorithm
        self._capacity = capacity
        self._salt_of = salt_of
        self._held: dict[EngineHash, _CachedBlock] = {}
        # For each block hash, the number of engine hashes in `_held` that stand for it: several if the engine
        # distinguishes blocks that are equal for Fleet.
        self._hashes: dict[BlockHash, int] = {}
        # Number of the followed group of layers; None: none is chosen yet, or the engine has no groups.
        self._main: int | None = None
        self._knows_main = False
        # Number of published blocks that were followed since the translator was created (rule 3). Copies count, and
        # removals do not lower the number.
        self.followed = 0
        # Number of skipped blocks since the translator was created, by reason.
        self.passed_over: Counter[SkipReason] = Counter()
        self.published_block_tokens = 0  # tokens in the latest block that was skipped because of its size

    def __len__(self) -> int:
        return len(self._held)

    def take(self, payload: bytes) -> list[KvEvent]:
        """Translate one published batch, and return its events with block hashes, in order.

        If the engine cannot hold so many blocks, return only the event that clears the cache (rule 5).

        Raises:
            UnreadableEngineEvent: The batch follows no known format. The state is then incomplete and must be
                cleared.
        """
        events: list[KvEvent] = []
        for published in decode(payload):
            match published:
                case BlocksStored():
                    if names := self._stored(published):
                        events.append(KvStored(tuple(names)))
                case BlocksRemoved():
                    if names := self._removed(published):
                        events.append(KvRemoved(tuple(names)))
                case BlocksCleared():
                    events.append(self.clear())
                case _:
                    assert_never(published)
        if len(self._held) > self._capacity:
            log.warning("kv events exceed engine capacity, starting over", extra={"blocks": len(self._held)})
            return [self.clear()]
        return events

    def clear(self) -> KvCleared:
        self._held.clear()
        self._hashes.clear()
        return KvCleared()

    def _stored(self, event: BlocksStored) -> list[BlockHash]:
        if (why := self._unfit(event)) is not None:
            self.passed_over[why] += len(event.hashes)
            return []
        names = self._names(event)
        if isinstance(names, SkipReason):
            self.passed_over[names] += len(event.hashes)
            return []
        if len(names) < len(event.hashes):
            self.passed_over[SkipReason.NOT_ONLY_TOKENS] += len(event.hashes) - len(names)
        self.followed += len(names)
        new = []
        for engine_hash, name in zip(event.hashes, names, strict=False):
            held = self._held.get(engine_hash)
            if held is None:
                self._held[engine_hash] = _CachedBlock(name, 1)
                others = self._hashes.get(name, 0)
                self._hashes[name] = others + 1
                if not others:
                    new.append(name)
            else:
                held.copies += 1
        return new

    def _unfit(self, event: BlocksStored) -> SkipReason | None:
        """Return why the blocks of an event are not followed; None if they are followed, provided that `_names` can name them."""
        if event.medium not in OWN_MEMORY:
            return SkipReason.OTHER_TIER
        if event.attention not in FULL_ATTENTION and event.attention is not None:
            return ATTENTION.get(event.attention, SkipReason.OTHER_ATTENTION)
        if event.block_tokens != self._block_tokens:
            if self.followed and event.block_tokens < self._block_tokens:
                return SkipReason.PART_OF_A_BLOCK
            self.published_block_tokens = event.block_tokens
            return SkipReason.OTHER_BLOCK_SIZE
        if not self._knows_main:
            self._main, self._knows_main = event.group, True
        if event.group != self._main:
            return SkipReason.OTHER_GROUP
        if event.adapter_number is not None and not event.adapter:
            return SkipReason.NAMELESS_ADAPTER
        return None

    def _names(self, event: BlocksStored) -> list[BlockHash] | SkipReason:
        """Return the block hashes of an event's blocks in order, or the reason why they cannot be named.

        The first block with an image and all blocks after it are left out, because only the engine knows the image's key.

        Raises:
            UnreadableEngineEvent: The event has too few or too many tokens or extra keys, or something else in place of token ids.
        """
        extra_keys = event.extra_keys or [None] * len(event.hashes)
        if len(extra_keys) != len(event.hashes):
            raise UnreadableEngineEvent(f"BlockStored: {len(event.hashes)} blocks, extra keys of {len(extra_keys)}")
        first, *others = [_without_adapter(keys, event.adapter) for keys in extra_keys] or [[]]
        if first and event.parent is not None:
            return SkipReason.NOT_ONLY_TOKENS
        named = next((index for index, keys in enumerate(others, 1) if keys), len(extra_keys))
        parent = self._parent(event, first)
        if isinstance(parent, SkipReason):
            return parent
        try:
            tokens = np.array(event.tokens, dtype="<u4")
        except (OverflowError, TypeError, ValueError) as error:
            raise UnreadableEngineEvent(f"BlockStored: token_ids: {error}") from error
        if tokens.ndim != 1:
            return SkipReason.NOT_ONLY_TOKENS  # SGLang's pairs of token ids (`BlocksStored.tokens`)
        if tokens.size != len(event.hashes) * self._block_tokens:
            raise UnreadableEngineEvent(
                f"BlockStored: {len(event.hashes)} blocks of {self._block_tokens}, {tokens.size} tokens"
            )
        text = tokens[: named * self._block_tokens]
        return block.extend(parent, text.tobytes(), self._block_tokens, algorithm=self._algorithm)

    def _parent(self, event: BlocksStored, first_keys: Sequence[Any]) -> BlockHash | SkipReason:
        """Return the parent hash of an event's first block: the hash of the previous block, or the root of the chain.

        If this hash is not known, return a reason instead.
        """
        if event.parent is not None:
            held = self._held.get(event.parent)
            return SkipReason.UNKNOWN_PARENT if held is None else held.name
        match first_keys:
            case []:
                salt_text = event.salt or ""
            case [str(salt_text)]:
                pass
            case _:
                return SkipReason.NOT_ONLY_TOKENS
        try:
            return block.root(self._salt_of(event.adapter or "", salt_text), self._algorithm)
        except ValueError:
            return SkipReason.NOT_ONLY_TOKENS

    def _removed(self, event: BlocksRemoved) -> list[BlockHash]:
        if event.medium not in OWN_MEMORY or event.group not in (None, self._main):
            return []
        gone = []
        for engine_hash in event.hashes:
            held = self._held.get(engine_hash)
            if held is None:
                continue
            held.copies -= 1
            if held.copies == 0:
                del self._held[engine_hash]
                if others := self._hashes.pop(held.name) - 1:
                    self._hashes[held.name] = others
                else:
                    gone.append(held.name)
        return gone


def _without_adapter(keys: list[Any] | None, adapter: str | None) -> list[Any]:
    """Return a block's extra keys without the LoRA adapter's name, which vLLM puts first in the list."""
    if not keys:
        return []
    return keys[1:] if adapter and keys[0] == adapter else keys
