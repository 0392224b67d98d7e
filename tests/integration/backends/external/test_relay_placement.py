"""Tests of placement on external backends, of their prefix caches, and of the router command."""

import asyncio
import gc
import json
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import suppress

import msgspec
import openai
import pytest
import zmq

from fleet.core.ids import RequestId
from fleet.core.system_clock import SystemClock
from fleet.frontend.text.codec import load_codec
from fleet.recording.access_records import AccessRecordFile
from fleet.recording.rotated_file import RotatedFile
from tests.support.backends.openai_servers import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    MODEL,
    STREAMING_REQUEST,
    ServerExchange,
    a_relay,
    an_openai_client,
    five_tokens,
    streamed_text,
    token,
)
from tests.support.builders import token_ids
from tests.support.frontend.http_clients import error_of, post, raw_http_client
from tests.support.waiting import until, until_answered

pytestmark = pytest.mark.integration


# Placement


async def test_prompt_reader_failure_after_client_left_is_not_logged(server, model_dir, caplog):
    reading, go_on = threading.Event(), threading.Event()

    def broken(*_: object) -> None:
        reading.set()
        go_on.wait(60)
        raise OverflowError("a bug")

    async with a_relay(server, model_dir=model_dir) as world, raw_http_client(world) as peer:
        world.reader.inline_bytes = 10
        world.reader.read = broken
        long = [{"role": "user", "content": "the quick brown fox " * 500}]
        await peer.send(post(CHAT, {"model": MODEL, "messages": long}))
        assert await asyncio.to_thread(reading.wait, 10)
        peer.writer.close()
        await until(lambda: not world.http.connections)
        go_on.set()
        await asyncio.to_thread(lambda: None)
    gc.collect()  # asyncio reports unretrieved exceptions at this point
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_long_prompt_is_read_in_a_thread_and_placed(server, model_dir):
    async with (
        a_relay(server, model_dir=model_dir) as world,
        an_openai_client(world) as client,
        raw_http_client(world) as peer,
    ):
        world.reader.inline_bytes = 10
        answers = [client.completions.create(model=MODEL, prompt="the quick brown fox " * 500) for _ in range(5)]
        for answer in answers:
            assert (await answer).choices[0].text == "abcde"
        assert world.router.status().index_blocks > 10

        await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": "the quick brown fox " * 50_000}))
        peer.writer.close()
        await world.settled()
        assert (
            world.registry.get_sample_value("fleet_relayed_requests_total", {"model": MODEL, "outcome": "served"}) == 5
        )


@pytest.mark.parametrize(
    ("made", "tokenises"),
    [
        (lambda ids: ids, "alike"),
        (lambda ids: ids[1:], "alike"),  # llama.cpp adds the first token later
        (lambda ids: [token + 1 for token in ids], "otherwise"),
        (lambda ids: "nonsense", "unknown"),
        (None, "unknown"),
    ],
    ids=["the same", "without the first", "others", "no tokens", "not served"],
)
async def test_tokenizer_check_runs_before_a_server_joins(server, model_dir, made, tokenises, caplog):
    codec = load_codec(model_dir)
    server.tokenise = made and (lambda text: made(token_ids(codec.encode(text))))
    async with a_relay(server, model_dir=model_dir) as world, an_openai_client(world) as client:
        assert {name for name, count in world.workers.tokenizers().items() if count} == {tokenises}
        assert [record.levelname for record in caplog.records] == ["ERROR"] * (tokenises == "otherwise")
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "abcde"


async def test_prompts_with_a_shared_prefix_go_to_one_server(servers, model_dir):
    beginnings = [f"{name} " * 60 for name in ("alpha", "beta", "gamma", "delta")]
    async with a_relay(*servers, model_dir=model_dir) as world, raw_http_client(world) as peer:
        went: dict[str, set[int]] = {}
        for number in range(20):
            for beginning in beginnings:
                before = len(servers[0].seen)
                await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": f"{beginning} and {number}"}))
                await peer.answer()
                went.setdefault(beginning, set()).add(len(servers[0].seen) - before)
        await world.settled()

    assert all(len(places) == 1 for places in went.values()), went
    assert {place for places in went.values() for place in places} == {0, 1}


async def test_believed_cache_is_limited_to_the_cache_size(server):
    async with a_relay(server, kv_blocks=400) as world, raw_http_client(world) as peer:
        for number in range(40):
            await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": f"{number} " * 2000}))
            await peer.answer()
            assert world.router.status().index_blocks <= 100
        assert world.router.status().index_blocks >= 50
        assert world.router.status().index_overflowed == 0
        await world.settled()


async def test_prompts_sent_long_ago_are_believed_evicted(server):
    async with a_relay(server, cache_ttl_seconds=0.2) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": "x" * 10_000}))
        await peer.answer()
        assert world.router.status().index_blocks > 10
        await until(lambda: world.router.status().index_blocks == 0)


async def test_an_answer_that_grows_weighs_more(server):
    async def many(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        for _ in range(200):  # three blocks: the first and the rest may be reported separately
            await exchange.event(token("a"))
        await asyncio.Event().wait()

    server.play = many
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        await until(lambda: world.router.status().pools[0].workers[0].booked_blocks > 1)


async def test_queued_request_with_priority_is_dispatched_first(server):
    go, got = asyncio.Event(), []

    async def when_let(exchange):
        got.append(exchange.seen.json["prompt"])
        await go.wait()
        await five_tokens(exchange)

    async def ask(prompt, priority):
        async with raw_http_client(world) as peer:
            await peer.send(post(COMPLETIONS, {"model": MODEL, "prompt": prompt, "fleet": {"priority": priority}}))
            assert (await peer.answer())[0] == 200

    server.play = when_let
    async with a_relay(server, limits={"oversubscribe": 1.0}, max_running=1) as world:
        async with asyncio.TaskGroup() as tasks:
            for waiting, (prompt, priority) in enumerate((("runs", 0), ("later", 0), ("last", -5), ("first", 5))):
                tasks.create_task(ask(prompt, priority))
                await until(lambda waiting=waiting: world.router.status().queued == waiting and got)
            go.set()
        await world.settled()
    assert got == ["runs", "first", "later", "last"]


async def test_metrics_count_what_was_relayed(server):
    async with a_relay(server) as world, an_openai_client(world) as client:
        await client.completions.create(model=MODEL, prompt="say")
        with suppress(openai.NotFoundError):
            await client.completions.create(model="other", prompt="say")
        await world.settled()
        assert (
            world.registry.get_sample_value("fleet_relayed_requests_total", {"model": MODEL, "outcome": "served"}) == 1
        )
        assert world.registry.get_sample_value("fleet_relayed_ttft_seconds_count", {"model": MODEL}) == 1


async def test_relayed_requests_have_access_records(server, tmp_path):
    file = RotatedFile(tmp_path / "a", most_bytes=1 << 30, kept=1, field="records", clock=SystemClock())
    with file:
        records = AccessRecordFile(file, content=True)
        async with a_relay(server, records=records) as world, an_openai_client(world) as client:
            await client.completions.create(model=MODEL, prompt="a private prompt")
            with suppress(ValueError):  # the server answers no embedding
                await client.embeddings.create(model=MODEL, input="a private text")
            await world.settled()
    served, embedded = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert (served["outcome"], served["model"], served["external"]) == ("relayed", MODEL, True)
    assert (served["operation"], embedded["operation"]) == ("text_completion", "embeddings")
    assert [each["worker"] for each in served["placements"]] == ["w0"]
    assert 0 < served["ttft_seconds"] <= served["duration_seconds"]
    assert served["prompt_tokens"] is None
    assert "private" not in (tmp_path / "a").read_text()


async def test_reported_cache_is_known_by_token(servers, model_dir):
    prompt = "the quick brown fox jumps over the lazy dog " * 10
    ids = token_ids(load_codec(model_dir).encode(prompt))
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        hashes = list(range(100, 100 + len(ids) // 16))
        stored = {
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "block_size": 16,
            "token_ids": ids[: 16 * len(hashes)], "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        events = {"kv_events": f"tcp://127.0.0.1:{port}", "kv_blocks": 1000}
        async with a_relay(servers[0], model_dir=model_dir, **events) as world, raw_http_client(world) as peer:
            number = 0

            def published() -> bool:
                nonlocal number
                payload = msgspec.msgpack.encode([0.0, [stored], 0])
                publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
                number += 1
                return world.router.status().index_blocks >= len(hashes)

            await until(published)  # a subscription takes time
            assert world.router.status().index_blocks == len(hashes)

            await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": prompt}))
            assert (await peer.answer())[0] == 200
            request_id = RequestId("t-1")
            explanation = world.router.explain(request_id)
            assert explanation.placements[0].uncached_tokens == max(1, len(ids) - 16 * len(hashes))

            removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
            copies = [removed] * number
            publisher.send_multipart([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, copies, 0])])
            await until(lambda: world.router.status().index_blocks == 0)
            publisher.send_multipart([b"", (number + 1).to_bytes(8, "big"), b"\xc1 no msgpack"])
            payload = msgspec.msgpack.encode([0.0, [stored], 0])
            publisher.send_multipart([b"", (number + 2).to_bytes(8, "big"), payload])
            await until(lambda: world.router.status().index_blocks == len(hashes))
            assert world.serving() == 1


async def test_models_of_other_workers_are_served_too(server):
    async with a_relay(server, only=False) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        assert (await peer.answer())[0] == 200
        await peer.send(post(COMPLETIONS, {**STREAMING_REQUEST, "model": "own"}))
        status, _, content = await peer.answer()

        assert (status, error_of(content)["code"]) == (404, "model_not_found")  # same error as over the OpenAI API
        assert len(server.seen) == 1
        await world.settled()


async def explained(request_id, address):
    """Return the output of `fleet explain`."""
    command = (sys.executable, "-m", "fleet.cli.main", "explain", request_id, "--address", address, "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    output, _ = await process.communicate()
    return json.loads(output)


async def test_router_command_serves_external_backends_until_sigterm(servers, model_dir, tmp_path):
    file = tmp_path / "router.toml"
    sections = [
        f'[[openai_workers]]\nworker_id = "w{index}"\nurl = "{server.url}"\nmodel = "mock"\ntokenizer = "{model_dir}"\n'
        for index, server in enumerate(servers)
    ]
    listening = 'http_listen = "127.0.0.1:0"\ngrpc_listen = "127.0.0.1:0"\nhttp.max_body_bytes = 4096\n'
    file.write_text(listening + "".join(sections))
    command = (sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        async with asyncio.timeout(30):
            told = json.loads(await process.stdout.readline())
            url = f"http://{told['http']}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=20, timeout=60) as client:
                stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
                request_id = stream.response.headers["x-request-id"]
                assert await streamed_text(stream) == "abcde"
                (placed,) = (await explained(request_id, told["grpc"]))["placements"]
                chosen = {each["worker_id"]: each for each in placed["candidates"]}[placed["decode"]]
                assert (sum(chosen["parts"].values()), placed["policy"]) == (pytest.approx(chosen["cost"]), "fleet")
                with pytest.raises(openai.APIStatusError) as refused:  # as the settings say
                    await client.with_options(max_retries=0).completions.create(model=MODEL, prompt="x" * 5000)
                assert refused.value.status_code == 413
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("drain_timeout_ms", [50, 60_000])
async def test_answers_continue_after_sigterm_for_the_drain_time(server, model_dir, tmp_path, drain_timeout_ms):
    told_to_end = asyncio.Event()

    async def until_told(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        await exchange.event(token("a"))
        await told_to_end.wait()
        await exchange.event(token("b"))
        await exchange.event(b"[DONE]")
        await exchange.end()

    server.play = until_told
    own = {"worker_id": "w", "url": server.url, "model": "mock", "tokenizer": str(model_dir)}
    settings = {"openai_workers": [own], "drain_timeout_ms": drain_timeout_ms}
    settings |= dict.fromkeys(("http_listen", "grpc_listen"), "127.0.0.1:0")
    file = tmp_path / "router.json"
    file.write_text(json.dumps(settings))
    command = (sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        async with asyncio.timeout(30):
            address = json.loads(await process.stdout.readline())["http"]
            async with openai.AsyncOpenAI(
                base_url=f"http://{address}/v1", api_key="none", max_retries=20, timeout=20
            ) as client:
                stream = aiter(await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
                assert (await anext(stream)).choices[0].delta.content == "a"
                process.send_signal(signal.SIGTERM)
                if drain_timeout_ms < 1000:
                    async with asyncio.timeout(8):  # less than the default time
                        assert await process.wait() == 0
                    return

                async def closed() -> bool:
                    return not await listens(address)

                await until_answered(closed)
                told_to_end.set()
                assert (await anext(stream)).choices[0].delta.content == "b"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def listens(address: str) -> bool:
    """Return whether the port is open; a connection that is reset says only that it was open when the attempt began."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        return True
    writer.close()
    return True


async def test_router_command_rejects_bad_settings_in_one_line(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text('[[openai_workers]]\nworker_id = "w0"\nurl = "http://x"\nmodel = "m"\ntokenizer = "/nowhere"\n')
    command = (sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
    async with asyncio.timeout(30):
        _, errors = await process.communicate()

    assert process.returncode == 3
    (line,) = errors.decode().splitlines()
    assert line.startswith("fleet: tokenizer of w0 in openai_workers: /nowhere: is not a folder")
