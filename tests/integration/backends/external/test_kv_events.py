"""Tests of external backends that publish KV events: their caches are known by token."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from fleet.backends.external import followed_cache
from fleet.backends.kv_events.health import KvEventAlert
from fleet.backends.kv_events.stream import END_OF_REPLAY
from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.frontend.text.codec import load_codec
from fleet.router.kv_index.prefix_index import Knowledge
from tests.support.backends.openai_servers import (
    COMPLETIONS,
    MODEL,
    STREAMING_REQUEST,
    OpenAiServer,
    RelaySetup,
    ServerExchange,
    a_relay,
)
from tests.support.builders import token_ids
from tests.support.frontend.http_clients import post, raw_http_client
from tests.support.waiting import until

pytestmark = pytest.mark.integration

PAGE = 16
PROMPT = "the quick brown fox jumps over the lazy dog " * 10


@pytest.fixture
async def server() -> AsyncIterator[OpenAiServer]:
    server = OpenAiServer()
    await server.start()
    yield server
    await server.stop()


class Publisher:
    """Publisher in SGLang's format: maps, a topic, and a replay that repeats the topic."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._out = self._context.socket(zmq.PUB)
        self._repeat = self._context.socket(zmq.ROUTER)
        self.port, self.replay_port = (
            each.bind_to_random_port("tcp://127.0.0.1") for each in (self._out, self._repeat)
        )
        self.batches: list[bytes] = []
        self.asked = 0

    @property
    def endpoints(self) -> dict[str, object]:
        here = "tcp://127.0.0.1:"
        return {
            "kv_events": f"{here}{self.port}",
            "kv_events_replay": f"{here}{self.replay_port}",
            "kv_blocks": 1000,
        }

    async def publish(self, *events: dict, lost: bool = False) -> None:
        batch = msgspec.msgpack.encode([0.0, events, 0])
        number = len(self.batches).to_bytes(8, "big")
        self.batches.append(batch)
        if not lost:
            await self._out.send_multipart([b"kv-events", number, batch])

    async def repeat(self) -> None:
        """Answer replay requests one after another."""
        while await self._repeat.poll(20):
            client, _, start = await self._repeat.recv_multipart()
            self.asked += 1
            for number in range(int.from_bytes(start, "big"), len(self.batches)):
                frames = [client, b"", b"kv-events", number.to_bytes(8, "big"), self.batches[number]]
                await self._repeat.send_multipart(frames)
            await self._repeat.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def a_publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    try:
        yield publisher
    finally:
        publisher.close()


def stored(ids: list[int], hashes: list[int], **fields: object) -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": ids[: PAGE * len(hashes)],
        "block_size": PAGE,
        "lora_id": None,
        "medium": "GPU",
        **fields,
    }


async def publish_until(publisher: Publisher, what) -> None:
    """Answer replays until the subscription is complete."""
    async for _ in _turns():
        await publisher.repeat()
        if what():
            return


async def _turns() -> AsyncIterator[None]:
    for _ in range(500):
        yield
    raise AssertionError("it never happened")


async def router_uncached_tokens(world: RelaySetup, number: int, **body: object) -> int:
    """Return the prompt tokens that the router believes uncached."""
    async with raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": PROMPT, **body}))
        assert (await peer.answer())[0] == 200
    return world.router.explain(RequestId(f"t-{number}")).placements[0].uncached_tokens


async def test_stored_blocks_are_known_by_tokens_salt_and_adapter(server, model_dir):
    ids = token_ids(load_codec(model_dir).encode(PROMPT))
    blocks = len(ids) // PAGE
    with a_publisher() as publisher:
        await publisher.publish(stored(ids, list(range(blocks))), lost=True)
        await publisher.publish(stored(ids, list(range(100, 100 + blocks - 1)), cache_salt="acme"), lost=True)
        await publisher.publish(stored(ids, list(range(200, 200 + blocks - 2)), lora_name="ada"), lost=True)
        async with a_relay(server, model_dir=model_dir, adapters=("ada", "bob"), **publisher.endpoints) as world:
            await publish_until(publisher, lambda: world.router.status().index_blocks == 3 * blocks - 3)

            left = len(ids) - PAGE * blocks
            assert await router_uncached_tokens(world, 1) == max(1, left)
            assert await router_uncached_tokens(world, 2, cache_salt="acme") == left + PAGE
            assert await router_uncached_tokens(world, 3, model="ada") == left + 2 * PAGE
            assert await router_uncached_tokens(world, 4, model="bob") == len(ids)
            assert await router_uncached_tokens(world, 5, cache_salt="other") == len(ids)
            assert await router_uncached_tokens(world, 6, model="ada", cache_salt="acme") == len(ids)
            assert [seen.json["model"] for seen in server.seen] == [MODEL, MODEL, "ada", "bob", MODEL, "ada"]
            async with raw_http_client(world) as peer:
                await peer.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
                listed = json.loads((await peer.answer())[2])["data"]
            assert {each["id"]: each.get("parent") for each in listed} == {MODEL: None, "ada": MODEL, "bob": MODEL}
            await world.settled()


async def test_lost_events_are_requested_again(server, model_dir):
    ids = token_ids(load_codec(model_dir).encode(PROMPT))
    with a_publisher() as publisher:
        async with a_relay(server, model_dir=model_dir, **publisher.endpoints) as world:
            await publisher.publish(stored(ids, [1]))
            await publish_until(publisher, lambda: world.router.status().index_blocks == 1)
            asked = publisher.asked

            await publisher.publish(stored(ids, [1, 2]), lost=True)
            await publisher.publish(stored(ids, [1, 2, 3]))
            await publish_until(publisher, lambda: world.router.status().index_blocks == 3)

            assert publisher.asked == asked + 1


async def test_cleared_cache_is_forgotten(server, model_dir):
    ids = token_ids(load_codec(model_dir).encode(PROMPT))
    with a_publisher() as publisher:
        await publisher.publish(stored(ids, [1, 2]), lost=True)
        async with a_relay(server, model_dir=model_dir, **publisher.endpoints) as world:
            await publish_until(publisher, lambda: world.router.status().index_blocks == 2)

            await publisher.publish({"type": "AllBlocksCleared"})

            await until(lambda: world.router.status().index_blocks == 0)


async def test_blocks_of_another_size_raise_a_named_alert(server, model_dir, caplog):
    caplog.set_level(logging.INFO)
    with a_publisher() as publisher:
        await publisher.publish({**stored(list(range(32)), [1]), "block_size": 32}, lost=True)
        async with a_relay(server, model_dir=model_dir, **publisher.endpoints) as world:
            await publish_until(publisher, lambda: world.workers.alerts()[KvEventAlert.OTHER_BLOCK_SIZE])

            assert world.workers.knowledge() == {"approximate": 0, "events": 0, "blind": 1}
            assert world.workers.passed_over() == {"other_block_size": 1}
            (told,) = [record for record in caplog.records if "cannot be used" in record.message]
            assert (told.worker, told.alert, told.its_block_tokens) == ("w0", "other_block_size", 32)

            await publisher.publish(stored(list(range(16)), [2]))
            await until(lambda: world.workers.knowledge()["events"])
            assert not any(world.workers.alerts().values())


async def test_server_that_publishes_nothing_raises_a_named_alert(server, model_dir, monkeypatch):
    monkeypatch.setattr(followed_cache, "EVENT_PATIENCE", Nanos(1))
    with a_publisher() as publisher:
        async with a_relay(server, model_dir=model_dir, **publisher.endpoints) as world:
            for number in range(3):
                assert not any(world.workers.alerts().values())
                await router_uncached_tokens(world, number + 1, prompt=f"{number} {PROMPT}")

            await until(lambda: world.workers.alerts()[KvEventAlert.SILENT])


@pytest.mark.parametrize("events", [True, False], ids=["exact", "approximate"])
async def test_hit_rate_error_is_measured_in_both_modes(server, model_dir, events):
    """Let the server report half of the prompt as cached, whatever was published or sent."""

    async def half(exchange: ServerExchange) -> None:
        usage = {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201}
        usage["prompt_tokens_details"] = {"cached_tokens": 100}
        text = 'it says \\"cached_tokens\\": 7'
        await exchange.respond(200, json.dumps({"choices": [{"text": text}], "usage": usage}).encode())

    server.play = half
    ids = token_ids(load_codec(model_dir).encode(PROMPT))
    with a_publisher() as publisher:
        await publisher.publish(stored(ids, list(range(len(ids) // PAGE))), lost=True)
        told = publisher.endpoints if events else {}
        async with a_relay(server, model_dir=model_dir, **told) as world:
            if events:
                await publish_until(publisher, lambda: world.router.status().index_blocks)
            for number in range(2):
                await router_uncached_tokens(world, number + 1)

            known = {each.knowledge: each for each in world.router.status().knowledge}
            mine = known[Knowledge.EXACT if events else Knowledge.APPROXIMATE]
            assert (mine.workers, mine.prompts) == (1, 2)
            assert mine.total.reported == 2 * round(len(ids) / 2)
            assert mine.total.predicted > mine.total.reported if events else mine.total.predicted > 0
            if events:
                assert mine.recent.precision == mine.total.reported / mine.total.predicted
                assert mine.recent.recall == 1
