"""KV event formats: decodes what engines publish about their prefix caches, vLLM in both of its encodings, and SGLang.

Rules:

1. A message has three frames: a topic, a number in 8 bytes that grows by one with each batch from 0, and a batch in
   MessagePack: ``[time, events, rank]``. Sources: vLLM's `distributed/kv_events.py` (0.32), SGLang's
   `disaggregation/kv_events.py` (0.5.23).
2. An event is a map with its kind under ``type``, or (vLLM before 0.12, SGLang before 0.5.20) an array that begins
   with its kind and has its fields in the order of `POSITIONAL`. Unknown kinds and fields are skipped, because a
   newer engine may send more.
3. A known kind with missing fields or fields of other types raises `UnreadableEngineEvent`, because its meaning
   cannot be guessed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

EngineHash = int | bytes
"""An engine's own hash of a block, which means nothing outside the engine."""

POSITIONAL: Mapping[str, Sequence[str]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class UnreadableEngineEvent(ValueError):
    """A message that does not follow these rules; the text says which message and how."""


class BlocksStored(Struct, frozen=True):
    """Blocks of one chain that are in a cache from now on."""

    hashes: list[EngineHash] = field(name="block_hashes")
    parent: EngineHash | None = field(name="parent_block_hash")
    tokens: list[Any] = field(name="token_ids")  # integers, or pairs of them if SGLang drafts by bigrams
    block_tokens: int = field(name="block_size")
    adapter_number: int | None = field(name="lora_id", default=None)
    medium: str | None = None
    adapter: str | None = field(name="lora_name", default=None)
    extra_keys: list[list[Any] | None] | None = None  # by block: other inputs of its hash (vLLM)
    group: int | None = field(name="group_idx", default=None)  # the group of layers (vLLM)
    attention: str | None = field(name="kv_cache_spec_kind", default=None)  # the attention of that group
    salt: str | None = field(name="cache_salt", default=None)  # the salt of the chain (SGLang)


class BlocksRemoved(Struct, frozen=True):
    """Blocks of which the cache holds one copy less."""

    hashes: list[EngineHash] = field(name="block_hashes")
    medium: str | None = None
    group: int | None = field(name="group_idx", default=None)


class BlocksCleared(Struct, frozen=True):
    """The cache is empty."""


EngineEvent = BlocksStored | BlocksRemoved | BlocksCleared

_KINDS: Mapping[str, type[BlocksStored] | type[BlocksRemoved] | type[BlocksCleared]] = {
    "BlockStored": BlocksStored,
    "BlockRemoved": BlocksRemoved,
    "AllBlocksCleared": BlocksCleared,
}


def decode(payload: bytes) -> list[EngineEvent]:
    """Return the events of one batch, in order.

    Raises:
        UnreadableEngineEvent: The batch breaks rule 3.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableEngineEvent(f"a batch is not MessagePack: {error}") from error
    match batch:
        case [_, [*events], *_]:
            return [known for event in events if (known := _event(event)) is not None]
        case _:
            raise UnreadableEngineEvent("a batch is not an array of a time and events")


def _event(published: object) -> EngineEvent | None:
    match published:
        case {"type": str(kind)}:
            fields = published
        case [str(kind), *values]:
            fields = dict(zip(POSITIONAL.get(kind, ()), values, strict=False))
        case _:
            raise UnreadableEngineEvent("an event is neither a map with a type nor an array that begins with one")
    if (known := _KINDS.get(kind)) is None:
        return None
    try:
        return msgspec.convert(fields, known)
    except msgspec.ValidationError as error:
        raise UnreadableEngineEvent(f"{kind}: {error}") from error
