"""TCP server that sends scripted bytes, whatever it receives."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    says: tuple[bytes, ...]  # parts to send, each one after a further message was received
    hold: bool = False  # keep silent at the end instead of closing
    drip: bytes = b""  # sent byte by byte after the parts, until the client leaves


@contextmanager
def a_scripted_server(script: Script) -> Iterator[int]:
    """Run the server, and yield its port; the script begins anew for each connection."""
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
            held.append(connection)  # kept open: closing a socket with unread bytes would discard sent bytes

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        thread.join()
        for connection in held:
            connection.close()
        listener.close()
