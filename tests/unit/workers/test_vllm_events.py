"""vLLM's KV events, as recorded, under our names."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from fleet.work import KvCleared, KvRemoved, KvStored
from kvstore.block import HashAlgorithm, chain
from tests.builders import token_bytes
from workers.engines.vllm_events import END_OF_REPLAY, Translator, read_events

BLOCK_TOKENS = 32
SALT = b"\xab" * 32

RECORDED = [
    bytes.fromhex(batch)
    for batch in json.loads(Path(__file__).with_name("vllm_kv_events.json").read_text(encoding="utf-8"))["batches"]
]
FIRST, LONGER, SALTED, PUSHING, RESET = RECORDED


def a_translator(capacity: int = 10) -> Translator:
    return Translator(block_tokens=BLOCK_TOKENS, algorithm=HashAlgorithm.SHA256_128, capacity=capacity)


def names(first: int, last: int, salt: bytes = b"") -> tuple[bytes, ...]:
    """Of the full blocks of these consecutive ids."""
    return tuple(chain(token_bytes(range(first, last)), BLOCK_TOKENS, salt=salt))


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


def removed(*hashes) -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def test_recorded_events_name_the_blocks_of_the_prompts():
    translator = a_translator()

    assert translator.translate(FIRST) == [KvStored(names(100, 170))]
    assert translator.translate(LONGER) == [KvStored(names(100, 230)[2:])]
    assert translator.translate(SALTED) == [KvStored(names(100, 170, SALT))]


def test_recorded_removals_name_what_was_stored():
    translator = a_translator()
    for batch in (FIRST, LONGER, SALTED):
        translator.translate(batch)

    events = translator.translate(PUSHING)

    assert events[:-1] == [KvRemoved((name,)) for name in reversed(names(100, 230))]
    assert events[-1] == KvStored(names(1000, 1200))
    assert translator.translate(RESET) == [KvCleared()]
    assert len(translator) == 0


def test_blocks_after_an_unknown_one_have_no_name():
    translator = a_translator()

    assert translator.translate(LONGER) == []
    assert translator.translate(PUSHING) == [KvStored(names(1000, 1200))], "removals of unknown blocks are nothing"


def test_events_may_be_arrays_as_in_older_releases():
    translator = a_translator()
    tokens = list(range(100, 164))

    events = translator.translate(
        a_batch(
            ["BlockStored", [b"1", b"2"], None, tokens, BLOCK_TOKENS, None, "GPU"],
            ["BlockRemoved", [b"2"], "GPU"],
            ["AllBlocksCleared"],
        )
    )

    first, second = names(100, 164)
    assert events == [KvStored((first, second)), KvRemoved((second,)), KvCleared()]


def test_a_name_is_gone_when_its_last_copy_is():
    translator = a_translator()
    (name,) = names(0, 32)

    assert translator.translate(a_batch(stored([7], None, 0, 32))) == [KvStored((name,))]
    assert translator.translate(a_batch(stored([7], None, 0, 32))) == []
    assert translator.translate(a_batch(removed(7))) == []
    assert translator.translate(a_batch(removed(7))) == [KvRemoved((name,))]


@pytest.mark.parametrize(
    "foreign",
    [
        {"medium": "CPU"},
        {"lora_name": "adapter", "lora_id": 1},
        {"block_size": 16},
        {"extra_keys": [[["image", 0]]]},
        {"extra_keys": [["not a salt"]]},
    ],
    ids=["elsewhere", "adapter", "part of a block", "image", "strange salt"],
)
def test_blocks_that_our_chain_cannot_name_are_left_out(foreign):
    translator = a_translator()

    assert translator.translate(a_batch(stored([7], None, 0, 32, **foreign))) == []
    assert translator.translate(a_batch(stored([8], 7, 32, 64))) == []


def test_more_blocks_than_the_engine_holds_void_the_books():
    translator = a_translator(capacity=2)

    assert translator.translate(a_batch(stored([1, 2, 3], None, 0, 96))) == [KvCleared()]
    assert len(translator) == 0


class Publisher:
    """vLLM's publisher as its protocol describes it, which can forget to send."""

    def __init__(self, folder: Path):
        import zmq
        import zmq.asyncio

        self.endpoint, self.replay_endpoint = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self._context = zmq.asyncio.Context()
        self._out = self._context.socket(zmq.XPUB)
        self._out.bind(self.endpoint)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(self.replay_endpoint)
        self._batches: list[bytes] = []

    async def subscribed(self) -> None:
        await self._out.recv()

    async def publish(self, batch: bytes, *, lost: bool = False) -> None:
        sequence = len(self._batches).to_bytes(8, "big")
        self._batches.append(batch)
        if not lost:
            await self._out.send_multipart([b"", sequence, batch])

    async def serve_replay(self, *, kept_from: int = 0) -> None:
        client, _, start = await self._replay.recv_multipart()
        for number, batch in enumerate(self._batches):
            if number >= max(kept_from, int.from_bytes(start, "big")):
                await self._replay.send_multipart([client, b"", b"", number.to_bytes(8, "big"), batch])
        await self._replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def a_publisher() -> Iterator[Publisher]:
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        publisher = Publisher(Path(folder))
        try:
            yield publisher
        finally:
            publisher.close()


async def read(publisher: Publisher, batches: int, drive) -> list:
    """Events of the first `batches` that come, while `drive` makes the publisher act."""
    heard: list = []

    async def listen() -> None:
        async for events in read_events(publisher.endpoint, publisher.replay_endpoint, a_translator()):
            heard.append(events)
            if len(heard) == batches:
                return

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(listen())
        await publisher.subscribed()
        await drive()
    return heard


async def test_a_gap_is_filled_from_the_replay():
    with a_publisher() as publisher:

        async def drive() -> None:
            await publisher.publish(FIRST)
            await publisher.publish(LONGER, lost=True)
            await publisher.publish(SALTED)
            await publisher.serve_replay()

        heard = await read(publisher, 2, drive)

    assert heard == [
        [KvStored(names(100, 170))],
        [KvStored(names(100, 230)[2:]), KvStored(names(100, 170, SALT))],
    ]


async def test_a_gap_that_cannot_be_filled_voids_everything():
    with a_publisher() as publisher:

        async def drive() -> None:
            await publisher.publish(FIRST)
            await publisher.publish(LONGER, lost=True)
            await publisher.publish(SALTED)
            await publisher.serve_replay(kept_from=2)

        heard = await read(publisher, 3, drive)

    assert heard == [[KvStored(names(100, 170))], [KvCleared()], [KvStored(names(100, 170, SALT))]]
