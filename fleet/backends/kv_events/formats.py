"""KV event formats: decodes the events that engines publish about their prefix caches (SGLang, and vLLM's two formats).

Rules:

1. A message has three frames: a topic, a batch number of 8 bytes that begins at 0 and grows by one, and a batch in
   MessagePack: ``[time, events, rank]``. Sources: vLLM's `distributed/kv_events.py` (0.32), SGLang's
   `disaggregation/kv_events.py` (0.5.23).
2. An event is a map with its kind under ``type``. Before vLLM 0.12 and SGLang 0.5.20, it is an array that begins with
   the kind and continues with the fields in the order of `POSITIONAL`. Unknown kinds and fields are skipped, because a
   newer engine may send more.
3. If a known kind lacks fields or has fields of other types, `UnreadableEngineEvent` is raised, because its meaning
   cannot be guessed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

EngineHash = int | bytes
"""An engine's own hash of a block, which has no meaning outside the engine."""

POSITIONAL: Mapping[str, Sequence[str]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class UnreadableEngineEvent(ValueError):
    """Error: a message of an engine breaks the rules of this module. The text names the message and what is wrong."""


class BlocksStored(Struct, frozen=True):
    """Event: the engine has stored these consecutive blocks of one chain in its cache."""

    hashes: list[EngineHash] = field(name="block_hashes")
    parent: EngineHash | None = field(name="parent_block_hash")
    # Token ids, or pairs of them if SGLang uses bigrams for speculative decoding.
    tokens: list[Any] = field(name="token_ids")
    block_tokens: int = field(name="block_size")
    adapter_number: int | None = field(name="lora_id", default=None)
    medium: str | None = None
    adapter: str | None = field(name="lora_name", default=None)
    # For each block, the inputs of its hash besides tokens, such as a salt (vLLM). None: no block has such inputs.
    extra_keys: list[list[Any] | None] | None = None
    # The number of the group of layers that the blocks belong to (vLLM). None: the engine has no groups.
    group: int | None = field(name="group_idx", default=None)
    # The kind of attention in the group of layers `group` (vLLM). None: the engine does not say it.
    attention: str | None = field(name="kv_cache_spec_kind", default=None)
    # The salt of the chain (SGLang). None: there is none, or vLLM says it in `extra_keys`.
    salt: str | None = field(name="cache_salt", default=None)


class BlocksRemoved(Struct, frozen=True):
    """Event: the engine has removed one copy of each of these blocks from its cache."""

    hashes: list[EngineHash] = field(name="block_hashes")
    medium: str | None = None
    group: int | None = field(name="group_idx", default=None)


class BlocksCleared(Struct, frozen=True):
    """Event: the engine has removed all blocks from its cache."""


EngineEvent = BlocksStored | BlocksRemoved | BlocksCleared

_KINDS: Mapping[str, type[BlocksStored] | type[BlocksRemoved] | type[BlocksCleared]] = {
    "BlockStored": BlocksStored,
    "BlockRemoved": BlocksRemoved,
    "AllBlocksCleared": BlocksCleared,
}


def decode(payload: bytes) -> list[EngineEvent]:
    """Return the events of one batch, in order.

    Raises:
        UnreadableEngineEvent: The batch or one of its events breaks a rule of this module.
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
