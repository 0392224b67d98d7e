"""Socket guard: limits the connections of a gRPC server's TCP port.

gRPC's own server accepts connections without a limit, and does not report a connection before its first call. Therefore
the guard finds the connections among the sockets of its own process, and shuts down the ones that exceed a limit.

Rules:

1. A connection is busy while one of its calls is served. A busy connection is never shut down. Calls of the services in
   `UNPROVEN_SERVICES` do not count, because anybody may make them without a proof.
2. One address may have at most the share `ADDRESS_SHARE` of the allowed connections. If it has more, connections of
   this address are shut down until it has this share.
3. If the port still has too many connections, they are shut down one by one, always at the address that has the most
   connections then.
4. Connections that have had no call that counts (rule 1) are shut down first, then idle connections. Within each group,
   the connection that was seen first is shut down first. Therefore a caller that sends a call at once is served, even
   if there are very many silent connections.
5. The sockets are examined only when the number of open files shows that the port may have too many connections, or
   when the guard remembers more than twice as many callers as the port may have connections. At other times, a check
   costs one `stat` call.
"""

import asyncio
import inspect
import logging
import os
import resource
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from heapq import heapify, heappop, heappush
from ipaddress import ip_address
from math import ceil
from typing import Any, Never, TypeVar, cast
from urllib.parse import unquote

import grpc
from msgspec import Struct

UNPROVEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")
LOOK_SECONDS = 0.1
SURVEY_SECONDS = 10.0
"""Maximum time between two surveys of the sockets while the process has more open files than the port may have
connections. If other files were closed since the last survey, there may be too many connections although the number of
open files has not grown."""

LOG_SECONDS = 10.0
MAX_CONNECTIONS = 4096  # maximum number of connections of the port; a router's client ports have the same default
DESCRIPTOR_SHARE = 0.25  # maximum number of connections, as a share of the files that the process may open
ADDRESS_SHARE = 0.9  # maximum share of the connections for one address; a router's client ports have the same default

DESCRIPTORS = "/proc/self/fd"
LAST_RECEIVED = 52  # offset in the kernel's `tcp_info` of the milliseconds since bytes last arrived
TCP_INFO_BYTES = 56

AnyHandler = TypeVar("AnyHandler")
Peer = tuple[str, int]
"""Address and port of a caller."""

log = logging.getLogger(__name__)


class GuardedConnection(Struct, frozen=True, kw_only=True):
    """State of one connection of the port, from which `select_displaced` chooses the connections to shut down."""

    peer: Peer
    busy: bool
    called: bool
    """True if the connection had a call that counts (rule 1)."""
    seen_at: float
    silent_ms: int


def select_displaced(connections: list[GuardedConnection], most: int, per_address: int) -> list[GuardedConnection]:
    """Return the connections that have to be shut down by rules 2 to 4.

    The port may have `most` connections, and one address `per_address` of them.
    """
    by_address: dict[str, list[GuardedConnection]] = defaultdict(list)
    for each in connections:
        by_address[each.peer[0]].append(each)
    sizes = {address: len(members) for address, members in by_address.items()}
    waiting = {
        address: sorted(
            (each for each in members if not each.busy),
            key=lambda each: (each.called, each.seen_at, -each.silent_ms),
            reverse=True,
        )
        for address, members in by_address.items()
    }
    displaced: list[GuardedConnection] = []

    def displace(address: str) -> None:
        displaced.append(waiting[address].pop())
        sizes[address] -= 1

    for address, members in waiting.items():
        while sizes[address] > per_address and members:
            displace(address)
    largest = [(-sizes[address], address) for address, members in waiting.items() if members]
    heapify(largest)
    excess = sum(sizes.values()) - most
    while excess > 0 and largest:
        _, address = heappop(largest)
        displace(address)
        excess -= 1
        if waiting[address]:
            heappush(largest, (-sizes[address], address))
    return displaced


class SocketGuard(grpc.aio.ServerInterceptor):
    """Limits the connections of one gRPC server, by the rules of this module.

    It has to be the server's last interceptor, so that calls that other interceptors refuse do not count. The code that
    starts the server also has to start `run`.
    """

    def __init__(self, most: int | None = None, address_share: float = ADDRESS_SHARE) -> None:
        """Create a guard that allows `most` connections.

        The default is `MAX_CONNECTIONS`, or the share `DESCRIPTOR_SHARE` of the files that the process may open, if
        that is less.
        """
        if most is None:
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = MAX_CONNECTIONS if files < 0 else min(MAX_CONNECTIONS, int(files * DESCRIPTOR_SHARE))
        assert most >= 1, most
        assert 0 < address_share <= 1, address_share
        self.displaced = 0  # number of connections that were shut down since the start
        self._most = most
        self._per_address = ceil(most * address_share)
        self._calls: Counter[Peer] = Counter()
        self._called: set[Peer] = set()
        self._seen_at: dict[Peer, float] = {}
        self._other_files = 0  # number of open files at the last `_survey` that were not connections of the port

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "AnyHandler":
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(UNPROVEN_SERVICES):
            return cast("AnyHandler", handler)
        kind = "_".join(
            "stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming)
        )
        counted = getattr(grpc, f"{kind}_rpc_method_handler")(
            self._counted(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer
        )
        return cast("AnyHandler", counted)

    async def run(self, port: int) -> Never:
        """Limit the connections of this TCP port of the process, until cancelled."""
        loop = asyncio.get_running_loop()
        surveyed_at, logged_at, logged = loop.time(), float("-inf"), 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            files, now = _open_files(), loop.time()
            late = now - surveyed_at >= SURVEY_SECONDS
            if files > self._most + (0 if late else self._other_files) or len(self._called) > 2 * self._most:
                surveyed_at = now
                self._survey(port, files, now)
            if self.displaced > logged and now - logged_at >= LOG_SECONDS:
                extra = {"port": port, "displaced": self.displaced - logged, "most": self._most}
                log.warning("connections without calls displaced, because the port is full", extra=extra)
                logged_at, logged = now, self.displaced

    def _survey(self, port: int, files: int, now: float) -> None:
        """Read the sockets of the port, and shut down the connections that `select_displaced` chooses."""
        found: dict[Peer, tuple[int, int]] = dict(_connections(port))
        self._seen_at = {peer: self._seen_at.get(peer, now) for peer in found}
        self._called &= found.keys()
        connections = [
            GuardedConnection(
                peer=peer,
                busy=peer in self._calls,
                called=peer in self._called,
                seen_at=self._seen_at[peer],
                silent_ms=silent_ms,
            )
            for peer, (_, silent_ms) in found.items()
        ]
        self._other_files = max(0, files - len(found))
        for each in select_displaced(connections, self._most, self._per_address):
            if _shut_down(found[each.peer][0], each.peer):
                self.displaced += 1

    @contextmanager
    def _busy(self, context: Any) -> Iterator[None]:
        peer = _peer(context.peer())
        if peer is None:
            yield
            return
        self._called.add(peer)
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    def _counted(self, behaviour: Any) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            with self._busy(context):
                return await behaviour(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._busy(context):
                async with aclosing(behaviour(request, context)) as answers:
                    async for each in answers:
                        yield each

        return stream if inspect.isasyncgenfunction(behaviour) else answer


def _peer(text: str) -> Peer | None:
    """Return the address and port of a caller from gRPC's ``ipv4:host:port`` or ``ipv6:%5Bhost%5D:port``.

    Return None for a Unix socket.
    """
    kind, _, address = text.partition(":")
    host, _, port = unquote(address).rpartition(":")
    return _key(host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else None


def _key(host: str, port: int) -> Peer:
    found = ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if found.version == 6 else None
    return str(mapped or found), port


def _open_files() -> int:
    """Return the number of open files of this process."""
    return os.stat(DESCRIPTORS).st_size or len(os.listdir(DESCRIPTORS))  # noqa: PTH116, PTH208 - the size is 0 before Linux 6.2


def _connections(port: int) -> Iterator[tuple[Peer, tuple[int, int]]]:
    """Yield the connections of a port: the caller, the descriptor, and the milliseconds since bytes last arrived."""
    for name in os.listdir(DESCRIPTORS):  # noqa: PTH208 - only names are needed
        with _duplicate(int(name)) as found:
            if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                if found.getsockname()[1] != port:
                    continue
                host, its_port = found.getpeername()[:2]  # raises OSError for the listening socket
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            except OSError:
                continue
            (silent_ms,) = struct.unpack_from("=I", info, LAST_RECEIVED)
            yield _key(host, its_port), (int(name), silent_ms)


def _shut_down(descriptor: int, peer: Peer) -> bool:
    """Shut a connection down, unless its descriptor belongs to another file by now; return whether this was done."""
    with _duplicate(descriptor) as found:
        try:
            if found is None or _key(*found.getpeername()[:2]) != peer:
                return False
            found.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            return False
    return True


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield a socket object for a copy of a descriptor, because gRPC may close the descriptor itself at any time.

    Yield None if the descriptor does not belong to a socket.
    """
    copy = -1
    try:
        copy = os.dup(descriptor)
        opened = socket.socket(fileno=copy)
    except OSError:
        if copy >= 0:
            os.close(copy)
        yield None
        return
    with closing(opened):
        yield opened
