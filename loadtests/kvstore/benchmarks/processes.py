"""Benchmark between processes of one host: a client fetches blocks by each data path, compared with the bare data path without a store."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from kvstore.buffers import ByteArray
from kvstore.client.store_client import StoreClient
from kvstore.errors import StoreUnreachable
from loadtests.environments import SystemUnavailable
from loadtests.kvstore.benchmarks.memory import chains, content, copy, named, speed
from loadtests.kvstore.benchmarks.plan import MIB, BenchmarkPlan
from loadtests.kvstore.benchmarks.source_process import CHUNK_BYTES
from loadtests.kvstore.compared.systems import MOONCAKE, ComparedSystems
from loadtests.kvstore.comparison import BenchmarkLine, Contestant, LineDirection
from loadtests.kvstore.nodes import ROOT, StoreNode, environment, running

BLOCK_BYTES = MIB
CALL_SECONDS = 30.0
START_SECONDS = 60.0
POLL_SECONDS = 20e-6


@contextmanager
def lines(plan: BenchmarkPlan, peers: ComparedSystems) -> Iterator[list[BenchmarkLine]]:
    """Yield a line for each data path."""
    blocks = plan.crossing_bytes // BLOCK_BYTES
    size = f"{plan.crossing_bytes // MIB} MiB"
    with ExitStack() as held:
        settings = {"capacity_bytes": 2 * plan.crossing_bytes, **_nixl_settings()}
        node = cache(lambda: held.enter_context(running(**settings)))  # starts when it is first needed
        room = np.ones((blocks, BLOCK_BYTES), dtype=np.uint8)
        source = content(BLOCK_BYTES, blocks)
        fetched = peers.get(BLOCK_BYTES, blocks, fresh=False)
        # LMCache, the other compared system, has no data path between processes.
        over_sockets = {name: each for name, each in fetched.items() if name == MOONCAKE}

        def memcpy() -> float:
            return speed(source.nbytes, lambda: copy(source, room))

        def line(name: str, limit: Contestant, limit_is: str, path: str, peers: dict[str, Contestant]) -> BenchmarkLine:
            return BenchmarkLine(
                name=f"process to process, {size}, {name}",
                unit="GB/s",
                better=LineDirection.MORE,
                limit=limit,
                limit_is=limit_is,
                fleet=_Fetch(held, node, path, source, room),
                peers=peers,
            )

        yield [
            line("shared memory", memcpy, "memcpy", "shm", {}),
            line("TCP", _Socket(held, room), "a socket and nothing else", "tcp", over_sockets),
            line("NIXL", _Nixl(held, room), "NIXL and nothing else", "nixl", over_sockets),
        ]


def _nixl_settings() -> dict[str, Any]:
    """Return the settings by which a node offers NIXL; none if NIXL is not installed."""
    return {"nixl": "require"} if find_spec("nixl") is not None else {}


class _Fetch:
    """Contestant: Fleet's client fetches all blocks over one data path."""

    def __init__(self, held: ExitStack, node: Callable[[], StoreNode], path: str, source: ByteArray, room: ByteArray):
        self._held = held
        self._node = node
        self._path = path
        self._source = source
        self._room = room
        self._names = next(chains(len(source)))
        self._client: StoreClient | None = None

    def __call__(self) -> float:
        client = self._open()
        client.write(self._names, list(self._source))
        room = list(self._room)

        def get() -> None:
            match = client.match(self._names, lease_seconds=30)
            arrived = client.read(match, range(len(match)), room[: len(match)])
            client.release(match.lease_id)
            assert len(arrived) == len(room), f"{len(arrived)} of {len(room)} blocks are held"
            assert all(arrived), "a block did not arrive"

        return speed(self._source.nbytes, get)

    def _open(self) -> StoreClient:
        if self._client is None:
            try:
                client = StoreClient.connect(
                    self._node().address,
                    named(BLOCK_BYTES),
                    prefer=[self._path],
                    timeout_seconds=START_SECONDS,
                    call_timeout_seconds=CALL_SECONDS,
                )
            except (ValueError, StoreUnreachable) as error:
                raise SystemUnavailable(f"{self._path}: {error}") from error
            self._client = self._held.enter_context(client)
        return self._client


class _SourceProcess:
    """Starts `source_process`, which holds the bytes that are fetched without a store."""

    def __init__(self, held: ExitStack, kind: str, size: int):
        process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.kvstore.benchmarks.source_process", kind, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment(),
        )
        held.callback(_end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemUnavailable(f"the process that offers bytes by {kind} did not start")
        self.announcement: dict[str, Any] = json.loads(line)


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.kill()
    process.wait(START_SECONDS)
    process.stdout.close()


class _Socket:
    """Contestant: fetches all bytes from the source process through one plain TCP connection."""

    def __init__(self, held: ExitStack, room: ByteArray):
        self._held = held
        self._room = room.reshape(-1)
        self._connection: socket.socket | None = None

    def __call__(self) -> float:
        if self._connection is None:
            source = _SourceProcess(self._held, "socket", self._room.nbytes)
            self._connection = self._held.enter_context(
                socket.create_connection(("127.0.0.1", source.announcement["port"]))
            )
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return speed(self._room.nbytes, self._fetch)

    def _fetch(self) -> None:
        assert self._connection is not None
        self._connection.sendall(b"x")
        left = self._room.data
        while len(left):
            count = self._connection.recv_into(left)
            assert count, "the other side closed the connection"
            left = left[count:]


class _Nixl:
    """Contestant: fetches all bytes from the source process by one NIXL transfer with many descriptors."""

    def __init__(self, held: ExitStack, room: ByteArray):
        self._held = held
        self._room = room.reshape(-1)
        self._transfer: Callable[[], None] | None = None

    def __call__(self) -> float:
        if self._transfer is None:
            self._transfer = self._connect()
        return speed(self._room.nbytes, self._transfer)

    def _connect(self) -> Callable[[], None]:
        try:
            from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - optional, and slow to load
        except ImportError as error:
            raise SystemUnavailable(f"nixl: {error}; `fleet doctor` says how to install it") from error
        source = _SourceProcess(self._held, "nixl", self._room.nbytes)
        agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        here = self._room.ctypes.data
        agent.register_memory([(here, self._room.nbytes, 0, "")], "DRAM")
        peer = agent.add_remote_agent(bytes.fromhex(source.announcement["metadata"]))

        def descriptors(address: int) -> Any:
            pieces = range(0, self._room.nbytes, CHUNK_BYTES)
            return agent.get_xfer_descs([(address + start, CHUNK_BYTES, 0) for start in pieces], "DRAM")

        local, remote = descriptors(here), descriptors(source.announcement["address"])

        def transfer() -> None:
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(handle)
            deadline = time.monotonic() + CALL_SECONDS
            while state != "DONE":
                assert state != "ERR", "the transfer failed"
                assert time.monotonic() < deadline, "the transfer does not end"
                time.sleep(POLL_SECONDS)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)

        return transfer
