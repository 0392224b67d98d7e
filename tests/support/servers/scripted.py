"""A TCP server that says what it was told to say, whatever it hears."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    says: tuple[bytes, ...]  # each after something was heard
    hold: bool = False  # then keeps silent, instead of ending the connection
    drip: bytes = b""  # said before that byte by byte, for as long as anybody listens


@contextmanager
def a_scripted_server(script: Script) -> Iterator[int]:
    """Its port. The script begins anew with each connection."""
    over = threading.Event()
    held: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(60)
            with suppress(OSError):
                for part in script.says:
                    connection.recv(1 << 16)
                    connection.sendall(part)
                for byte in script.drip:
                    connection.sendall(bytes([byte]))
                    if over.wait(0.05):
                        break
                if not script.hold:
                    connection.shutdown(socket.SHUT_WR)
            held.append(connection)  # closing with unread bytes would take back what was said

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        thread.join()
        for connection in held:
            connection.close()
        listener.close()
