"""vLLM's KV events as ours: what the engine's prefix cache holds, under the names of `kvstore.block`.

Rules:

1. vLLM names blocks by its own hashes, which mean nothing outside that process. A stored block is named here from its
   parent, its tokens and the salt of its chain; the first block of a chain carries the salt among its extra keys.
2. Equal blocks may be in the cache twice: a name is gone when its last copy is.
3. Only whole blocks in the engine's own memory count, and only those that our chain can name: blocks of adapters or
   with inputs that are not tokens, and everything after them, are left out.
4. Batches are numbered from 0. A gap is filled from the publisher's replay socket; when that fails, everything known is
   void (`KvCleared`) and counting starts again with what comes.
5. The books are bounded by what the engine can hold; more means that removals were lost, and rule 4's end applies.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from fleet.work import KvCleared, KvEvent, KvRemoved, KvStored
from kvstore import block
from kvstore.block import SALT_BYTES, ChainHash, HashAlgorithm

log = logging.getLogger(__name__)

EngineHash = int | bytes

REPLAY_TIMEOUT_SECONDS = 2.0  # the publisher looks at its replay socket every 0.1 s
RECEIVE_BATCHES = 100_000  # buffered here at most, as many as the publisher keeps

END_OF_REPLAY = b"\xff" * 8

STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx"),
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
POSITIONAL = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS, "AllBlocksCleared": ()}


class _Held(msgspec.Struct):
    name: ChainHash
    copies: int


class Translator:
    """Books of one engine's prefix cache, from empty on."""

    def __init__(self, *, block_tokens: int, algorithm: HashAlgorithm, capacity: int):
        """Start with an empty cache.

        Args:
            block_tokens: Tokens a block.
            algorithm: Of the chain hashes.
            capacity: Blocks that the engine can hold.
        """
        self._block_tokens = block_tokens
        self._algorithm = algorithm
        self._capacity = capacity
        self._held: dict[EngineHash, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def translate(self, payload: bytes) -> list[KvEvent]:
        """Our events for one published batch, in its order.

        Raises:
            msgspec.DecodeError: Not msgpack.
        """
        batch = msgspec.msgpack.decode(payload)
        events: list[KvEvent] = []
        for published in batch[1]:
            kind, fields = _fields(published)
            match kind:
                case "BlockStored":
                    names = self._stored(fields)
                    if names:
                        events.append(KvStored(tuple(names)))
                case "BlockRemoved":
                    names = self._removed(fields)
                    if names:
                        events.append(KvRemoved(tuple(names)))
                case "AllBlocksCleared":
                    events.append(self.clear())
                case _:
                    log.debug("unknown KV event", extra={"kind": kind})
        if len(self._held) > self._capacity:
            log.warning("more blocks reported than the engine holds; starting over", extra={"blocks": len(self._held)})
            return [self.clear()]
        return events

    def clear(self) -> KvCleared:
        self._held.clear()
        return KvCleared()

    def _stored(self, fields: Mapping[str, Any]) -> list[ChainHash]:
        if fields.get("medium") not in (None, "GPU") or fields.get("lora_name") or fields.get("lora_id") is not None:
            return []
        if fields["block_size"] != self._block_tokens:
            return []  # part of a block
        hashes: Sequence[EngineHash] = fields["block_hashes"]
        extra_keys = fields.get("extra_keys") or [None] * len(hashes)
        parent = self._parent(fields["parent_block_hash"], extra_keys[0] if extra_keys else None)
        if parent is None:
            return []
        if any(extra_keys[1:] if fields["parent_block_hash"] is None else extra_keys):
            return []  # depends on more than tokens
        tokens = np.array(fields["token_ids"], dtype="<u4").tobytes()
        names = block.extend(parent, tokens, self._block_tokens, algorithm=self._algorithm)
        new = []
        for engine_hash, name in zip(hashes, names, strict=True):
            held = self._held.get(engine_hash)
            if held is None:
                self._held[engine_hash] = _Held(name, 1)
                new.append(name)
            else:
                held.copies += 1
        return new

    def _parent(self, parent_hash: EngineHash | None, extra_keys: Sequence[Any] | None) -> ChainHash | None:
        """Name of the block before, or the root of the chain; None if it cannot be known."""
        if parent_hash is not None:
            held = self._held.get(parent_hash)
            return None if held is None else held.name
        match extra_keys:
            case None | []:
                return block.root(b"", self._algorithm)
            case [str(salt)] if len(salt) == 2 * SALT_BYTES:
                return block.root(bytes.fromhex(salt), self._algorithm)
            case _:
                return None

    def _removed(self, fields: Mapping[str, Any]) -> list[ChainHash]:
        if fields.get("medium") not in (None, "GPU"):
            return []
        gone = []
        for engine_hash in fields["block_hashes"]:
            held = self._held.get(engine_hash)
            if held is None:
                continue
            held.copies -= 1
            if held.copies == 0:
                del self._held[engine_hash]
                gone.append(held.name)
        return gone


def _fields(published: Mapping[str, Any] | Sequence[Any]) -> tuple[str, Mapping[str, Any]]:
    """Kind and fields of an event: a map with its type, or (older releases) an array that begins with it."""
    if isinstance(published, Mapping):
        return published["type"], published
    kind = published[0]
    return kind, dict(zip(POSITIONAL.get(kind, ()), published[1:], strict=False))


async def read_events(endpoint: str, replay_endpoint: str, translator: Translator) -> AsyncIterator[list[KvEvent]]:
    """Batches of events as the engine publishes them, without gaps.

    Args:
        endpoint: Where the engine publishes, as ZeroMQ writes it.
        replay_endpoint: Where it repeats what it published; empty: nowhere.
        translator: Not used by anything else.
    """
    from zmq.asyncio import Context  # noqa: PLC0415
    from zmq.constants import SUB  # noqa: PLC0415 - comes with vLLM

    context = Context()
    subscriber = context.socket(SUB)
    subscriber.set_hwm(RECEIVE_BATCHES)
    try:
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        expected = 0
        while True:
            _, sequence_bytes, payload = await subscriber.recv_multipart()
            sequence = int.from_bytes(sequence_bytes, "big")
            if sequence < expected:
                continue  # was replayed
            payloads = [payload]
            if sequence > expected:
                missed = await _replay(context, replay_endpoint, range(expected, sequence)) if replay_endpoint else None
                if missed is None:
                    log.warning("KV events were lost; starting over", extra={"from": expected, "to": sequence})
                    yield [translator.clear()]
                else:
                    payloads = [*missed, payload]
            expected = sequence + 1
            events = [event for each in payloads for event in translator.translate(each)]
            if events:
                yield events
    finally:
        subscriber.close(linger=0)
        context.destroy(linger=0)


async def _replay(context: Any, endpoint: str, wanted: range) -> list[bytes] | None:
    """The batches with these numbers, or None if they cannot be had in time."""
    from zmq.constants import DEALER  # noqa: PLC0415 - comes with vLLM

    socket = context.socket(DEALER)
    batches: dict[int, bytes] = {}
    try:
        async with asyncio.timeout(REPLAY_TIMEOUT_SECONDS):
            socket.connect(endpoint)
            await socket.send_multipart([b"", wanted.start.to_bytes(8, "big")])
            while True:
                *_, sequence_bytes, payload = await socket.recv_multipart()
                if sequence_bytes == END_OF_REPLAY:
                    break
                batches[int.from_bytes(sequence_bytes, "big")] = payload
    except TimeoutError:
        return None
    finally:
        socket.close(linger=0)
    if any(number not in batches for number in wanted):
        return None
    return [batches[number] for number in wanted]
