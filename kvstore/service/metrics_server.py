"""HTTP server of a node's metrics with a bounded number of connections.

Each connection has a thread, and there are at most `CONNECTIONS`. When another connection comes, the oldest one of the
address with the most connections is closed (`kvstore.net.unproven_connections`), so a scrape is always served. The port
has no authentication and serves only counters.
"""

import contextlib
import socket
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvstore.net.unproven_connections import UnprovenConnections

CONNECTIONS = 16
SILENT_SECONDS = 5.0  # the connection of a client that sends or reads nothing for this long is closed


class MetricsServer:
    """Serves the metrics in its own threads, from `open` until `close`."""

    def __init__(self, server: "_MetricsHttpServer"):
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="kvstore-metrics", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, host: str, port: int, registry: CollectorRegistry) -> "MetricsServer":
        """Listen on the address; raise OSError if it cannot be bound."""
        kind = _MetricsHttpServerV6 if ":" in host else _MetricsHttpServer
        return cls(make_server(host, port, make_wsgi_app(registry), kind, handler_class=_MetricsHandler))

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        """Stop listening; answers in progress end with the process."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MetricsHandler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - name given by the library
        """Log nothing about requests."""


class _MetricsHttpServer(WSGIServer):
    """Serves each connection in its own thread."""

    request_queue_size = 128  # the library's default of five lets a burst of silent clients delay a scrape for seconds

    def __init__(self, *args: Any, **how: Any):
        self._guard = threading.Lock()
        self._open: UnprovenConnections[socket.socket] = UnprovenConnections(CONNECTIONS)
        super().__init__(*args, **how)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            gone = self._open.add(request, client_address[0])
            if gone is not None:
                with contextlib.suppress(OSError):  # raised if the connection has ended by itself
                    gone.shutdown(socket.SHUT_RDWR)  # its thread notices this and closes it
        try:
            threading.Thread(target=self._serve, args=(request, client_address), daemon=True).start()
        except BaseException:  # no thread can be started; the library closes the connection and continues
            with self._guard:
                self._open.discard(request)
            raise

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # the client has left or was silent for too long
        finally:
            with self._guard:
                # Under the lock, so that no other thread shuts down a new socket with the same descriptor.
                self._open.discard(request)
                self.shutdown_request(request)


class _MetricsHttpServerV6(_MetricsHttpServer):
    address_family = socket.AF_INET6
