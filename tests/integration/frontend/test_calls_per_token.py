"""Tests of the cost of a token in a router, counted in calls of Python functions in `fleet`.

A time limit would vary with the machine. Processor time consists of calls, and the bounds leave little room. They catch a task or a
wait per token in place of a callback, needless parsing of a message, and additional layers. Raise a bound only with a reason.
"""

import asyncio
from typing import Any

import httpx
import pytest

from fleet.core.ids import WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Role
from fleet.core.work import Progress
from fleet.router.messages import WorkerStepped
from tests.support.backends.openai_servers import MODEL, OpenAiServer, ServerExchange, a_relay, token
from tests.support.builders import MODEL as OWN_MODEL
from tests.support.builders import a_prompt, an_arrival
from tests.support.counted_calls import count_calls
from tests.support.frontend.frontends import open_frontends
from tests.support.frontend.http_clients import RawHttpClient, post
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

pytestmark = pytest.mark.integration

FEW, MANY = 20, 220  # tokens; the tests count the difference

RELAYED = 2
"""Calls for a token of an external backend, from socket to socket. It takes one, the read that passes it on, and a share of a second call
that differs between runs."""

FRONTED = 20
"""Calls for a token of Fleet's own worker from the router's stream to the socket: text, stop strings, JSON, write. This is what it takes."""

REQUESTED = 538
"""Calls for a streamed completion of Fleet's own worker with `FEW` tokens, in the frontend. This is what it takes; what a setting turns on
comes on top, and costs nothing while the setting is off: access records, tracing."""

DECIDED = 5
"""Calls for a token of Fleet's own worker in the router machine. This is what it takes."""


async def stream_tokens(address: str, model: str, tokens: int, received: asyncio.Semaphore) -> None:
    """Request a stream of that many tokens, and report each arrival."""
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


async def test_token_of_an_external_backend_takes_few_calls():
    """Send each token when the one before has arrived, so that no read gets two."""
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
        for tokens in (FEW, FEW, MANY):  # the first run warms up
            with count_calls() as counted:
                await stream_tokens(world.http.address, MODEL, tokens, received)
            calls.append(counted.calls)
        await world.settled()
    await server.stop()

    assert (calls[2] - calls[1]) / (MANY - FEW) <= RELAYED


async def test_token_of_a_worker_takes_few_calls_to_the_socket(model_dir):
    """Take the least of several runs, because timers of other parts run too."""
    calls = {FEW: [], MANY: []}
    async with open_frontends(model_dir) as frontends:
        for tokens in (FEW, *(FEW, MANY) * 3):  # the first run warms up
            frontends.will_answer("word " * tokens)
            frontends.router.answer = frontends.router.answer[:tokens]
            with count_calls() as counted:
                await stream_tokens(frontends.http.address, OWN_MODEL, tokens, asyncio.Semaphore(0))
            calls[tokens].append(counted.calls)

    assert (min(calls[MANY]) - min(calls[FEW])) / (MANY - FEW) <= FRONTED, calls


async def test_request_without_records_takes_few_calls(model_dir):
    """Take the least of several runs, because timers of other parts run too."""
    calls = []
    async with open_frontends(model_dir) as frontends:
        for _ in range(8):  # the first run warms up
            frontends.will_answer("word " * FEW)
            frontends.router.answer = frontends.router.answer[:FEW]
            with count_calls() as counted:
                await stream_tokens(frontends.http.address, OWN_MODEL, FEW, asyncio.Semaphore(0))
            calls.append(counted.calls)

    assert min(calls) <= REQUESTED, calls


async def test_chat_without_tools_runs_no_code_of_parsers(model_dir):
    async with open_frontends(model_dir) as frontends:
        frontends.will_answer("word " * FEW)
        with count_calls() as counted:
            answer = await httpx_chat(frontends.http.address)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "frontend/generation.py" in counted.files
    parsers = {f"frontend/text/{name}.py" for name in ("parsing_plan", "parsed_answer", "response_templates")}
    assert not counted.files & parsers


async def test_ordinary_stream_runs_no_code_of_resumption(model_dir):
    async with open_frontends(model_dir) as frontends:
        frontends.will_answer("word " * FEW)
        with count_calls() as counted:
            await stream_tokens(frontends.http.address, OWN_MODEL, FEW, asyncio.Semaphore(0))
    assert "frontend/generation.py" in counted.files
    assert not [file for file in counted.files if "resum" in file or "answer_search" in file]


async def test_request_without_tenants_runs_no_code_of_tenants(model_dir):
    async with open_frontends(model_dir) as frontends:
        frontends.will_answer("word " * FEW)
        with count_calls() as counted:
            await httpx_chat(frontends.http.address)
    assert "frontend/generation.py" in counted.files
    assert "router/tenants.py" not in counted.files


async def test_untraced_request_runs_no_code_of_tracing(model_dir):
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=1", "baggage": "b=2"}
    async with open_frontends(model_dir) as frontends:
        frontends.will_answer("word " * FEW)
        with count_calls() as counted:
            await httpx_chat(frontends.http.address, headers)
    assert "frontend/generation.py" in counted.files
    assert not [file for file in counted.files if "trac" in file]


async def httpx_chat(address: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": FEW, "ignore_eos": True}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"http://{address}/v1/chat/completions", json=body, headers=headers, timeout=60)
    return answer.json()


def test_token_of_a_worker_takes_few_machine_calls():
    router = RouterMachineDriver(("d1", Role.BOTH))
    work = the(Dispatch, router.send(an_arrival(tokens=a_prompt(100), sampling=Sampling(max_tokens=2 * MANY))))
    assert work.worker_id == WorkerId("d1")
    router.step(work, 5)
    progress = Progress(request_id=work.start.request_id, token_ids=(7,))
    with count_calls() as counted:
        for _ in range(MANY):
            router.machine.handle(WorkerStepped(worker_id=WorkerId("d1"), progress=(progress,)), router.now)

    assert counted.calls / MANY <= DECIDED


def test_request_that_need_not_wait_runs_no_code_of_the_queue():
    router = RouterMachineDriver(("d1", Role.BOTH))
    machine, arrived = router.machine, an_arrival(tokens=a_prompt(100))
    with count_calls() as counted:
        (work,) = machine.handle(arrived, router.now)
        done = Progress(request_id=work.start.request_id, token_ids=(7,), finish=Finish.STOP)
        machine.handle(WorkerStepped(worker_id=work.worker_id, progress=(done,)), router.now)

    assert not machine.live_requests
    assert not [file for file in counted.files if file.startswith("router/queueing/")]
