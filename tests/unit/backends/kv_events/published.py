"""Published KV events for tests: recorded streams, and made-up events that the engines' schemas allow."""

import json
from pathlib import Path

import msgspec

from fleet.backends.kv_events.translator import KvEventTranslator
from kvstore.block import HashAlgorithm, chain
from tests.support.builders import token_bytes

BLOCK_TOKENS = 32
PAGE_TOKENS = 16
SALT = b"\xab" * 32


def recorded(file: str) -> dict:
    return json.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


VLLM = [bytes.fromhex(batch) for batch in recorded("vllm_kv_events.json")["batches"]]
SGLANG = [bytes.fromhex(payload) for _, _, payload in recorded("sglang_kv_events.json")["messages"]]


def some_books(capacity: int = 10, block_tokens: int = BLOCK_TOKENS, **options) -> KvEventTranslator:
    return KvEventTranslator(
        block_tokens=block_tokens, algorithm=HashAlgorithm.SHA256_128, capacity=capacity, **options
    )


def names(first: int, last: int, salt: bytes = b"", block_tokens: int = BLOCK_TOKENS) -> tuple[bytes, ...]:
    """Return the block hashes of the full blocks of the token ids from `first` to `last` - 1."""
    return tuple(chain(token_bytes(range(first, last)), block_tokens, salt=salt))


def a_batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


def stored(hashes, parent, first: int, last: int, **fields) -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(first, last)),
        "block_size": BLOCK_TOKENS,
        "medium": "GPU",
        **fields,
    }


def removed(*hashes, **fields) -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields}


def of_group(group: int, attention: str | None, hashes, parent, first: int, last: int, **fields) -> dict:
    return stored(
        hashes,
        parent,
        first,
        last,
        group_idx=group,
        **({"kv_cache_spec_kind": attention} if attention else {}),
        **fields,
    )
