"""HTTP server of the metrics of a store node, a worker or a planner, with a bounded number of connections.

Each connection has a thread, and there are at most `CONNECTIONS`. When one more connection comes, a connection is
closed: the oldest one of the address with the most connections (`kvstore.net.unproven_connections`). A new scrape is
therefore always served. The port serves only metrics, and requires a key if its guard says so
(`kvstore.security.metrics_access`). With certificates it speaks TLS 1.2 and 1.3; a handshake runs in the thread of its
connection, so a client that never finishes it delays no other client. Each of these steps ends after `STEP_SECONDS`,
even if bytes still arrive slowly: a handshake, a whole request, each write of the answer.
"""

import asyncio
import contextlib
import io
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvstore.clock import SECOND
from kvstore.net.unproven_connections import UnprovenConnections
from kvstore.security.certificates import CertificateFiles, RenewedContext
from kvstore.security.metrics_access import CHALLENGE, MetricsGuard, MetricsTls
from kvstore.system_clock import MonotonicClock

CONNECTIONS = 16
LOOP_SECONDS = 5.0  # time limit for the event loop to collect the metrics; then the scrape fails
STEP_SECONDS = 5.0  # time limit for a TLS handshake, for a whole request, and for each write of the answer


class LoopCollector:
    """Runs a collector of metrics on an event loop, because scrapes come in other threads.

    The collector reads objects that only the event loop may use.
    """

    def __init__(self, collector: Collector) -> None:
        """Use the event loop that runs now for all later collections."""
        self._collector = collector
        self._loop = asyncio.get_running_loop()

    def describe(self) -> Iterable[Metric]:
        """Return no metrics.

        Without this method, the registry would collect all metrics when the collector is registered.
        """
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; raise TimeoutError if the event loop does not answer within `LOOP_SECONDS`."""

        async def collected() -> list[Metric]:
            return list(self._collector.collect())

        return asyncio.run_coroutine_threadsafe(collected(), self._loop).result(LOOP_SECONDS)


class MetricsServer:
    """Serves the metrics in its own threads, from `open` until `close`."""

    def __init__(self, server: "_MetricsHttpServer"):
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="kvstore-metrics", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        registry: CollectorRegistry,
        guard: MetricsGuard,
        certificates: CertificateFiles | None = None,
    ) -> "MetricsServer":
        """Listen on the address, with TLS if there are certificates; raise OSError if it cannot be bound."""
        kind = _MetricsHttpServerV6 if ":" in host else _MetricsHttpServer
        application = _guarded(make_wsgi_app(registry), guard)
        server = make_server(host, port, application, kind, handler_class=_MetricsHandler)
        if certificates is not None:
            server.context = RenewedContext(certificates, metrics_port_context)
        return cls(server)

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        """Stop listening; do not wait for the answers in progress."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metrics_certificates(tls: MetricsTls) -> CertificateFiles | None:
    """Read the certificate files of a port for metrics; None if the port has no TLS.

    Raises:
        BadCredentials: A file cannot be used; the message names its field.
    """
    if not tls.certificate:
        return None
    files = CertificateFiles(
        certificate=tls.certificate,
        key=tls.key,
        authority=tls.client_authority,
        field="metrics_tls",
        authority_field="client_authority",
        logs=True,
    )
    files.require_usable()
    return files


def metrics_port_context() -> ssl.SSLContext:
    """Return the TLS context of a port for metrics, into which no certificate is loaded yet."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _guarded(application: Any, guard: MetricsGuard) -> Any:
    """Return `application` behind the guard, which answers with status 401 if the client may not read the metrics."""

    def answer(environment: dict[str, Any], start_response: Any) -> Any:
        if refusal := guard.refusal(environment.get("HTTP_AUTHORIZATION", "")):
            start_response("401 Unauthorized", [("Content-Type", "text/plain; charset=utf-8"), CHALLENGE])
            return [f"{refusal}\n".encode()]
        return application(environment, start_response)

    return answer


class _RequestReader(io.RawIOBase):
    """Reads one request from a connection. The whole request has to arrive within `STEP_SECONDS`."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._clock = MonotonicClock()
        self._deadline = self._clock.now() + STEP_SECONDS * SECOND

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        """Receive bytes of the request; raise TimeoutError if the time is over."""
        left_seconds = (self._deadline - self._clock.now()) / SECOND
        if left_seconds <= 0:
            raise TimeoutError(f"the request did not arrive within {STEP_SECONDS:g} s")
        self._connection.settimeout(left_seconds)
        try:
            return self._connection.recv_into(into)
        finally:
            self._connection.settimeout(STEP_SECONDS)


class _MetricsHandler(WSGIRequestHandler):
    timeout = STEP_SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_RequestReader(self.connection))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - name given by the library
        """Log nothing about requests."""


class _MetricsHttpServer(WSGIServer):
    """Serves each connection in its own thread."""

    context: RenewedContext | None = None  # None: no TLS
    request_queue_size = 128  # the library's default of five lets a burst of silent clients delay a scrape for seconds

    def __init__(self, *args: Any, **how: Any):
        self._guard = threading.Lock()
        self._open: UnprovenConnections[socket.socket] = UnprovenConnections(CONNECTIONS)
        super().__init__(*args, **how)

    def get_request(self) -> tuple[socket.socket, Any]:
        accepted, address = super().get_request()
        if self.context is None:
            return accepted, address
        accepted.settimeout(STEP_SECONDS)  # time limit for the TLS handshake
        return self.context.current.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            gone = self._open.add(request, client_address[0])
            if gone is not None:
                with contextlib.suppress(OSError):  # raised if the connection has ended by itself
                    # The thread of the connection `gone` notices the shutdown and then closes the connection.
                    # `SSLSocket.shutdown` is not called, because it would drop TLS state that the thread still uses.
                    socket.socket.shutdown(gone, socket.SHUT_RDWR)
        try:
            threading.Thread(target=self._serve, args=(request, client_address), daemon=True).start()
        # Raised if no thread can be started. The library then closes this connection and continues with others.
        except BaseException:
            with self._guard:
                self._open.discard(request)
            raise

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            if isinstance(request, ssl.SSLSocket):
                request.do_handshake()
            self.finish_request(request, client_address)
        except OSError:
            pass  # the client has closed the connection, or was too slow (`STEP_SECONDS`)
        finally:
            with self._guard:
                # Closed under the lock, so that no other thread shuts down a new socket with the same descriptor.
                self._open.discard(request)
                self.shutdown_request(request)


class _MetricsHttpServerV6(_MetricsHttpServer):
    address_family = socket.AF_INET6
