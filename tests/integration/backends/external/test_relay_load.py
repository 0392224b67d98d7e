"""Load tests of the relay: many streams at once, and clients that hardly read."""

import asyncio
import json
import socket

import pytest

from tests.support.backends.openai_servers import COMPLETIONS, EVENTS, MODEL, RelaySetup, a_relay, chunk, token
from tests.support.frontend.http_clients import post
from tests.support.waiting import pace, turns, until

pytestmark = pytest.mark.integration

STREAMS = 2000
SECONDS = 120.0  # three seconds on a core of its own
TOKENS = 3
SLOW_BYTES = 32 << 20  # for a client that reads one byte a second
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class HeldAnswer(asyncio.Protocol):
    """One connection to the server: one request at a time, whose answer the test writes."""

    def __init__(self, server: "CrowdServer") -> None:
        self._server = server
        self._received = b""
        self.prompt = ""
        self.writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            self.transport.close()
            return
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) < length:
            return
        self._received = b""
        self.prompt = json.loads(body)["prompt"]
        self._server.streams[self.prompt] = self
        self.transport.write(b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\n")

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def say(self, text: str) -> None:
        self.transport.write(chunk(b"data: " + token(text, chat=False) + b"\n\n"))

    def end(self) -> None:
        self.transport.write(END)


class CrowdServer:
    """A server that answers any number of requests at once."""

    def __init__(self) -> None:
        self.streams: dict[str, HeldAnswer] = {}  # by prompt
        self.url = ""

    async def start(self) -> None:
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: HeldAnswer(self), "127.0.0.1", 0, backlog=4096
        )
        self.url = f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._listening.close()
        for stream in self.streams.values():
            stream.transport.abort()


class StreamingClient(asyncio.Protocol):
    """One client's connection; it takes everything that comes."""

    def __init__(self, prompt: str) -> None:
        self._ask = post(COMPLETIONS, {"model": MODEL, "prompt": prompt, "stream": True})
        self.received = b""
        self.tokens = 0
        self.ended = False
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._ask)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.tokens = self.received.count(b'"text"')
        self.ended = self.received.endswith(END)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    @property
    def refused(self) -> bool:
        """True if no answer will come, or another one than a stream."""
        return self.lost or not b"HTTP/1.1 200".startswith(self.received[:12])

    def text(self) -> str:
        """Return the text of the answer."""
        events = [line[6:] for line in self.received.split(b"\r\n") if line.startswith(b"data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def clients(world: RelaySetup, server: CrowdServer, prompts: list[str]) -> dict[str, StreamingClient]:
    """Open that many clients, a hundred at a time; all answers have begun and none has ended."""
    host, _, port = world.http.address.rpartition(":")
    loop = asyncio.get_running_loop()
    asking = {}
    for first in range(0, len(prompts), 100):
        some = prompts[first : first + 100]
        made = await asyncio.gather(
            *(loop.create_connection(lambda prompt=prompt: StreamingClient(prompt), host, int(port)) for prompt in some)
        )
        asking |= dict(zip(some, (client for _, client in made), strict=True))
        await until_begun(world, server, asking)
    return asking


async def until_begun(world: RelaySetup, server: CrowdServer, asking: dict[str, StreamingClient]) -> None:
    """Wait until the server has all requests; fail at once with the cause if one of them was refused."""

    def missing() -> set[str]:
        return asking.keys() - server.streams.keys()

    def all_there() -> bool:
        refused = {prompt: asking[prompt].received for prompt in missing() if asking[prompt].refused}
        assert not refused, f"{len(refused)} refused: {next(iter(refused.items()))}"
        return not missing()

    def said() -> str:
        counters = world.router.status().counters
        return f"{len(missing())} of {len(asking)} requests did not arrive, such as {min(missing())}: {counters}"

    await until(all_there, SECONDS / 2, said)


@pytest.fixture
async def server():
    server = CrowdServer()
    await server.start()
    yield server
    server.stop()


async def test_two_thousand_streams_get_their_own_tokens(server):
    """Begin all streams before the first one ends; each token comes while all other streams run."""
    prompts = [f"stream {number}" for number in range(STREAMS)]
    async with a_relay(
        server, max_running=STREAMS, limits={"connect_timeout_seconds": SECONDS}, seconds=SECONDS, probe_seconds=SECONDS
    ) as world:
        asking = await clients(world, server, prompts)
        for step in range(TOKENS):
            for prompt in prompts:
                server.streams[prompt].say(f"[{prompt} {step}]")
            await until(lambda: all(client.tokens == step + 1 for client in asking.values()), SECONDS)  # noqa: B023
            assert world.running("w0") == STREAMS
        for prompt in prompts:
            server.streams[prompt].end()
        await until(lambda: all(client.ended for client in asking.values()))

        for prompt, client in asking.items():
            assert client.text() == "".join(f"[{prompt} {step}]" for step in range(TOKENS))
            client.transport.close()
        await world.settled()
        counters = world.router.status().counters
        assert (counters.completed, counters.refused) == (STREAMS, {})


async def test_slow_reader_costs_other_clients_nothing(server):
    """Check that only the slow client's server stops, and that the client gets everything when it reads on."""
    prompts = [f"fast {number}" for number in range(50)]
    async with a_relay(
        server, max_running=64, limits={"connect_timeout_seconds": SECONDS}, seconds=SECONDS, probe_seconds=SECONDS
    ) as world:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        host, _, port = world.http.address.rpartition(":")
        await loop.sock_connect(slow, (host, int(port)))
        await loop.sock_sendall(slow, post(COMPLETIONS, {"model": MODEL, "prompt": "slow", "stream": True}))
        await until(lambda: "slow" in server.streams)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while sent < SLOW_BYTES:
                await until(lambda: server.streams["slow"].writable)
                server.streams["slow"].say("x" * 60_000)
                sent += 60_000
                await turns()
            server.streams["slow"].end()

        async def dribble() -> None:
            """Read a byte a second."""
            while True:
                assert len(await loop.sock_recv(slow, 1)) == 1
                await pace(1, "the client reads a byte a second")

        async with asyncio.TaskGroup() as tasks:
            flooding, dribbling = tasks.create_task(flood()), tasks.create_task(dribble())
            await until(lambda: not server.streams["slow"].writable)
            asking = await clients(world, server, prompts)
            for step in range(100):
                for prompt in prompts:
                    server.streams[prompt].say("y")
                await until(lambda: all(client.tokens == step + 1 for client in asking.values()))  # noqa: B023
            for prompt in prompts:
                server.streams[prompt].end()
            await until(lambda: all(client.ended for client in asking.values()))
            assert not flooding.done()
            assert not dribbling.done()
            assert sent < 24 << 20, "more than the kernel buffers of four sockets take"
            assert world.running("w0") == 1, "the slow client is not cut off"

            dribbling.cancel()
            received = 0
            while received < SLOW_BYTES:
                received += len(await loop.sock_recv(slow, 1 << 20))
        slow.close()
        for client in asking.values():
            client.transport.close()
        await world.settled()
