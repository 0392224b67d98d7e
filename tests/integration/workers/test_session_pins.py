"""Tests of session pins: the blocks of a waiting session stay in the store under a quota and a deadline, and the session resumes."""

import asyncio
import gc
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.requests import Finish, Sampling, Source
from fleet.router.messages import Complete
from kvstore.block import chain
from kvstore.client.store_client import StoreClient
from kvstore.errors import LayoutMismatch
from kvstore.layouts.fingerprint import Fingerprint, describe
from kvstore.security.credentials import Credentials
from tests.support.builders import an_arrival, token_bytes
from tests.support.kvstore.builders import a_block, a_namespace, a_node, a_store_client
from tests.support.waiting import turns, until
from tests.support.workers.engine_driver import fresh_prompt
from tests.support.workers.simulated_clusters import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    a_router_with_workers,
    namespace,
    simulated_worker,
)
from workers.ports import PinChain, UnpinChain
from workers.store.pin_keeper import StorePinKeeper, open_pin_keeper

pytestmark = pytest.mark.integration

PAGE = 4096
NAMESPACE = a_namespace(block_bytes=4 * 2 * 32 * 8 * 4)
KV: Fingerprint = describe(NAMESPACE)
A_MINUTE = Nanos(60 * SECOND)
TOKENS = token_bytes(range(10 * 32))
NAMES = chain(TOKENS, 32)


def a_pin(tokens: bytes = TOKENS, lasting: Nanos = A_MINUTE, session: str = "agent") -> PinChain:
    return PinChain(session=session, tokens=tokens, salt=b"", lasting=lasting)


@asynccontextmanager
async def open_pins(**fields):
    """Yield a node, its session pins, and a client."""
    with a_node(**fields) as node, a_store_client(node.address, NAMESPACE) as client:
        async with open_pin_keeper(node.address, KV, Credentials()) as holds:
            assert isinstance(holds, StorePinKeeper)
            yield holds, client


def write(client: StoreClient, names) -> None:
    assert client.write(names, [a_block(1, NAMESPACE.block_bytes) for _ in names]) > 0


async def until_held(client: StoreClient, blocks: int) -> None:
    await until(lambda: client.stats().held_bytes == blocks * NAMESPACE.block_bytes)


async def test_chain_is_pinned_until_released():
    async with open_pins() as (holds, client):
        write(client, NAMES)

        holds.keep([a_pin()])
        await until_held(client, 10)
        holds.keep([UnpinChain(session="agent")])
        await until_held(client, 0)

        assert (holds.pinned, holds.refused, holds.dropped) == (1, 0, 0)


async def test_pin_expires():
    async with open_pins() as (holds, client):
        write(client, NAMES)

        holds.keep([a_pin(lasting=Nanos(300 * MILLISECOND))])

        await until(lambda: holds.pinned == 1)  # a busy machine may see the blocks held only when they are not any more
        await until_held(client, 0)


async def test_blocks_stored_after_the_answer_are_pinned_too():
    async with open_pins() as (holds, client):
        write(client, NAMES[:4])
        holds.keep([a_pin()])
        await until_held(client, 4)

        write(client, NAMES)

        await until_held(client, 10)


async def test_resumed_session_is_not_pinned_by_earlier_work():
    async with open_pins() as (holds, client):
        write(client, NAMES[:4])
        holds.keep([a_pin(), UnpinChain(session="agent")])
        await turns()
        await until(lambda: not holds.running)

        assert client.stats().held_bytes == 0


async def test_pins_stay_within_the_quota_and_keep_the_chain_start():
    quota = 8 * NAMESPACE.block_bytes
    async with open_pins(capacity_bytes=4 * quota, max_held_share=0.25) as (holds, client):
        other = token_bytes(range(1000, 1000 + 10 * 32))
        write(client, NAMES)
        write(client, chain(other, 32))

        holds.keep([a_pin(), a_pin(other, session="another")])

        await until_held(client, 8)
        await until(lambda: not holds.running)
        assert holds.refused == 2
        assert client.stats().held_bytes == quota


async def test_pins_are_dropped_while_the_node_is_away():
    with a_node() as node:
        async with open_pin_keeper(node.address, KV, Credentials()) as holds:
            node.kill()
            holds.keep([a_pin()])
            await until(lambda: not holds.running)
            assert holds.dropped == 1


async def test_ending_worker_drops_pending_pins_silently():
    async with open_pins() as (holds, _):
        holds.keep([a_pin(), UnpinChain(session="another")])
    gc.collect()  # a coroutine that was never awaited would warn here


async def test_client_closes_after_the_running_call(monkeypatch):
    done: list[str] = []
    began, go_on = threading.Event(), threading.Event()
    hold, close = StoreClient.hold, StoreClient.close

    def slowly(self, *arguments, **named):
        began.set()
        assert go_on.wait(60)
        held = hold(self, *arguments, **named)
        done.append("held")
        return held

    def note(self):
        done.append("closed")
        close(self)

    with a_node() as node:
        async with AsyncExitStack() as stack:
            keeper = await stack.enter_async_context(open_pin_keeper(node.address, KV, Credentials()))
            monkeypatch.setattr(StoreClient, "hold", slowly)
            monkeypatch.setattr(StoreClient, "close", note)
            keeper.keep([a_pin()])
            assert await asyncio.to_thread(began.wait, 60)
            closing = asyncio.create_task(stack.aclose())
            await turns(20)
            assert done == []
            go_on.set()
            await closing

        assert done == ["held", "closed"]


async def test_incompatible_node_leaves_no_thread():
    with a_node() as node, a_store_client(node.address, NAMESPACE):
        other = describe(a_namespace(block_bytes=2 * NAMESPACE.block_bytes, layers=2 * NAMESPACE.layers))
        with pytest.raises(LayoutMismatch):
            async with open_pin_keeper(node.address, other, Credentials()):
                pytest.fail("was opened")
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("store-holds")] == []


async def test_failed_pin_is_counted_and_affects_no_other(monkeypatch):
    async with open_pins() as (holds, client):
        write(client, NAMES)
        hold = StoreClient.hold

        def one_fails(self, session, names, *, seconds):
            if session == "bad":
                raise ZeroDivisionError
            return hold(self, session, names, seconds=seconds)

        monkeypatch.setattr(StoreClient, "hold", one_fails)

        holds.keep([a_pin(session="bad"), a_pin()])

        await until_held(client, 10)
        assert holds.dropped == 1


# From a request of a session to its next one.


async def ask(router, prompt: bytes, number: int, session: str = "") -> Complete:
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    arrived = an_arrival(request_id=f"r{number}", tokens=prompt, sampling=sampling, session=session)
    async with asyncio.timeout(30), router.submit(arrived) as events:
        async for event in events:
            if isinstance(event, Complete):
                assert event.finish is Finish.LENGTH
                return event
    raise AssertionError("no end")


@pytest.mark.parametrize(("session", "loaded"), [("agent", 10), ("", 0)])
async def test_session_resumes_from_its_pinned_blocks(session, loaded):
    prompt = fresh_prompt(10 * BLOCK_TOKENS + 5)
    with (
        a_node(capacity_bytes=64 * PAGE, max_held_share=0.25) as node,
        a_store_client(node.address, namespace()) as client,
    ):
        async with a_router_with_workers(simulated_worker(node.address), store=node.address) as router:
            await ask(router, prompt, 0, session)
            await until(lambda: client.stats().blocks >= 10)
            await until(lambda: client.stats().held_bytes >= (10 * PAGE if session else 0))
            for number in range(1, 15):  # 140 blocks, while engine and store have room for 64
                await ask(router, fresh_prompt(10 * BLOCK_TOKENS + 5), number)
                await until(lambda number=number: client.stats().written >= 10 * (number + 1))

            complete = await ask(router, prompt, 100, session)

            origins = {each.source: each for phase in complete.kv for each in phase.report.origins}
            assert (origins[Source.STORE].blocks if loaded else 0) == loaded
            assert origins[Source.COMPUTED].blocks == 11 - loaded
            assert not loaded or origins[Source.STORE].bytes == loaded * BLOCK_BYTES
