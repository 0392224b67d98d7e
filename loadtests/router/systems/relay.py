"""Floor of the benchmark, that is, its lower limit: a relay that sends requests to workers in turn, and parses nothing.

    python -m loadtests.router.systems.relay WORKER_PORT... [--tls CERTIFICATE KEY]    prints its port, one JSON line, when it is ready

The relay takes bytes that a client sends after an answer has begun as the next request. This is right only for clients that wait for
each answer, like the client of this benchmark. So the relay is only a floor for comparison, and not usable as a router.
"""

import argparse
import asyncio
import gc
import json
import os
import ssl
from collections.abc import Iterator
from itertools import cycle
from typing import cast

import uvloop

from fleet.local.process_group import die_with_parent


class RelayUpstream(asyncio.Protocol):
    """A connection to a worker, used by one client connection at a time."""

    client: "RelayClient | None" = None
    transport: asyncio.Transport

    def __init__(self, idle: "list[RelayUpstream]"):
        self.idle = idle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if (client := self.client) is not None:
            client.answered = True
            client.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self.client is not None:
            self.client.transport.close()
        elif self in self.idle:
            self.idle.remove(self)


class RelayClient(asyncio.Protocol):
    answered = True  # True: the next bytes from the client begin a new request
    transport: asyncio.Transport

    def __init__(self, turns: "Iterator[RelayDestination]", loop: asyncio.AbstractEventLoop):
        self._turns = turns
        self._loop = loop
        self._upstream: RelayUpstream | None = None
        self._waiting: list[bytes] = []
        self._dialling: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.answered:
            self.answered = False
            self._release()
            worker = next(self._turns)
            if worker.idle:
                self._take(worker.idle.pop())
            else:
                self._dialling = self._loop.create_task(self._dial(worker))
        if self._upstream is None:
            self._waiting.append(data)
        else:
            self._upstream.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._dialling is not None:
            self._dialling.cancel()
        if self._upstream is None:
            return
        upstream = self._upstream
        if self.answered:
            self._release()
        else:
            upstream.client = None
            upstream.transport.close()

    def _release(self) -> None:
        if self._upstream is not None:
            self._upstream.client = None
            self._upstream.idle.append(self._upstream)
            self._upstream = None

    def _take(self, upstream: RelayUpstream) -> None:
        upstream.client = self
        self._upstream = upstream

    async def _dial(self, worker: "RelayDestination") -> None:
        _, upstream = await self._loop.create_connection(lambda: RelayUpstream(worker.idle), "127.0.0.1", worker.port)
        self._take(upstream)
        upstream.transport.write(b"".join(self._waiting))
        self._waiting.clear()


class RelayDestination:
    def __init__(self, port: int):
        self.port = port
        self.idle: list[RelayUpstream] = []


async def _serve(ports: list[int], tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    turns = cycle([RelayDestination(port) for port in ports])
    server = await loop.create_server(lambda: RelayClient(turns, loop), "127.0.0.1", 0, backlog=1024, ssl=tls)
    gc.freeze()
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await loop.create_future()  # serve until the process is killed


def main() -> None:
    die_with_parent(os.getppid())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ports", type=int, nargs="+", metavar="WORKER_PORT")
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="serve over TLS")
    arguments = parser.parse_args()
    tls = None
    if arguments.tls:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*arguments.tls)
    uvloop.run(_serve(arguments.ports, tls))


if __name__ == "__main__":
    main()
