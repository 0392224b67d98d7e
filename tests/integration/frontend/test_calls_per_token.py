"""What a token costs a router, counted and not timed: calls of Python functions in `fleet`.

A timed gate would be as unsteady as the machine it runs on. Calls are what the processor time of a token consists of, and the bounds
leave room for few more: they catch a task or a wait for each token where a callback did, a message that is parsed which was passed
on, and layers that add up. Who needs more says why, and changes the bound.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
from msgspec import Struct

import fleet
from fleet.core.ids import WorkerId
from fleet.core.requests import Sampling
from fleet.core.roles import Role
from fleet.core.work import Progress
from fleet.router.messages import WorkerStepped
from tests.support.backends.openai_servers import MODEL, OpenAiServer, ServerExchange, a_relay, token
from tests.support.builders import MODEL as OWN_MODEL
from tests.support.builders import a_prompt, an_arrival
from tests.support.frontend.frontends import open_frontends
from tests.support.frontend.http_clients import RawHttpClient, post
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

pytestmark = pytest.mark.integration

OURS = os.path.dirname(fleet.__file__) + os.sep  # noqa: PTH120 - compared with what frames have
FEW, MANY = 20, 220  # tokens; what they differ by is what is counted

RELAYED = 2
"""A token of a foreign server, from socket to socket; it takes one: the read that passes it on."""

FRONTED = 26
"""A token of Fleet's own worker from the router's stream to the socket: text, stop strings, JSON, write. It takes 22."""

DECIDED = 9
"""A token of Fleet's own worker in the router's machine: whose it is, how it grows, to whom it goes. It takes 7."""


class CountedCalls(Struct):
    calls: int = 0


@contextmanager
def counting() -> Iterator[CountedCalls]:
    """Calls of functions in `fleet` by this thread."""
    counted = CountedCalls()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            counted.calls += 1

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield counted
    finally:
        sys.setprofile(before)


async def asked(address: str, model: str, tokens: int, received: asyncio.Semaphore) -> None:
    """A stream of so many tokens; says when each has come."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"model": model, "prompt": "say", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    peer = RawHttpClient(reader, writer)
    await peer.send(post("/v1/completions", body))
    status, _ = await peer.head()
    assert status == 200
    seen = 0
    async for chunk in peer.chunks():
        for _ in range(chunk.count(b"data: {")):
            seen += 1
            received.release()
    assert seen >= tokens
    writer.close()


async def test_a_token_of_a_foreign_server_takes_few_calls():
    """Each is sent when the one before has arrived, so that no two are read at once."""
    received = asyncio.Semaphore(0)

    async def one_by_one(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        for _ in range(exchange.seen.json["max_tokens"]):
            await exchange.event(token("a", chat=False))
            await received.acquire()
        await exchange.event(b"[DONE]")
        await exchange.end()

    server = OpenAiServer()
    server.play = one_by_one
    await server.start()
    calls = []
    async with a_relay(server, probe_seconds=60.0) as world:
        for tokens in (FEW, FEW, MANY):  # the first one warms up
            with counting() as counted:
                await asked(world.http.address, MODEL, tokens, received)
            calls.append(counted.calls)
        await world.settled()
    await server.stop()

    assert (calls[2] - calls[1]) / (MANY - FEW) <= RELAYED


async def test_a_token_of_an_own_worker_takes_few_calls_to_the_socket(model_dir):
    calls = []
    async with open_frontends(model_dir) as frontends:
        for tokens in (FEW, FEW, MANY):
            frontends.will_answer("word " * tokens)
            frontends.router.answer = frontends.router.answer[:tokens]
            with counting() as counted:
                await asked(frontends.http.address, OWN_MODEL, tokens, asyncio.Semaphore(0))
            calls.append(counted.calls)

    assert (calls[2] - calls[1]) / (MANY - FEW) <= FRONTED


def test_a_token_of_an_own_worker_takes_few_calls_of_the_machine():
    router = RouterMachineDriver(("d1", Role.BOTH))
    work = the(Dispatch, router.send(an_arrival(tokens=a_prompt(100), sampling=Sampling(max_tokens=2 * MANY))))
    assert work.worker_id == WorkerId("d1")
    router.step(work, 5)
    progress = Progress(request_id=work.start.request_id, token_ids=(7,))
    with counting() as counted:
        for _ in range(MANY):
            router.machine.handle(WorkerStepped(worker_id=WorkerId("d1"), progress=(progress,)), router.now)

    assert counted.calls / MANY <= DECIDED
