"""Damaging proxies: stand in front of real servers, and damage their answers.

`DamagingProxy` forwards bytes. It damages random pieces of what it reads (a seed chooses them), or each long piece in the same way.
`DamagingHttpProxy` understands HTTP, so that it can send wrong bodies in well-formed answers.
"""

import http.client
import http.server
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 1 << 14
WHOLE_PIECES = 6  # on average, one of this number of pieces is damaged
LONG_PIECE_BYTES = 1000  # longer than a greeting, shorter than a block


class DamagingProxy:
    """Now and then cuts, flips, drops, repeats or invents bytes of answers; with `forwards_unchanged`, it does no damage."""

    def __init__(
        self,
        server: tuple[str, int],
        inventions: tuple[bytes, ...],
        seed: int,
        damage: Callable[[bytes], bytes] | None = None,
    ):
        """Begin to listen.

        Args:
            server: Address of the real server.
            inventions: Bytes that the proxy may insert although the server has not sent them.
            seed: Seed of the random damage.
            damage: Function that changes each long piece; None: the damage is random.
        """
        self.forwards_unchanged = False
        self.refuses_connections = False  # for new connections
        self._damage = damage
        self.damages = 0
        self._server = server
        self._inventions = inventions
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def close(self) -> None:
        self._over.set()
        self._threads[0].join()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (*self._open, self._listener):
            each.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            if self.refuses_connections:
                client.close()
                continue
            server = socket.create_connection(self._server)
            self._open += [client, server]
            for threads in ((client, server, False), (server, client, True)):
                self._threads.append(threading.Thread(target=self._pass_on, args=threads, daemon=True))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, meddles: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                sink.sendall(piece if self.forwards_unchanged or not meddles else self._meddled(piece))
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _meddled(self, piece: bytes) -> bytes:
        if self._damage is None:
            return piece if self._random.randrange(WHOLE_PIECES) else self._damaged(piece)
        if len(piece) < LONG_PIECE_BYTES:
            return piece
        self.damages += 1
        return self._damage(piece)

    def _damaged(self, piece: bytes) -> bytes:
        self.damages += 1
        at = self._random.randrange(len(piece))
        match self._random.randrange(6):
            case 0:
                raise ConnectionResetError("cut")
            case 1:
                return piece[:at] + bytes([piece[at] ^ (1 << self._random.randrange(8))]) + piece[at + 1 :]
            case 2:
                return piece[:at]
            case 3:
                return piece[:at] + piece[at:] * 2
            case 4:
                return self._random.choice(self._inventions) + piece
            case _:
                return self._random.choice(self._inventions)


@contextmanager
def a_damaging_proxy(
    server: tuple[str, int],
    inventions: tuple[bytes, ...] = (),
    seed: int = 0,
    damage: Callable[[bytes], bytes] | None = None,
) -> Iterator[DamagingProxy]:
    proxy = DamagingProxy(server, inventions, seed, damage)
    try:
        yield proxy
    finally:
        proxy.close()


def with_a_flipped_bit(content: bytes) -> bytes:
    """Return the bytes with one flipped bit in the middle."""
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :] if content else content


class DamagingHttpProxy(http.server.ThreadingHTTPServer):
    """Damages the bodies of answers to GET, until `forwards_unchanged` is set."""

    daemon_threads = True

    def __init__(self, server: tuple[str, int], damage: Callable[[bytes], bytes]):
        self.forwards_unchanged = False
        self.damages = 0
        self.damage = damage
        self.behind = server
        super().__init__(("127.0.0.1", 0), _ForwardingHandler)

    @property
    def port(self) -> int:
        return self.server_port

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing about clients that disconnect."""


class _ForwardingHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DamagingHttpProxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        behind = http.client.HTTPConnection(*self.server.behind, timeout=60)
        try:
            behind.request(self.command, self.path, body, dict(self.headers.items()))
            answer = behind.getresponse()
            content = answer.read()
        finally:
            behind.close()
        length = answer.headers.get("Content-Length", "0")
        if self.command == "GET" and answer.status in (200, 206) and not self.server.forwards_unchanged:
            self.server.damages += 1
            content = self.server.damage(content)
            length = str(len(content))
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = _pass_on  # noqa: N815 - named by the library

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Log nothing about requests."""


@contextmanager
def a_damaging_http_proxy(server: tuple[str, int], damage: Callable[[bytes], bytes]) -> Iterator[DamagingHttpProxy]:
    with DamagingHttpProxy(server, damage) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
