"""OpenAI-compatible servers on real sockets, whose answers a test scripts, and a router in front of them."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any

import openai
from msgspec import Struct
from prometheus_client import CollectorRegistry

from fleet.backends.external.workers import ExternalBackends
from fleet.core.ids import ModelName
from fleet.core.system_clock import SystemClock, unix_nanoseconds
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.access_log import AccessLog
from fleet.frontend.generation import Generation
from fleet.frontend.metrics.relay import RelayMetrics
from fleet.frontend.openai.prompt_keys import PromptReader, SecretBlockKeys
from fleet.frontend.openai.relay import Relay
from fleet.frontend.openai.relayed_paths import RelayedPaths
from fleet.frontend.openai.service import HttpFrontend, open_http_frontend
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.settings import HttpSettings
from fleet.recording.access_records import AccessRecordFile
from fleet.router.machine import RouterMachine
from fleet.router.server import RouterServer
from fleet.router.settings.router import OpenAiWorkerSettings, RouterSettings
from fleet.router.tenants import Tenants, TenantSettings
from tests.support.fleet_processes import start_service
from tests.support.servers.processes import a_free_port
from tests.support.waiting import pace, turns, until

MODEL = ModelName("mock")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "say five letters"}]
STREAMING_REQUEST = {"model": MODEL, "prompt": "say five letters", "stream": True}
METERED_USAGE = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
EVENTS = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"


class ReceivedRequest(Struct):
    """Holds a request as the server received it."""

    start: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


class ServerExchange(Struct):
    """Holds one request and the connection for its answer."""

    seen: ReceivedRequest
    writer: asyncio.StreamWriter

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def respond(self, status: int, content: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", "content-type: application/json", f"content-length: {len(content)}"]
        await self.send("\r\n".join([*lines, *headers, "", ""]).encode() + content)

    async def begin_events(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\n" + EVENTS + b"connection: keep-alive\r\n\r\n")

    async def event(self, content: bytes) -> None:
        await self.send(chunk(b"data: " + content + b"\n\n"))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")


AnswerScript = Callable[[ServerExchange], Awaitable[None]]


def chunk(content: bytes) -> bytes:
    return b"%x\r\n" % len(content) + content + b"\r\n"


def token(text: str, *, chat: bool = True) -> bytes:
    choice = {"index": 0, "finish_reason": None, **({"delta": {"content": text}} if chat else {"text": text})}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return json.dumps({"id": "x", "object": kind, "created": 1, "model": MODEL, "choices": [choice]}).encode()


async def five_tokens(exchange: ServerExchange) -> None:
    """Answer with five tokens: as a stream if the request asks for one, otherwise as one object."""
    chat = "chat" in exchange.seen.start
    if not exchange.seen.json.get("stream"):
        message = {"message": {"role": "assistant", "content": "abcde"}} if chat else {"text": "abcde"}
        answer = {
            "id": "x", "object": "chat.completion" if chat else "text_completion", "created": 1, "model": MODEL,
            "choices": [{"index": 0, "finish_reason": "stop", **message}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
        }  # fmt: skip
        await exchange.respond(200, json.dumps(answer).encode())
        return
    await exchange.begin_events()
    for text in "abcde":
        await exchange.event(token(text, chat=chat))
    await exchange.event(b"[DONE]")
    await exchange.end()


async def metered_tokens(exchange: ServerExchange) -> None:
    """Answer with five tokens. Add the usage as OpenAI's servers do: to a stream only if the request asks for it."""
    asked = exchange.seen.json
    if not asked.get("stream"):
        body = {
            "choices": [{"index": 0, "text": "abcde", "finish_reason": "stop"}],
            "usage": METERED_USAGE,
            "model": "big",
        }
        await exchange.respond(200, json.dumps(body).encode())
        return
    await exchange.begin_events()
    for text in "abcde":
        await exchange.event(token(text, chat=False))
    if (asked.get("stream_options") or {}).get("include_usage"):
        await exchange.event(json.dumps({"choices": [], "usage": METERED_USAGE}).encode())
    await exchange.event(b"[DONE]")
    await exchange.end()


class OpenAiServer:
    """Runs one server. It answers health checks; `play` answers the other requests."""

    def __init__(self) -> None:
        self.play: AnswerScript = five_tokens
        self.health_status = 200
        self.health_seconds = 0.0  # delay of a health answer
        self.may_join: Callable[[], bool] = lambda: True  # health checks are answered only once this returns True
        self.tokenise: Callable[[str], list[int]] | None = None  # None: the server cannot tokenize
        self.seen: list[ReceivedRequest] = []
        self.connections = 0  # number of connections so far, except those of health checks
        self.health_checks = 0
        self.open = 0  # number of open connections that have carried requests
        self.cut = 0  # number of requests whose connection was closed before the end of their answer
        self.port = a_free_port()  # a restarted server uses the same port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Stop listening, and abort all connections, as if the process were killed."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await turns()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        counted = False
        try:
            while (seen := await _read(reader)) is not None:
                if seen.start.startswith("GET"):
                    self.health_checks += 1
                    await pace(self.health_seconds, "the server is slow to answer a health check")
                    await until(self.may_join)
                    await ServerExchange(seen, writer).respond(self.health_status, b"{}", "connection: close")
                    break
                if seen.start.startswith("POST /tokenize "):
                    tokens = {} if self.tokenise is None else {"tokens": self.tokenise(seen.json["prompt"])}
                    status = 200 if tokens else 404
                    await ServerExchange(seen, writer).respond(status, json.dumps(tokens).encode(), "connection: close")
                    break
                if not counted:
                    counted = True
                    self.connections += 1
                    self.open += 1
                self.seen.append(seen)
                await self._answer(ServerExchange(seen, writer), reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= counted
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, exchange: ServerExchange, reader: asyncio.StreamReader) -> None:
        """Answer a request, and stop when the client has closed its connection, like real engines."""
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(self._until_gone(exchange))
            while not answer.done():
                await asyncio.wait([answer], timeout=0.005)
                if (reader.at_eof() or exchange.writer.transport.is_closing()) and not answer.done():
                    answer.cancel()
                    break
        if answer.cancelled() or answer.result():
            self.cut += 1
            raise ConnectionResetError

    async def _until_gone(self, exchange: ServerExchange) -> bool:
        try:
            await self.play(exchange)
        except ConnectionError:
            return True
        return False


async def _read(reader: asyncio.StreamReader) -> ReceivedRequest | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    start, *lines = head[:-4].split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return ReceivedRequest(start, headers, await reader.readexactly(int(headers.get("content-length", 0))))


def fetch(address: str, method: str, path: str, body: str | None = None) -> str:
    """Send one request on a new connection, so that any router process at the address may answer; return the body."""
    with closing(HTTPConnection(address, timeout=60)) as connection:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
    assert answer.status == 200, text
    return text


@asynccontextmanager
async def routers_in_front_of(
    folder: Path, servers: Sequence[OpenAiServer], processes: int, **more: Any
) -> AsyncIterator[str]:
    """Run `fleet serve router` with `processes` router processes, and yield its HTTP address; stop the servers at the end."""
    workers = [{"worker_id": f"w{number}", "url": server.url, "model": MODEL} for number, server in enumerate(servers)]
    address = f"127.0.0.1:{a_free_port()}"
    settings = {"http_listen": address, "grpc_listen": f"127.0.0.1:{a_free_port()}", "openai_workers": workers} | more
    log = folder / "router.log"
    with log.open("w") as output:
        options = (folder / "router.json", "--processes", str(processes))
        process, endpoints = await asyncio.to_thread(
            lambda: start_service("router", settings, *options, stdout=output, stderr=output)
        )
    try:
        assert endpoints, log.read_text()
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)
        for server in servers:
            await server.stop()


class RelaySetup(Struct):
    http: HttpFrontend
    router: RouterServer
    machine: RouterMachine
    workers: ExternalBackends
    registry: CollectorRegistry
    reader: PromptReader
    tenants: Tenants
    relay: Relay
    generation: Generation

    @property
    def url(self) -> str:
        return f"http://{self.http.address}"

    async def settled(self) -> None:
        """Wait until no request is active, and check that nothing is reserved."""
        await until(lambda: self.router.status().active == 0)
        self.machine.check()
        for pool in self.router.status().pools:
            for worker in pool.workers:
                assert (worker.booked_requests, worker.booked_blocks, worker.booked_prefill_tokens) == (0, 0, 0)

    def running(self, worker_id: str) -> int:
        return next(
            (w.booked_requests for p in self.router.status().pools for w in p.workers if w.worker_id == worker_id), -1
        )

    def serving(self) -> int:
        return sum(w.state == "serving" for p in self.router.status().pools for w in p.workers)


@asynccontextmanager
async def a_relay(
    *servers: OpenAiServer,
    model_dir: Path | None = None,
    http: HttpSettings | None = None,
    tenants: dict[str, TenantSettings] | None = None,
    limits: dict[str, object] | None = None,
    only: bool = True,
    seconds: float = 100.0,
    records: AccessRecordFile | None = None,
    **worker: object,
) -> AsyncIterator[RelaySetup]:
    """Run a router in front of these servers, for at most `seconds`. The servers join in order as workers `w0`, `w1` and so on."""
    clock = SystemClock()
    fields = {"model": MODEL, "probe_seconds": 0.1, "tokenizer": str(model_dir or ""), **worker}
    settings = RouterSettings(
        openai_workers=tuple(
            OpenAiWorkerSettings(worker_id=f"w{index}", url=server.url, **fields)
            for index, server in enumerate(servers)
        ),
        **{"connect_timeout_seconds": 20.0, **(limits or {})},
    )
    machine = RouterMachine(settings, Random(1))
    codec = load_codec(model_dir) if model_dir else None
    codecs = {MODEL: codec} if codec else {}
    workers = ExternalBackends(settings.openai_workers, settings.connect_timeout_seconds, clock, codecs)
    router = RouterServer(machine, workers, clock)
    registry = CollectorRegistry()
    shared = Tenants(tenants or {}, clock.now())
    reader = PromptReader(
        MODEL,
        [each.compared_tokens for each in settings.openai_workers],
        codec,
        clock,
        None if "kv_events" in worker else SecretBlockKeys(),
    )
    metrics = RelayMetrics(lambda: ())
    registry.register(metrics)
    threads = TokenizerThreads()
    readers = {MODEL: reader}
    readers |= {name: reader.for_adapter(name) for each in settings.openai_workers for name in each.adapters}
    paths = RelayedPaths.of(settings.external_paths)
    access = None if records is None else AccessLog(router, clock, unix_nanoseconds, logs=False, records=records)
    generation = Generation(
        router,
        {},
        clock=clock,
        tenants=shared,
        tenant_secret=b"",
        metrics=RouterProcessMetrics(registry),
        threads=threads,
    )
    relay = Relay(
        router,
        workers,
        readers,
        shared,
        metrics,
        clock,
        threads,
        id_prefix="t",
        only=only,
        paths=paths,
        is_running=generation.serves,
        named_ids=generation.relayed_ids,
        access=access,
    )
    async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
        async with open_http_frontend(
            "127.0.0.1:0", http or HttpSettings(), generation, registry, clock, relay
        ) as front:
            world = RelaySetup(front, router, machine, workers, registry, reader, shared, relay, generation)
            for index, server in enumerate(servers):
                server.may_join = lambda before=index: world.serving() >= before
            running = [tasks.create_task(router.run()), tasks.create_task(workers.run(router.hear))]
            await until(lambda: world.serving() == len(servers))
            for server in servers:
                server.may_join = lambda: True
            yield world
        for task in running:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait(running)
    threads.close()


@asynccontextmanager
async def an_openai_client(world: RelaySetup, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


async def streamed_text(stream) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def hold_after_first_token(exchange: ServerExchange) -> None:
    """Send one token, and then nothing more."""
    await exchange.begin_events()
    await exchange.event(token("a"))
    await asyncio.Event().wait()


async def never_answer(exchange: ServerExchange) -> None:
    await asyncio.Event().wait()
