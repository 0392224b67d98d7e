"""Tests of external backends that answer health checks but hang on requests, and of backends that only look hung."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from tests.support.backends.openai_servers import (
    CHAT,
    COMPLETIONS,
    MODEL,
    STREAMING_REQUEST,
    OpenAiServer,
    RelaySetup,
    ServerExchange,
    a_relay,
    chunk,
    five_tokens,
    never_answer,
    token,
)
from tests.support.fleet_processes import start_service
from tests.support.frontend.http_clients import error_of, post, raw_http_client
from tests.support.servers.processes import a_free_port
from tests.support.waiting import pace, stays, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

FLOOR = 0.3  # seconds; the default is one
REQUESTS = 16


async def status_within(
    address: str, prompt: str = "say", *, patience: float = 60.0, stream: bool = True, path: str = COMPLETIONS
) -> int | None:
    """Return the status of a whole answer, or None if the client gave up first."""
    host, _, port = address.rpartition(":")
    said = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    content = post(path, {"model": MODEL, "stream": stream, **said}, "connection: close")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(patience):
            writer.write(content)
            answer = await reader.read()
            return int(answer.split()[1])
    except TimeoutError:
        return None
    finally:
        writer.close()


async def warm_up(world: RelaySetup, **fields) -> None:
    """Let every server answer some requests."""
    for number in range(20):
        assert await status_within(world.http.address, f"warm {number}", **fields) == 200
    await world.settled()


def state(world: RelaySetup, worker_id: str) -> str:
    return next((w.state for p in world.router.status().pools for w in p.workers if w.worker_id == worker_id), "away")


# Servers that hang


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("patience", [1.0, 2.0])
async def test_clients_that_give_up_first_do_not_hide_a_hung_server(servers, patience, stream):
    """Guard against a regression: 10 of 16 sequential requests hung while the server got those of departed clients."""
    async with a_relay(*servers, probe_seconds=2.0) as world:
        await warm_up(world, stream=stream)
        servers[0].play = never_answer
        answers = [
            await status_within(world.http.address, f"{number}", patience=patience, stream=stream)
            for number in range(REQUESTS)
        ]

        assert answers.count(None) <= 3
        assert state(world, "w0") == "draining"
        assert world.running("w0") == 0
        await world.settled()


async def test_burst_moves_before_its_clients_leave(servers):
    """Guard against a regression: 8 of 16 simultaneous requests hung because their clients left when the server was found out."""
    async with a_relay(*servers, probe_seconds=2.0, silence_floor_seconds=4.0) as world:
        await warm_up(world)
        servers[0].play = never_answer
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(status_within(world.http.address, f"{number}", patience=3.8))
                for number in range(REQUESTS)
            ]

        assert {each.result() for each in asking} == {200}
        assert len(servers[0].seen) > 0
        await until(lambda: state(world, "w0") == "draining")
        await world.settled()


async def test_first_burst_of_whole_answers_leaves_a_hung_server(servers):
    """Guard against a regression: a server that had never answered kept 8 of the first 16 requests for answers in one piece."""
    servers[0].play = never_answer
    async with a_relay(*servers, probe_seconds=2.0, silence_floor_seconds=4.0) as world:
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(status_within(world.http.address, f"{number}", patience=3.8, stream=False))
                for number in range(REQUESTS)
            ]

        assert [each.result() for each in asking] == [200] * REQUESTS
        assert len(servers[0].seen) > 1, "some requests went to the hung server"
        await until(lambda: state(world, "w0") == "draining")
        await world.settled()


async def test_clients_too_impatient_for_suspicion_find_the_hang(servers):
    """Guard against a regression: the server got every other request for ever, because no client waited long enough."""
    async with a_relay(*servers, probe_seconds=2.0) as world:
        await warm_up(world)
        servers[0].play = never_answer
        answers = [
            await status_within(world.http.address, f"{number}", patience=0.35) for number in range(2 * REQUESTS)
        ]

        assert answers.count(None) <= 4
        assert state(world, "w0") == "draining"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_requests_on_a_hung_server_restart_elsewhere(servers, path):
    async with a_relay(*servers, silence_floor_seconds=FLOOR) as world:
        await warm_up(world, path=path)
        servers[0].play = never_answer
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(status_within(world.http.address, f"{number}", path=path))
                for number in range(REQUESTS)
            ]

        assert {each.result() for each in asking} == {200}
        assert world.router.status().counters.retried > 0
        await world.settled()


async def test_head_without_content_is_no_sign_of_life(servers):
    async def begin_only(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        await asyncio.Event().wait()

    async with a_relay(*servers, silence_floor_seconds=FLOOR) as world:
        await warm_up(world)
        servers[0].play = begin_only
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(status_within(world.http.address, f"{number}")) for number in range(6)]

        assert {each.result() for each in asking} == {200}
        assert state(world, "w0") == "draining"


async def an_empty_first_event(exchange: ServerExchange) -> None:
    await exchange.begin_events()
    await exchange.event(b'{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}')
    await asyncio.Event().wait()


async def only_comments(exchange: ServerExchange) -> None:
    await exchange.begin_events()
    while True:
        await exchange.send(chunk(b": keep-alive\n\n"))
        await pace(0.1, "the period of the comments")


@pytest.mark.parametrize("play", [an_empty_first_event, only_comments])
async def test_events_without_content_do_not_hide_a_hung_server(servers, play):
    """Run four clients that leave after a while, each making room for the next."""

    async def soon(exchange: ServerExchange) -> None:
        await pace(0.15, "an answer takes so long that clients leave before one request's silence is too long")
        await five_tokens(exchange)

    for server in servers:
        server.play = soon
    async with a_relay(*servers) as world:
        await warm_up(world, path=CHAT)
        servers[0].play = play

        async def one_after_the_other(client: int) -> list[int | None]:
            await pace(0.4 * client, "the clients begin one after the other, so that one of them has always just begun")
            prompts = [f"{client} {number}" for number in range(20)]
            return [await status_within(world.http.address, each, patience=1.6, path=CHAT) for each in prompts]

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(one_after_the_other(client)) for client in range(4)]

        assert state(world, "w0") == "draining"
        assert sum(each.result().count(None) for each in clients) <= 12
        await world.settled()


async def test_recovered_server_takes_requests_again(servers):
    go_on = asyncio.Event()

    async def when_told(exchange: ServerExchange) -> None:
        await go_on.wait()
        await five_tokens(exchange)

    async with a_relay(*servers, silence_floor_seconds=FLOOR) as world:
        await warm_up(world)
        servers[0].play = when_told
        while state(world, "w0") == "serving":
            await status_within(world.http.address, patience=1.0)
        go_on.set()
        await until(lambda: world.serving() == 2)
        before = len(servers[0].seen)
        while len(servers[0].seen) == before:
            assert await status_within(world.http.address) == 200
        await world.settled()


async def test_server_that_rejects_trials_is_ejected(servers):
    async def hang_but_for_trials(exchange: ServerExchange) -> None:
        if exchange.seen.json.get("max_tokens") == 1:
            await exchange.respond(401, b'{"error": {"message": "who are you?"}}')
        else:
            await asyncio.Event().wait()

    async with a_relay(*servers, silence_floor_seconds=FLOOR) as world:
        await warm_up(world)
        servers[0].play = hang_but_for_trials
        answers = [await status_within(world.http.address, f"{number}", patience=1.0) for number in range(REQUESTS)]

        assert answers.count(None) <= 4


async def test_only_hung_server_ends_requests_and_is_named(server):
    async with (
        a_relay(server, silence_floor_seconds=FLOOR, silence_cut_seconds=1.0) as world,
        raw_http_client(world) as peer,
    ):
        await warm_up(world)
        server.play = never_answer
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        status, headers, content = await peer.answer()

        assert status == 503
        assert error_of(content)["code"] == "worker_lost"
        assert "retry-after" in headers
        assert world.serving() == 1, "no other server exists"


async def test_stream_on_a_hung_server_ends_and_names_it(server):
    hang = asyncio.Event()

    async def stop(exchange: ServerExchange) -> None:
        if hang.is_set():
            await asyncio.Event().wait()
        elif "stops" in exchange.seen.json["prompt"]:
            await exchange.begin_events()
            await exchange.event(token("a", chat=False))
            await asyncio.Event().wait()
        else:
            await five_tokens(exchange)

    server.play = stop
    async with (
        a_relay(server, silence_floor_seconds=FLOOR, silence_cut_seconds=1.0) as world,
        raw_http_client(world) as peer,
    ):
        await warm_up(world)
        await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": "it stops"}))
        assert (await peer.head())[0] == 200
        hang.set()
        events = b"".join([chunk async for chunk in peer.chunks()])

        assert b"worker_lost" in events
        assert b"w0" in events
        assert b"sampling" not in events


# No false alarm


async def test_long_prompt_and_its_queue_are_no_hang(servers):
    """Use servers that compute one prompt after another, and a long one for twenty times as long."""
    turns = {id(server): asyncio.Lock() for server in servers}

    def one_by_one(server: OpenAiServer):
        async def play(exchange: ServerExchange) -> None:
            async with turns[id(server)]:
                await pace(3.0 if len(exchange.seen.body) > 20_000 else 0.02, "the server computes the prompt")
                await five_tokens(exchange)

        return play

    for server in servers:
        server.play = one_by_one(server)
    async with a_relay(*servers, silence_floor_seconds=FLOOR) as world:
        await warm_up(world)
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(status_within(world.http.address, "long " * 12_000))]
            for number in range(20):
                asking.append(tasks.create_task(status_within(world.http.address, f"short {number}")))
                await stays(lambda: world.serving() == 2, 0.1, "the next request follows after this time")

        assert {each.result() for each in asking} == {200}
        assert world.router.status().counters.retried == 0


async def test_servers_that_slow_down_together_all_stay(servers):
    slow = asyncio.Event()

    async def play(exchange: ServerExchange) -> None:
        await pace(1.5 if slow.is_set() else 0.0, "the server computes the prompt")
        await five_tokens(exchange)

    for server in servers:
        server.play = play
    async with a_relay(*servers, silence_floor_seconds=FLOOR) as world:
        await warm_up(world)
        slow.set()
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(status_within(world.http.address, f"{number}")) for number in range(12)]
            await stays(lambda: world.serving() == 2, 1.5, "the servers are silent for so long")

        assert {each.result() for each in asking} == {200}


async def test_servers_that_load_on_first_requests_all_stay(servers):
    loaded = asyncio.Event()

    async def play(exchange: ServerExchange) -> None:
        await loaded.wait()
        await five_tokens(exchange)

    for server in servers:
        server.play = play
    async with a_relay(*servers, silence_floor_seconds=0.05) as world:
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(status_within(world.http.address, f"{number}")) for number in range(4)]
            await until(lambda: sum(len(server.seen) for server in servers) == 4)
            await stays(lambda: world.serving() == 2, 1.0, "twenty times the minimum passes")
            loaded.set()

        assert {each.result() for each in asking} == {200}
        assert world.router.status().counters.retried == 0


@asynccontextmanager
async def a_router_process(
    folder: Path, servers: Sequence[OpenAiServer], **worker: object
) -> AsyncIterator[tuple[subprocess.Popen, str, Path]]:
    """Run `fleet serve router` in front of servers; yield its address and its log."""
    address, log = f"127.0.0.1:{a_free_port()}", folder / "router.log"
    workers = [{"worker_id": f"w{n}", "url": each.url, "model": MODEL, **worker} for n, each in enumerate(servers)]
    settings = {"http_listen": address, "grpc_listen": f"127.0.0.1:{a_free_port()}", "openai_workers": workers}
    with log.open("w") as output:
        started = {"stdout": output, "stderr": output}
        process, endpoints = await asyncio.to_thread(
            lambda: start_service("router", settings, folder / "router.json", **started)
        )
    try:
        assert endpoints, log.read_text()
        yield process, address, log
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)


async def test_suspended_router_blames_no_server(servers, tmp_path):
    """Suspend router and servers together, like their machine: the sleep is no silence, and clients that left in it blame nobody."""
    awake = asyncio.Event()
    awake.set()

    async def when_awake(exchange: ServerExchange) -> None:
        await awake.wait()
        await five_tokens(exchange)

    for server in servers:
        server.play = when_awake
    async with a_router_process(tmp_path, servers, silence_floor_seconds=2 * FLOOR) as (process, address, log):
        for number in range(10):
            assert await status_within(address, f"warm {number}") == 200
        awake.clear()
        before = sum(len(server.seen) for server in servers)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(status_within(address, f"{number}")) for number in range(6)]
            leaving = [
                tasks.create_task(status_within(address, f"leaves {number}", patience=1.0)) for number in range(6)
            ]
            await until(lambda: sum(len(server.seen) for server in servers) == before + 12)
            process.send_signal(signal.SIGSTOP)
            await asyncio.wait(leaving)
            await pace(1.0, "the router is stopped for so long")
            process.send_signal(signal.SIGCONT)
            await pace(0.2, "the servers are silent for a little longer than the router is stopped")
            awake.set()
        assert [each.result() for each in waiting] == [200] * 6
        assert [await status_within(address, f"after {number}") for number in range(6)] == [200] * 6

        assert "suspended" not in log.read_text()
        assert "failed" not in log.read_text()


@contextmanager
def busy_loops(core: int, count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        for loop in loops:
            os.sched_setaffinity(loop.pid, {core})
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


async def test_one_core_shared_by_four_busy_loops_is_no_hang(servers, tmp_path):
    """Let the servers compute in turn on the router's core, so that a burst waits several times as long as one request did before."""
    core = min(os.sched_getaffinity(0))
    all_cores = os.sched_getaffinity(0)

    async def compute(exchange: ServerExchange) -> None:
        until_ns = time.thread_time_ns() + 50_000_000
        while time.thread_time_ns() < until_ns:
            pass
        await five_tokens(exchange)

    for server in servers:
        server.play = compute
    async with a_router_process(tmp_path, servers, silence_floor_seconds=FLOOR) as (process, address, log):
        os.sched_setaffinity(process.pid, {core})
        os.sched_setaffinity(0, {core})  # for the servers, which run in this process
        try:
            with busy_loops(core, 4):
                for number in range(10):
                    assert await status_within(address, f"warm {number}") == 200
                for _ in range(2):
                    async with asyncio.TaskGroup() as tasks:
                        asking = [tasks.create_task(status_within(address, f"{number}")) for number in range(8)]
                    assert {each.result() for each in asking} == {200}
        finally:
            os.sched_setaffinity(0, all_cores)

        assert "suspended" not in log.read_text()
