"""A network for pods on one machine: namespaces, a bridge between them, and proxies in front of Services.

Rules:

1. The node is a network namespace with a bridge. A pod is a namespace with an interface on the bridge and an address of
its own, so all pods may listen on the same port. The machine's own network is not changed.
2. A socket belongs to the namespace in which it was made, whatever process uses it afterwards. So this process makes
sockets in the node's namespace, listens with them on the addresses of Services and connects to pods, and stays in its
own namespace otherwise.
3. The kernel ends every process when the thread that started it ends.
"""

import asyncio
import contextlib
import ctypes
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self

from kvstore.net.listeners import stop_listening
from tests.support.waiting import turns

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
NODE_ADDRESS = "10.244.0.1"
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
CHUNK = 1 << 16
DIAL_SECONDS = 5
# Number of turns of the event loop until an accepted connection has its transport, its protocol and its task.
ACCEPTING_TURNS = 4

_libc = ctypes.CDLL(None, use_errno=True)

Choose = Callable[[], tuple[str, int] | None]
"""Function that returns the destination of a new connection to a Service; None if there is none."""


def why_not() -> str:
    """Return the reason why this machine cannot have such a network; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces for pods need root"
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if not any((Path(folder) / program).exists() for folder in ("/usr/bin", "/bin", "/usr/sbin", "/sbin")):
            return f"network namespaces for pods need the program {program}"
    return ""


async def run(*command: str) -> None:
    """Run a command.

    Raises:
        RuntimeError: The command failed; the message has its output.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {said.decode().strip()}")


@contextlib.contextmanager
def inside(pid: int) -> Iterator[None]:
    """Put this thread into the network namespace of a process while the context is open; the body must not await anything."""
    with Path("/proc/thread-self/ns/net").open() as home, Path(f"/proc/{pid}/ns/net").open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Network:
    """Manages the network of one node; open it with `async with`."""

    async def __aenter__(self) -> Self:
        command = (*DIE_WITH_US, "unshare", "--net", "sh", "-c", "echo; exec sleep infinity")
        self._node = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert self._node.stdout is not None
        await self._node.stdout.readline()
        self._proxies: dict[tuple[str, int], Proxy] = {}
        self._ways: list[Proxy] = []
        self._addresses: set[str] = set()
        self._legs = 1
        await self._in_node(
            "ip link set lo up; ip link add pods type bridge; ip link set pods up;"
            f"ip addr add {NODE_ADDRESS}/16 dev pods"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for proxy in (*self._proxies.values(), *self._ways):
            await proxy.close()
        self._node.kill()
        await self._node.wait()

    async def connect(self, pid: int) -> str:
        """Give the network namespace of a process an interface on the bridge and an address, and return the address."""
        self._legs += 1
        address = f"10.244.{self._legs // 256}.{self._legs % 256}"
        leg = f"pod{self._legs}"
        await self._in_node(f"ip link add {leg} type veth peer name eth0 netns {pid}; ip link set {leg} master pods up")
        await run(
            *("nsenter", f"--net=/proc/{pid}/ns/net", "sh", "-ec"),
            f"ip link set lo up; ip addr add {address}/16 dev eth0; ip link set eth0 up; ip route add default via {NODE_ADDRESS}",
        )
        return address

    async def dial(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect from the node's network to an address."""
        with inside(self._node.pid):
            dialling = socket.socket()
        dialling.setblocking(False)
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await asyncio.get_running_loop().sock_connect(dialling, (host, port))
                return await asyncio.open_connection(sock=dialling)
        except BaseException:
            dialling.close()
            raise

    async def serve(self, address: str, port: int, choose: Choose) -> None:
        """Run the proxy of a Service, unless it runs already; `withdraw` ends it."""
        if (address, port) in self._proxies:
            return
        if address not in self._addresses:
            self._addresses.add(address)
            await self._in_node(f"ip addr add {address}/32 dev lo")
        with inside(self._node.pid):
            listening = socket.create_server((address, port))
        self._proxies[address, port] = proxy = Proxy(self, choose)
        await proxy.open(listening)

    async def withdraw(self, address: str, port: int) -> None:
        await self._proxies.pop((address, port)).close()

    def served(self) -> set[tuple[str, int]]:
        return set(self._proxies)

    async def lead(self, to: tuple[str, int], *, pid: int | None = None, port: int = 0) -> tuple["Proxy", str]:
        """Forward a port of the loopback interface to an address in another network.

        If `pid` is None, the port is on this machine, and the address in the node's network. Otherwise the port is in the
        namespace of the process `pid`, and the address on this machine.
        """
        if pid is None:
            proxy = Proxy(self, lambda: to)
            listening = socket.create_server(("127.0.0.1", port))
        else:
            proxy = Proxy(None, lambda: to)
            with inside(pid):
                listening = socket.create_server(("127.0.0.1", port))
        self._ways.append(proxy)
        await proxy.open(listening)
        return proxy, f"127.0.0.1:{listening.getsockname()[1]}"

    async def _in_node(self, script: str) -> None:
        await run("nsenter", f"--net=/proc/{self._node.pid}/ns/net", "sh", "-ec", script)


class Proxy:
    """Forwards connections to the address that `choose` returns, and closes them if it returns none."""

    def __init__(self, network: Network | None, choose: Choose) -> None:
        """Prepare a proxy that connects from the node of `network`; None: from this machine."""
        self._network = network
        self._choose = choose
        self._server: asyncio.Server | None = None
        self._closed = False
        self._carried: set[asyncio.Task[None]] = set()
        self._transports: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()

    async def open(self, listening: socket.socket) -> None:
        # The server starts in a second step, so that `close` knows it even if its start is cancelled because a pod is deleted.
        self._server = await asyncio.start_server(self._accept, sock=listening, start_serving=False)
        await self._server.start_serving()

    async def close(self) -> None:
        """Refuse new connections, and close all accepted ones, even those that have no task yet."""
        self._closed = True
        if self._server is not None:
            stop_listening(self._server)
        await turns(ACCEPTING_TURNS)
        for carried in list(self._carried):
            carried.cancel()
        if self._carried:
            await asyncio.wait(self._carried)
        for transport in list(self._transports):  # some connections still have data to send
            transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._carried.add(task)
        self._transports.add(writer.transport)
        try:
            chosen = self._choose()
            if chosen is None:
                writer.transport.abort()
            else:
                await self._carry(chosen, reader, writer)
                writer.close()
        except (OSError, TimeoutError, ExceptionGroup, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._carried.discard(task)

    async def _carry(self, to: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dial: Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
        dial = asyncio.open_connection if self._network is None else self._network.dial
        far_reader, far_writer = await dial(*to)
        self._transports.add(far_writer.transport)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(reader, far_writer))
                tasks.create_task(_copy(far_reader, writer))
            far_writer.close()
        except BaseException:
            far_writer.transport.abort()
            raise


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(CHUNK):
        writer.write(part)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
