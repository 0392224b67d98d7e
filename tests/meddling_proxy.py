"""A TCP proxy before a real server that damages what the server says: by chance, but the same for a seed, as far as threads allow."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 1 << 14
WHOLE_PIECES = 6  # between two damages, on average


class MeddlingProxy:
    """Passes everything on while `heals`; else now and then cuts, flips, leaves out, repeats or invents."""

    def __init__(self, server: tuple[str, int], inventions: tuple[bytes, ...], seed: int):
        self.heals = False
        self.damages = 0
        self._server = server
        self._inventions = inventions
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
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
            server = socket.create_connection(self._server)
            self._open += [client, server]
            for threads in ((client, server, False), (server, client, True)):
                self._threads.append(threading.Thread(target=self._pass_on, args=threads))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, meddles: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                whole = self.heals or not meddles or self._random.randrange(WHOLE_PIECES)
                sink.sendall(piece if whole else self._damaged(piece))
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

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
def a_meddling_proxy(server: tuple[str, int], inventions: tuple[bytes, ...], seed: int) -> Iterator[MeddlingProxy]:
    proxy = MeddlingProxy(server, inventions, seed)
    try:
        yield proxy
    finally:
        proxy.close()
