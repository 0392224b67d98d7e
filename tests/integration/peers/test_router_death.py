"""Tests of routers that die while they stream: clients get exactly the tokens of an undisturbed run from another router.

Routers and workers are processes; the workers outlive the routers.
"""

import asyncio
import json
import signal
import threading
import time
from hashlib import sha256
from typing import Any

import grpc
import httpx
import openai
import pytest

from fleet.client import AsyncClient, Client, DeadlineExceeded, FleetError, Unavailable
from fleet.client.errors import error_of
from fleet.peers.routers import LATE_SECONDS, SILENCE_SECONDS
from fleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.frontend.http_clients import sse_events
from tests.support.kvstore.builders import a_short_folder
from tests.support.router.router_pair import RouterProcess, open_router_pair, open_workers
from tests.support.waiting import pace, until, until_answered

pytestmark = pytest.mark.integration

TOKENS = 300
GREEDY: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
SEEN = 40  # tokens or events that each client has when its router dies
EACH = 5  # clients of each kind
ENDLESS = 3900  # tokens, which take more than 15 s
IDLE_SECONDS = 10
SLACK_SECONDS = 5.0  # for a busy machine
NOTICED_SECONDS = 60  # far more than any client needs


def prompts(kind: str) -> list[str]:
    return [f"{kind} number {number} asks for an answer" for number in range(EACH)]


@pytest.fixture(scope="module")
def workers(model_dir):
    with a_short_folder() as folder, open_workers(folder, model_dir, speedup=0.5) as workers:
        yield workers


@pytest.fixture
def folder():
    with a_short_folder() as folder:
        yield folder


class Met:
    """Counts the clients that have received enough, and holds them there until the fault has happened."""

    def __init__(self) -> None:
        self.clients = 0
        self._lock = threading.Lock()
        self.happened = threading.Event()

    def enough(self) -> None:
        with self._lock:
            self.clients += 1

    async def until_happened(self) -> None:
        self.enough()
        await until(self.happened.is_set)

    def wait_until_happened(self) -> None:
        self.enough()
        assert self.happened.wait(NOTICED_SECONDS)


def ask_sync(routers: list[str], prompt: str, met: Met | None, **options: Any) -> tuple[str, tuple[int, ...]]:
    with Client(routers) as client, client.generate(prompt, **{**GREEDY, **options}) as stream:
        tokens = 0
        for delta in stream:
            before, tokens = tokens, tokens + len(delta.token_ids)
            if met is not None and before < SEEN <= tokens:
                met.wait_until_happened()
        assert stream.result.usage.completion_tokens == len(stream.result.token_ids)
        return stream.result.text, stream.result.token_ids


async def ask_async(routers: list[str], prompt: str, met: Met | None, **options: Any) -> tuple[str, tuple[int, ...]]:
    async with AsyncClient(routers) as client, client.generate(prompt, **{**GREEDY, **options}) as stream:
        tokens = 0
        async for delta in stream:
            before, tokens = tokens, tokens + len(delta.token_ids)
            if met is not None and before < SEEN <= tokens:
                await met.until_happened()
        return stream.result.text, stream.result.token_ids


async def ask_sse(
    routers: list[str],
    prompt: str,
    met: Met | None,
    *,
    then: Met | None = None,
    silent_seconds: float = NOTICED_SECONDS,
    **options: Any,
) -> str:
    """Read server-sent events as a browser does: come back with the last id to the next router.

    Args:
        routers: The routers in the order in which the client tries them.
        prompt: The prompt.
        met: What happens after `SEEN` events.
        then: What happens after `SEEN` more events.
        silent_seconds: Time without an event after which the client tries the next router.
        options: Fields of the request.
    """
    body = {"prompt": prompt, "stream": True, **GREEDY, **options}
    headers = {"x-fleet-resumable": "1"}
    text, positions, ended = "", [0], False
    for router in routers:
        try:
            async with (
                httpx.AsyncClient(base_url=f"http://{router}", trust_env=False, timeout=silent_seconds) as client,
                client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
            ):
                assert answer.status_code == 200, await answer.aread()
                received = ""
                async for chunk in answer.aiter_text():
                    whole, separator, received = (received + chunk).rpartition("\n\n")
                    for number, data in sse_events(whole + separator):
                        headers = {"last-event-id": number}
                        positions.append(int(number.split(".")[1]))
                        ended = data == "[DONE]"
                        text += "" if ended else json.loads(data)["choices"][0]["text"]
                        if len(positions) == SEEN and met is not None:
                            await met.until_happened()
                        if len(positions) == 2 * SEEN and then is not None:
                            await then.until_happened()
        except httpx.TransportError:
            continue
        if ended:
            assert positions == sorted(positions)
            assert positions[-1] == TOKENS
            return text
    raise AssertionError("no router completed the answer")


async def ask_openai(router: str, prompt: str, met: Met, max_tokens: int = TOKENS) -> str:
    """Return the text that a client without resumption gets, and raise what it raises."""
    async with openai.AsyncOpenAI(base_url=f"http://{router}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            stream=True,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        events = 0
        async for _ in stream:
            events += 1
            if events == SEEN:
                await met.until_happened()
    return "complete"


async def fault_amid_streams(pair: tuple[RouterProcess, RouterProcess], number: int) -> tuple[list[Any], list[Any]]:
    """Send the signal to the first router amid 20 streams; return the answers, and those of an undisturbed run."""
    first, second = pair
    met, library = Met(), [first.grpc, second.grpc]
    expected = await asyncio.gather(
        *(ask_async([second.grpc], prompt, None) for kind in ("sync", "async") for prompt in prompts(kind)),
        *(ask_sse([second.http], prompt, None) for prompt in prompts("sse")),
    )
    asked = [
        *(asyncio.to_thread(ask_sync, library, prompt, met) for prompt in prompts("sync")),
        *(ask_async(library, prompt, met) for prompt in prompts("async")),
        *(ask_sse([first.http, second.http], prompt, met) for prompt in prompts("sse")),
        *(ask_openai(first.http, prompt, met) for prompt in prompts("openai")),
    ]
    running = asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: met.clients == len(asked) or running.done())
    first.signal(number)
    met.happened.set()
    async with asyncio.timeout(NOTICED_SECONDS):
        return await running, expected


async def until_idle(router: RouterProcess) -> None:
    """Wait until the workers run nothing."""
    async with httpx.AsyncClient(base_url=f"http://{router.http}", trust_env=False) as client:

        async def running() -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("fleet_worker_running{"))

        async def idle() -> bool:
            return await running() == 0

        await until_answered(idle, IDLE_SECONDS)


async def test_killed_router_costs_no_stream_a_token(workers, folder):
    with open_router_pair(workers, folder) as pair:
        answers, expected = await fault_amid_streams(pair, signal.SIGKILL)
        resumed = await metric(pair[1], "fleet_resumed_requests_total")

    assert answers[: 3 * EACH] == expected
    assert all(len(token_ids) == TOKENS for _, token_ids in answers[: 2 * EACH])
    plain = answers[3 * EACH :]
    assert all(isinstance(each, openai.APIError | httpx.TransportError) for each in plain), plain
    assert resumed == 3 * EACH


async def worker_of(router: RouterProcess) -> str:
    """Return the worker that runs the router's only request."""
    async with AsyncClient(router.grpc, control=router.control) as client:
        pools = (await client.status()).pools
    (busy,) = [worker.worker_id for pool in pools for worker in pool.workers if worker.booked_requests]
    return busy


async def metric(router: RouterProcess, name: str) -> float:
    async with httpx.AsyncClient(base_url=f"http://{router.http}", trust_env=False) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTERM])
async def test_hung_or_stopping_router_costs_no_token(workers, folder, number):
    """Test the client library; clients of server-sent events have to notice silence themselves."""
    with open_router_pair(workers, folder, peers=False, drain_timeout_ms=100) as (first, second):
        met, library = Met(), [first.grpc, second.grpc]
        expected = [await ask_async([second.grpc], prompt, None) for prompt in prompts("hang")]
        running = asyncio.gather(
            asyncio.to_thread(ask_sync, library, prompts("hang")[0], met),
            *(ask_async(library, prompt, met) for prompt in prompts("hang")[1:]),
        )
        await until(lambda: met.clients == EACH or running.done())
        first.signal(number)
        met.happened.set()
        async with asyncio.timeout(NOTICED_SECONDS):
            answers = await running

    assert answers == expected


async def test_streams_without_peers_and_token_go_on(workers, folder):
    """A request of which nothing came is sent again."""
    with open_router_pair(workers, folder, peers=False) as (first, second):
        met = Met()
        expected = await ask_sse([second.http], "alone", None)
        running = asyncio.ensure_future(ask_sse([first.http, second.http], "alone", met))
        await until(lambda: met.clients or running.done())
        first.signal(signal.SIGKILL)
        first.process.wait(NOTICED_SECONDS)
        met.happened.set()
        assert await running == expected
        again = await ask_async([first.grpc, second.grpc], "alone", None)
        assert again == await asyncio.to_thread(ask_sync, [first.grpc, second.grpc], "alone", None)
        assert again[0] == expected


async def test_workers_stop_generating_for_a_dead_router(workers, folder):
    with open_router_pair(workers, folder, peers=False) as (first, second):
        met = Met()
        asked = [ask_openai(first.http, prompt, met, max_tokens=ENDLESS) for prompt in prompts("endless")]
        running = asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: met.clients == EACH or running.done())
        first.signal(signal.SIGKILL)
        met.happened.set()
        await running
        await until_idle(second)


async def test_sse_client_that_notices_a_hung_router_goes_on(workers, folder):
    with open_router_pair(workers, folder) as (first, second):
        met, routers = Met(), [first.http, second.http, second.http]
        expected = await ask_sse([second.http], "silent", None)
        running = asyncio.ensure_future(ask_sse(routers, "silent", met, silent_seconds=5))
        await until(lambda: met.clients or running.done())
        first.signal(signal.SIGSTOP)
        met.happened.set()
        assert await running == expected


@pytest.mark.parametrize("peers", [True, False])
async def test_random_sse_answers_go_on_exactly_after_the_kept_tokens(workers, folder, peers):
    """The tokens before the cut are random, so only a worker has them; the router would refuse to guess."""
    with open_router_pair(workers, folder, peers=peers) as (first, second):
        met = Met()
        options = [{"temperature": 1, "seed": seed} for seed in range(EACH)]
        expected = [await ask_sse([second.http], "random", None, **each) for each in options]
        assert len(set(expected)) == EACH
        running = asyncio.gather(*(ask_sse([first.http, second.http], "random", met, **each) for each in options))
        await until(lambda: met.clients == EACH or running.done())
        first.signal(signal.SIGKILL)
        met.happened.set()
        assert await running == expected
        assert await metric(second, "fleet_resumed_requests_total") == EACH


async def test_router_that_stood_still_takes_no_peer_for_silent(workers, folder):
    """It reads what its peer has sent meanwhile before it decides."""
    with open_router_pair(workers, folder) as (first, second):
        second.signal(signal.SIGSTOP)
        await pace(SILENCE_SECONDS + 2 * LATE_SECONDS, "a router may be silent for a shorter time")
        second.signal(signal.SIGCONT)
        # The first router has taken the second one for dead, so they connect again.
        await until(lambda: second.log.read_text().count("peer router reached") == 2)
        assert "peer router left" in first.log.read_text()
        assert "it was silent" not in second.log.read_text()


async def test_answer_that_lost_its_worker_and_its_router_goes_on(model_dir, folder):
    """The worker hangs first, so the other one has the tokens when the router dies."""
    with a_short_folder() as home, open_workers(home, model_dir, speedup=0.5) as workers:
        settings = {"heartbeat_timeout_seconds": 1.0}
        with open_router_pair(workers, folder, peers=False, **settings) as (first, second):
            met, lost, random = Met(), Met(), {"temperature": 1, "seed": 5}
            routers = [first.http, second.http]
            expected = await ask_sse([second.http], "twice", None, **random)
            running = asyncio.ensure_future(ask_sse(routers, "twice", lost, then=met, **random))
            await until(lambda: lost.clients or running.done())
            busy = await worker_of(first)
            workers.signal(busy, signal.SIGSTOP)
            lost.happened.set()
            await until(lambda: met.clients or running.done())
            workers.signal(busy, signal.SIGCONT)
            first.signal(signal.SIGKILL)
            met.happened.set()
            assert await running == expected
            assert await metric(second, "fleet_resumed_requests_total") == 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_killed_router_costs_no_event_of_translated_stream(workers, folder, path):
    with open_router_pair(workers, folder) as (first, second):
        met = Met()
        expected = await ask_translated([second.http], path, None)
        running = asyncio.ensure_future(ask_translated([first.http, second.http], path, met))
        await until(lambda: met.clients or running.done())
        first.signal(signal.SIGKILL)
        met.happened.set()
        assert await running == expected
        assert await metric(second, "fleet_resumed_requests_total") == 1


async def ask_translated(routers: list[str], path: str, met: Met | None) -> tuple[str, list[str]]:
    """Return the text and the types of all other events; come back with the last id to the next router."""
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    question = {"input": "hello"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hello"}]}
    body = {"model": "tiny", "stream": True, "temperature": 0, length: TOKENS, **question}
    headers = {"x-fleet-resumable": "1"}
    text, kinds, pieces = "", [], 0
    for router in routers:
        try:
            async with (
                httpx.AsyncClient(base_url=f"http://{router}", trust_env=False, timeout=NOTICED_SECONDS) as client,
                client.stream("POST", path, json=body, headers=headers) as answer,
            ):
                assert answer.status_code == 200, await answer.aread()
                received = ""
                async for chunk in answer.aiter_text():
                    whole, separator, received = (received + chunk).rpartition("\n\n")
                    for number, data in sse_events(whole + separator):
                        event = json.loads(data)
                        headers = {"last-event-id": number}
                        if event["type"] in ("response.output_text.delta", "content_block_delta"):
                            text += event["delta"] if isinstance(event["delta"], str) else event["delta"]["text"]
                            pieces += 1
                        else:
                            kinds.append(event["type"])
                        if pieces == SEEN and met is not None and not met.happened.is_set():
                            await met.until_happened()
        except httpx.TransportError:
            continue
        if kinds and kinds[-1] in ("response.completed", "response.incomplete", "message_stop"):
            return text, kinds
    raise AssertionError("no router completed the answer")


async def test_clients_of_dead_routers_end_with_typed_errors_in_time(workers, folder):
    with open_router_pair(workers, folder, peers=False) as pair:
        met = Met()

        async def ask(resume_seconds: float | None = None, **options: Any) -> tuple[type[FleetError], float]:
            """Return the error of a stream and the seconds from its beginning to that."""
            began = time.monotonic()
            async with AsyncClient([router.grpc for router in pair], resume_seconds=resume_seconds) as client:
                try:
                    async with client.generate("lost", **{**GREEDY, **options}) as stream:
                        deltas = 0
                        async for _ in stream:
                            deltas += 1
                            if deltas == SEEN:
                                await met.until_happened()
                except FleetError as error:
                    return type(error), time.monotonic() - began
            raise AssertionError("it ended without an error")

        running = [asyncio.ensure_future(ask(timeout_seconds=8)), asyncio.ensure_future(ask(resume_seconds=2))]
        await until(lambda: met.clients == 2 or any(each.done() for each in running))
        died = time.monotonic()
        for router in pair:
            router.signal(signal.SIGKILL)
            router.process.wait(NOTICED_SECONDS)
        met.happened.set()
        (by_deadline, seconds), (by_limit, _) = [await each for each in running]
        assert by_deadline is DeadlineExceeded
        assert seconds < 8 + SLACK_SECONDS
        assert by_limit is Unavailable
        assert time.monotonic() - died < 8 + SLACK_SECONDS
        refused, seconds = await ask(resume_seconds=0)
        assert refused is Unavailable
        assert seconds < SLACK_SECONDS


TENANTS = {
    name: {"api_key_sha256": [sha256(name.encode()).hexdigest()], "requests_per_minute": 2}
    for name in ("acme", "other")
}


async def test_foreign_tokens_are_refused_and_limits_count_once(workers, folder):
    with open_router_pair(workers, folder, tenants=TENANTS, peers=False) as (first, second):

        async def resumed(token: str, key: str) -> str:
            message = inference_pb2.GenerateRequest(text="a prompt of acme")
            message.sampling.max_tokens, message.sampling.temperature = 5, 0
            message.sampling.ignore_eos = True
            message.resume.token = token
            message.resume.token_ids.extend(token_ids)
            async with grpc.aio.insecure_channel(second.grpc) as channel:
                call = inference_pb2_grpc.InferenceStub(channel).Generate(
                    message, metadata=(("authorization", f"Bearer {key}"),), timeout=NOTICED_SECONDS
                )
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError as error:
                    failure = error_of(error)
                    return getattr(failure, "field", "") or str(failure.reason)
            return "served"

        async with (
            AsyncClient(first.grpc, api_key="acme", resume_seconds=1) as client,
            client.generate("a prompt of acme", **{**GREEDY, "max_tokens": 5}) as stream,
        ):
            async for _ in stream:
                break
            begun = stream.resume()
        assert begun is not None
        token, token_ids = begun.token, begun.token_ids

        assert await resumed(token, "other") == "resume.token"
        assert await resumed(token[:-4] + "AAAA", "acme") == "resume.token"
        assert await resumed("junk", "acme") == "resume.token"
        assert await resumed(token, "nobody") == "authorization"
        assert await resumed(token, "acme") == "served", "the first router has counted it"
        assert [await resumed(token, "acme") for _ in range(3)] == ["served", "served", "rate_limited"]
