"""Load client: keep-alive connections that send prepared bytes; of an answer, they find status, events and end, and parse nothing else."""

import asyncio
import socket
import ssl
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import cycle
from typing import Protocol, cast

import uvloop
from msgspec import Struct

from loadtests.environments import SystemUnavailable

GOOD = b"HTTP/1.1 200"
EVENT = b"data: "
END = b"0\r\n\r\n"  # the end of a chunked answer
START_SECONDS = 30.0
WAIT_SECONDS = 60.0  # time limit for the answers that are missing when the round is over
FAILURES = 20  # a source of requests is given up after this number of failed connections

Next = Callable[[], bytes | None]
"""Function that returns the bytes of the next request, or None if there is none left."""


class CpuMeter(Protocol):
    """Port for measurements of one round that the client cannot make, such as the router's CPU time."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class LoadWindow(Struct, frozen=True, kw_only=True):
    """Results of one round, as the client measured them."""

    requests: int
    failures: int
    seconds: float
    ttft_seconds: float
    cpu_seconds: float  # CPU time of the client
    gap_seconds_p99: float | None = None  # gap between two parts of an answer; None: no answer had two parts
    complaint: str = ""  # message of the first failure


class LoadConnection(asyncio.Protocol):
    """One connection, which sends its next request as soon as an answer has ended."""

    def __init__(self, following: Next, until: "Until", acknowledging: socket.socket | None):
        """Begin without a connection.

        Args:
            following: Returns the next request.
            until: The instant from which on no request is sent any more.
            acknowledging: The connection's socket, if data must be acknowledged at once; None: the system may delay acknowledgements.
        """
        self._acknowledging = acknowledging
        self.following = following
        self._until = until
        self._tail = b""
        self._fresh = True  # True until the first byte of the answer has arrived
        self._begun = False  # True after the first token has arrived
        self._sent_at = 0.0
        self._transport: asyncio.Transport
        self.completed = 0
        self.latencies: list[float] = []
        self.gaps: list[float] = []
        self._latest_event_at = 0.0
        self.complaint = ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.complaint = f"the connection ended within an answer ({exc or 'closed'})"
            self.ended.set_result(None)

    def send(self) -> None:
        """Send the next request. If none is left, or the time is over, set `ended`."""
        now = time.perf_counter()
        request = self.following() if now < self._until.at else None
        if request is None:
            self.ended.set_result(None)
            return
        self._fresh = True
        self._begun = False
        self._sent_at = now
        self._transport.write(request)
        if self._acknowledging is not None:
            # The kernel may switch this option off again, so it is set for each request.
            self._acknowledging.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            if self._fresh and not self._is_good(data):
                return
            if EVENT in data:
                self._begun = True
                self._latest_event_at = time.perf_counter()
                self.latencies.append(self._latest_event_at - self._sent_at)
        elif EVENT in data:
            before, self._latest_event_at = self._latest_event_at, time.perf_counter()
            self.gaps.append(self._latest_event_at - before)
        tail = data[-len(END) :]
        if len(tail) < len(END):
            tail = (self._tail + tail)[-len(END) :]
        self._tail = tail
        if tail == END:
            self._tail = b""
            self.completed += 1
            self.send()

    def _is_good(self, data: bytes) -> bool:
        self._fresh = False
        if data.startswith(GOOD):
            return True
        self.complaint = data[:500].decode(errors="replace")
        self.ended.set_result(None)
        self.close()
        return False

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()


class Until:
    """The instant (`time.perf_counter`) from which on no request is sent. It is set when the round begins."""

    at = 0.0


def round_of(
    ports: Sequence[int],
    following: Sequence[Next],
    seconds: float,
    meter: CpuMeter,
    *,
    delayed_acknowledgements: bool = False,
    tls: ssl.SSLContext | None = None,
) -> LoadWindow:
    """Send requests until none is left or the time is over, and wait for the missing answers.

    Args:
        ports: Ports, among which the connections are distributed.
        following: Source of requests of each connection.
        seconds: Time after which no connection sends any more.
        meter: Started when all connections are open and nothing was sent, stopped after the last answer.
        delayed_acknowledgements: Whether the system may delay TCP acknowledgements.
        tls: TLS context of the connections; None: no TLS. Handshakes are complete when the round begins.

    Raises:
        SystemUnavailable: The server refuses connections, does not answer in time, or no answer was good.
    """
    options = DialOptions(delayed_acknowledgements=delayed_acknowledgements, tls=tls)
    return uvloop.run(_round_of(ports, following, seconds, meter, options))


class DialOptions(Struct, frozen=True, kw_only=True):
    """How connections are opened."""

    delayed_acknowledgements: bool
    tls: ssl.SSLContext | None


class _Dialler:
    """Opens the connections of a round; the exit stack closes them."""

    def __init__(self, opened: ExitStack, options: DialOptions):
        self.until = Until()
        self._opened = opened
        self._options = options

    async def connect(self, port: int, following: Next) -> LoadConnection:
        sock = socket.create_connection(("127.0.0.1", port), START_SECONDS)
        sock.setblocking(False)
        acknowledging = None if self._options.delayed_acknowledgements else sock
        tls = self._options.tls
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: LoadConnection(following, self.until, acknowledging),
            sock=sock,
            ssl=tls,
            server_hostname=None if tls is None else "127.0.0.1",
        )
        self._opened.callback(connection.close)
        return connection

    async def keep_asking(self, port: int, connection: LoadConnection) -> list[LoadConnection]:
        """Open a new connection whenever one has failed, so that the load stays the same."""
        tried = [connection]
        while True:
            connection.send()
            await connection.ended
            connection.close()
            if not connection.complaint or len(tried) > FAILURES:
                return tried
            connection = await self.connect(port, connection.following)
            tried.append(connection)


async def _round_of(
    ports: Sequence[int], following: Sequence[Next], seconds: float, meter: CpuMeter, options: DialOptions
) -> LoadWindow:
    with ExitStack() as opened:  # closes all connections; otherwise the event loop may wait for ever
        dialler = _Dialler(opened, options)
        return await _asked(dialler, ports, following, seconds, meter)


async def _asked(
    dialler: _Dialler, ports: Sequence[int], following: Sequence[Next], seconds: float, meter: CpuMeter
) -> LoadWindow:
    try:
        async with asyncio.timeout(START_SECONDS):
            dealt = list(zip(cycle(ports), following, strict=False))
            first = [await dialler.connect(port, each) for port, each in dealt]
        meter.start()
        started, cpu = time.perf_counter(), time.process_time()
        dialler.until.at = started + seconds
        async with asyncio.timeout(seconds + WAIT_SECONDS), asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(dialler.keep_asking(port, connection))
                for (port, _), connection in zip(dealt, first, strict=True)
            ]
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        meter.stop()
    except TimeoutError:
        raise SystemUnavailable(f"does not answer within {seconds + WAIT_SECONDS:.0f} s") from None
    except OSError as error:
        raise SystemUnavailable(f"refuses connections: {error}") from error
    asked = [connection for each in asking for connection in each.result()]
    latencies = [latency for each in asked for latency in each.latencies]
    gaps = [gap for each in asked for gap in each.gaps]
    complaints = [each.complaint for each in asked if each.complaint]
    if not latencies:
        raise SystemUnavailable(
            f"answers nothing: {' '.join(complaints[0].split()) if complaints else 'no reason was given'}"
        )
    return LoadWindow(
        requests=sum(each.completed for each in asked),
        failures=len(complaints),
        seconds=ended - started,
        ttft_seconds=statistics.median(latencies),
        cpu_seconds=cpu,
        gap_seconds_p99=statistics.quantiles(gaps, n=100)[98] if len(gaps) > 1 else None,
        complaint=complaints[0] if complaints else "",
    )
