"""Tests of external backends that fail, and of clients that leave or do not read."""

import asyncio
import gc
import json
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from fleet.backends.external.workers import ExternalBackends
from fleet.core.ids import RequestId
from fleet.core.system_clock import SystemClock
from fleet.net.settings import HttpSettings
from fleet.router.settings.router import OpenAiWorkerSettings
from tests.support.backends.openai_servers import (
    COMPLETIONS,
    EVENTS,
    MESSAGES,
    MODEL,
    STREAMING_REQUEST,
    RelaySetup,
    ServerExchange,
    a_relay,
    an_openai_client,
    chunk,
    five_tokens,
    hold_after_first_token,
    never_answer,
    streamed_text,
    token,
)
from tests.support.frontend.http_clients import error_of, post, raw_http_client
from tests.support.waiting import pace, stays, turns, until, until_answered, until_still

pytestmark = pytest.mark.integration


# Failures


async def test_server_that_dies_before_the_first_byte_is_replaced(servers):
    async def die(exchange: ServerExchange) -> None:
        await servers[0].stop()

    servers[0].play = die
    async with a_relay(*servers) as world, an_openai_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

        assert await streamed_text(stream) == "abcde"
        assert (len(servers[0].seen), len(servers[1].seen)) == (1, 1)
        await world.settled()
        await until(lambda: world.serving() == 1)


async def test_head_without_content_counts_as_no_answer(servers):
    async def die_after_the_head(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        exchange.writer.transport.abort()

    servers[0].play = die_after_the_head
    async with a_relay(*servers) as world, an_openai_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

        assert await streamed_text(stream) == "abcde"
        assert world.router.status().counters.retried == 1
        await world.settled()


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_server_error_is_retried_elsewhere(servers, status):
    async def fail(exchange: ServerExchange) -> None:
        await exchange.respond(status, b'{"error": "out of memory"}')

    servers[0].play = fail
    async with a_relay(*servers) as world, an_openai_client(world) as client:
        assert (await client.completions.create(model=MODEL, prompt="say")).choices[0].text == "abcde"
        await world.settled()


async def test_server_error_on_all_servers_is_reported(server):
    async def fail(exchange: ServerExchange) -> None:
        await exchange.respond(500, b'{"error": "out of memory"}')

    server.play = fail
    async with a_relay(server) as world, an_openai_client(world) as client:
        with pytest.raises(openai.InternalServerError, match="has failed it"):
            await client.completions.create(model=MODEL, prompt="say")
        await world.settled()


async def test_stream_cut_between_events_ends_with_an_error_event(server):
    async def die(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        await exchange.event(token("a"))
        exchange.writer.transport.abort() if exchange.seen.json.get("now") else exchange.writer.close()

    server.play = die
    async with a_relay(server) as world, an_openai_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="w0"):
            await anext(stream)
        await world.settled()


async def test_stream_cut_within_an_event_closes_the_connection(server):
    async def die(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        await exchange.event(token("a"))
        await exchange.send(b"400\r\ndata: {")
        exchange.writer.close()

    server.play = die
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        assert (await peer.head())[0] == 200
        rest = await peer.rest()

        assert rest.endswith(b"400\r\ndata: {")
        await world.settled()


async def cut_by_reset(exchange: ServerExchange, seen: asyncio.Event) -> None:
    await exchange.begin_events()
    await exchange.event(token("a"))
    await seen.wait()
    exchange.writer.transport.abort()


async def cut_by_close(exchange: ServerExchange, seen: asyncio.Event) -> None:
    await exchange.begin_events()
    await exchange.event(token("a"))
    await seen.wait()
    exchange.writer.close()


async def end_early(exchange: ServerExchange, seen: asyncio.Event) -> None:
    await exchange.begin_events()
    await exchange.event(token("a"))
    await seen.wait()
    await exchange.end()


async def end_early_with_an_event(exchange: ServerExchange, seen: asyncio.Event) -> None:
    await exchange.begin_events()
    await exchange.event(token("a"))
    await seen.wait()
    await exchange.send(chunk(b"data: " + token("b") + b"\n\n") + b"0\r\n\r\n")


async def end_early_with_the_words_of_an_end(exchange: ServerExchange, seen: asyncio.Event) -> None:
    await exchange.begin_events()
    await exchange.event(token("a"))
    await seen.wait()
    text = token('\ndata: [DONE]\n\n {"type": "message_stop"} "response.completed"')
    await exchange.send(chunk(b"data: " + text + b"\n\n") + b"0\r\n\r\n")


async def without_chunks(exchange: ServerExchange, seen: asyncio.Event) -> None:
    """Answer without a length and close the connection, like HTTP/1.0."""
    await exchange.send(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    await exchange.send(b"data: " + token("a") + b"\n\n")
    await seen.wait()
    exchange.writer.close()


@pytest.mark.parametrize(
    "play",
    [
        cut_by_reset,
        cut_by_close,
        end_early,
        end_early_with_an_event,
        end_early_with_the_words_of_an_end,
        without_chunks,
    ],
)
async def test_cut_stream_names_its_server_and_a_retry_hint(server, play):
    seen = asyncio.Event()
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        assert b"[DONE]" in (await peer.answer())[2], "the router has learned how the server ends a stream"
        server.play = lambda exchange: play(exchange, seen)
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        assert (await peer.head())[0] == 200
        seen.set()
        rest = await peer.rest()

        assert token("a") in rest
        assert b"\ndata: [DONE]" not in rest
        error = json.loads(rest.rpartition(b"data: ")[2].partition(b"\n\n")[0])["error"]
        assert error["code"] == "worker_lost"
        assert "w0" in error["message"]
        assert "sampling" not in error["message"]
        assert error["retry_after_ms"] == 1000
        await world.settled()


async def test_empty_unfinished_stream_is_retried_elsewhere(servers):
    async def nothing(exchange: ServerExchange) -> None:
        if exchange.seen.json["prompt"] == "cut":
            await exchange.send(b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\n" + chunk(b": hello\n\n") + b"0\r\n\r\n")
        else:
            await five_tokens(exchange)

    servers[0].play = nothing
    async with a_relay(*servers) as world, raw_http_client(world) as peer:
        while not (servers[0].seen and servers[1].seen):
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            assert (await peer.answer())[0] == 200
        for _ in range(4):
            await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": "cut"}))
            assert b"[DONE]" in (await peer.answer())[2]
        await world.settled()


async def test_server_without_done_events_is_learned(server):
    seen = asyncio.Event()
    seen.set()
    server.play = lambda exchange: end_early(exchange, seen)
    async with a_relay(server) as world, raw_http_client(world) as peer:
        for _ in range(3):
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            status, _, content = await peer.answer()
            assert (status, b"error" in content) == (200, False)
        await world.settled()


@pytest.mark.parametrize("cut", range(1, 8))
async def test_done_is_found_however_it_is_cut(server, cut):
    async def in_two(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        await exchange.event(token("a"))
        await exchange.send(chunk(b"data: " + b"[DONE]"[:cut]))
        await turns(10)
        await exchange.send(chunk(b"[DONE]"[cut:] + b"\n\n") + b"0\r\n\r\n")

    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        await peer.answer()
        server.play = in_two
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        assert b"error" not in (await peer.answer())[2]
        await world.settled()


async def test_invalid_http_is_a_failure_of_the_server(server):
    async def babble(exchange: ServerExchange) -> None:
        await exchange.send(b"hello\r\n\r\n")

    server.play = babble
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        assert (await peer.answer())[0] == 503
        await world.settled()


@pytest.mark.parametrize("size", [3, 30, None])
async def test_unrequested_second_answer_reaches_nobody(server, size):
    async def twice(exchange: ServerExchange) -> None:
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
        await exchange.send(answer + b"{}" + (answer + b"[]")[:size])

    server.play = twice
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        status, _, body = await peer.answer()

        assert status == 503
        assert b"[]" not in body
        await world.settled()


async def test_silent_server_times_out(server):
    server.play = never_answer
    async with a_relay(server, silence_timeout_seconds=0.3) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        assert (await peer.answer())[0] == 503
        await until(lambda: server.cut == 1)
        await world.settled()


async def test_a_deadline_ends_a_request_wherever_it_is(server):
    server.play = never_answer
    async with a_relay(server) as world, raw_http_client(world) as peer:

        async def asked() -> int:
            """Return how many requests reached the server; on a busy machine a deadline may pass before."""
            await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "fleet": {"timeout_ms": 100}}))
            assert (await peer.answer())[0] == 504
            return len(server.seen)

        await until_answered(asked)
        await until(lambda: server.cut == len(server.seen))
        await world.settled()


async def test_router_without_sockets_blames_no_server_and_recovers(server):
    async with a_relay(server) as world, raw_http_client(world) as peer:
        with no_file_left():
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            await stays(lambda: world.serving() == 1, 0.6, "six health checks find no socket")
        assert (await peer.answer())[0] == 200
        await world.settled()


async def test_request_without_a_socket_in_time_is_rejected_with_429(server):
    async with a_relay(server, limits={"connect_timeout_seconds": 1.0}) as world, raw_http_client(world) as peer:
        with no_file_left():
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            status, headers, content = await peer.answer()
        assert (status, headers["retry-after"], error_of(content)["code"]) == (429, "1", "queue_full")
        assert "open files" in error_of(content)["message"]
        assert world.serving() == 1
        await world.settled()


@contextmanager
def no_file_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # below the number of open files
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_dead_server_leaves_and_rejoins(servers):
    async with a_relay(*servers) as world, an_openai_client(world) as client:
        await servers[0].stop()
        await until(lambda: world.serving() == 1)
        assert (await client.completions.create(model=MODEL, prompt="say")).choices[0].text == "abcde"

        await servers[0].start()
        await until(lambda: world.serving() == 2)
        await world.settled()


async def test_unreachable_server_is_logged_once_with_url_and_cause(server, caplog):
    """Check that a wrong URL in the settings is logged, since nothing else would tell it."""
    server.health_status = 503
    urls = {"sick": server.url, "absent": "http://127.0.0.1:1"}
    settings = [
        OpenAiWorkerSettings(worker_id=name, url=url, model=MODEL, probe_seconds=0.02) for name, url in urls.items()
    ]
    heard = []
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(ExternalBackends(settings, 1.0, SystemClock()).run(heard.append))
        await until(lambda: len(caplog.records) == 2)
        await until(lambda: server.health_checks >= 8)  # the server is probed again and again
        server.health_status = 200
        await until(lambda: heard)
        running.cancel()

    told = {record.worker: (record.url, record.cause) for record in caplog.records if record.levelname == "WARNING"}
    assert len(caplog.records) == 2
    assert told["sick"] == (server.url, "it answered with status 503")
    assert told["absent"][0] == urls["absent"]
    assert told["absent"][1], "the error of the system"


async def test_repeatedly_failing_server_gets_no_requests_for_a_while(servers):
    async def fail(exchange: ServerExchange) -> None:
        await exchange.respond(500, b"{}")

    servers[0].play = fail
    async with a_relay(*servers) as world, an_openai_client(world) as client:
        for _ in range(10):
            await client.completions.create(model=MODEL, prompt="say")
        assert len(servers[0].seen) == 5
        assert world.serving() == 1
        await world.settled()


async def test_request_failing_everywhere_does_not_eject_all_servers(servers):
    async def choke(exchange: ServerExchange) -> None:
        poison = "poison" in exchange.seen.json["prompt"]
        await (exchange.respond(500, b"{}") if poison else five_tokens(exchange))

    for server in servers:
        server.play = choke
    async with a_relay(*servers) as world, an_openai_client(world) as client:
        for number in range(12):
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model=MODEL, prompt=f"poison {number}")
        assert world.serving() >= 1
        assert (await client.completions.create(model=MODEL, prompt="say")).choices[0].text == "abcde"
        await world.settled()


async def test_unhealthy_server_keeps_its_running_requests(server):
    go_on = asyncio.Event()

    async def slowly(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        while not go_on.is_set():
            await exchange.event(token("a"))
            await pace(0.01, "the server needs this time for a token")
        await exchange.event(b"[DONE]")
        await exchange.end()

    server.play = slowly
    async with a_relay(server) as world, an_openai_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        await anext(stream)
        server.health_status = 500
        await stays(lambda: world.serving() == 1, 0.6, "six probe periods pass, in which a busy server is not probed")

        go_on.set()
        assert set(await streamed_text(stream)) == {"a"}
        await until(lambda: world.serving() == 0)


async def test_overloaded_router_answers_429_and_memory_stays_flat(server):
    """Run 2 requests and queue 4; of 12 at once the others get a retry hint."""
    go = asyncio.Event()

    async def when_let(exchange: ServerExchange) -> None:
        await go.wait()
        await five_tokens(exchange)

    async def ask(world: RelaySetup) -> tuple[int, dict[str, str]]:
        async with raw_http_client(world) as peer:
            await peer.send(post(COMPLETIONS, {"model": MODEL, "prompt": "x" * 2000}))
            status, headers, _ = await peer.answer()
            return status, headers

    server.play = when_let
    sizes = []
    tracemalloc.start()
    limits = {"oversubscribe": 1.0, "max_queued": 4, "explained_requests": 4}
    async with a_relay(server, max_running=2, limits=limits) as world:
        for _ in range(6):
            go.clear()
            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(ask(world)) for _ in range(12)]
                await until(lambda: sum(each.done() for each in asking) == 6)  # noqa: B023
                assert (world.router.status().active, world.router.status().queued) == (6, 4)
                go.set()
            answers = [each.result() for each in asking]
            assert sorted(status for status, _ in answers) == [200] * 6 + [429] * 6
            assert all(int(headers["retry-after"]) >= 1 for status, headers in answers if status == 429)
            await world.settled()
            server.seen.clear()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        assert sizes[-1] - sizes[2] < 50_000

        await server.stop()
        await until(lambda: world.serving() == 0)
        assert (await ask(world))[0] == 503
    tracemalloc.stop()


@pytest.mark.parametrize("status", [422, 500, 503])
async def test_every_rejection_carries_the_request_id(server, status):
    async def refuse(exchange: ServerExchange) -> None:
        await exchange.respond(status, b'{"error": {"message": "no such thing"}}')

    server.play = refuse
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        answered, headers, _ = await peer.answer()

        assert (answered == 422) == (status == 422)
        assert headers["x-request-id"] == headers["x-fleet-request-id"]
        assert world.router.explain(RequestId(headers["x-request-id"])).placements[0].decode == "w0"
        await world.settled()


async def test_rejection_without_a_server_says_so(server):
    async with a_relay(server) as world, an_openai_client(world) as client:
        await server.stop()
        await until(lambda: world.serving() == 0)
        with pytest.raises(openai.InternalServerError, match="no worker serves"):
            await client.completions.create(model=MODEL, prompt="say")


# Clients


@pytest.mark.parametrize("play", [never_answer, hold_after_first_token])
async def test_request_of_a_departed_client_is_cancelled(server, play):
    server.play = play
    async with a_relay(server) as world:
        async with raw_http_client(world) as peer:
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            await until(lambda: len(server.seen) == 1)
            assert world.running("w0") == 1
        await until(lambda: server.cut == 1)
        await world.settled()
        assert world.router.status().counters.cancelled == 1


async def test_half_closed_client_counts_as_gone(server):
    server.play = hold_after_first_token
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        await peer.head()
        peer.writer.write_eof()
        await until(lambda: server.cut == 1)
        await world.settled()


async def test_client_that_does_not_read_stops_the_server(server):
    sent = 0

    async def flood(exchange: ServerExchange) -> None:
        nonlocal sent
        exchange.writer.transport.set_write_buffer_limits(high=0)
        await exchange.begin_events()
        for _ in range(2000):
            await exchange.send(chunk(b"data: " + b"x" * 50_000 + b"\n\n"))
            sent += 1
        await exchange.end()

    server.play = flood
    async with a_relay(server) as world, raw_http_client(world, limit=1000) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        await peer.head()
        await until_still(lambda: sent)
        assert sent < 400  # 20 MB, the most that the kernel buffers of four sockets take

        received = 0
        async for each in peer.chunks():
            received += len(each)
        assert received == 2000 * 50_008
        await world.settled()


async def test_client_that_never_reads_is_cut_off(server):
    async def flood(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        while True:
            await exchange.send(chunk(b"data: " + b"x" * 50_000 + b"\n\n"))

    server.play = flood
    async with a_relay(server, http=HttpSettings(write_timeout_seconds=0.3)) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        await until(lambda: server.cut == 1)
        await world.settled()


async def test_request_from_before_a_drain_is_rejected_as_draining(server):
    go_on = asyncio.Event()

    async def when_told(exchange: ServerExchange) -> None:
        await go_on.wait()
        await exchange.respond(200, b"{}")

    server.play = when_told
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST) + post("/v1/embeddings", {"model": MODEL, "input": "x"}))
        await until(lambda: len(server.seen) == 1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.http.drain(10))
            await turns()
            go_on.set()
            assert (await peer.answer())[0] == 200
            status, _, content = await peer.answer()
        assert (status, error_of(content)["code"]) == (503, "draining")
        assert len(server.seen) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/rerank", "/score", "/tokenize"])
async def test_body_of_a_placed_path_has_to_be_json(server, path):
    """A server may read a body of another type as JSON, and its prompt would not be counted."""
    async with a_relay(server, limits={"external_paths": ("/*",)}) as world, raw_http_client(world) as peer:
        await peer.send(post(path, b'{"model": "mock"}', "content-type: text/plain"))
        status, _, content = await peer.answer()

        assert (status, error_of(content)["message"]) == (415, "content-type: must be application/json")
        assert server.seen == []


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize("path", ["/v1/rerank", "/classify", "/v1/chat/completions"])
async def test_prompts_come_by_post_alone(server, method, path):
    """SGLang also takes PUT at two of these paths, and the prompt would not be counted."""
    async with a_relay(server, limits={"external_paths": ("/*",)}) as world, raw_http_client(world) as peer:
        await peer.send(post(path, b'{"model": "mock"}').replace(b"POST", method.encode(), 1))
        status, headers, _ = await peer.answer()

        assert (status, headers["allow"]) == (405, "POST")
        assert server.seen == []


async def test_target_with_a_fragment_is_refused(server):
    """A server would leave the fragment out, and so serve a control route."""
    async with a_relay(server, limits={"external_paths": ("/*",)}) as world, raw_http_client(world) as peer:
        await peer.send(post("/v1/load_lora_adapter#", b"{}"))
        status, _, _ = await peer.answer()

        assert status == 400
        assert server.seen == []


async def test_body_that_is_no_json_is_left_to_the_server(server):
    async def judge(exchange: ServerExchange) -> None:
        await exchange.respond(415, exchange.seen.body)

    server.play = judge
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post("/v1/custom", b"no json", "content-type: text/plain"))
        status, _, content = await peer.answer()

        assert (status, content) == (415, b"no json")
