"""Unix sockets: paths that a node may take, those that a killed node left behind, and connecting to one that is busy."""

import errno
import socket
import stat
import struct
from pathlib import Path

from kvstore.errors import StoreNotStarted, reason

PATH_BYTES = 107  # of sun_path, less its final zero; unix(7)
PROBE_SECONDS = 1.0
BACKLOG = 1024  # connections that wait to be accepted

TIMEVAL = struct.Struct("@ll")  # seconds and microseconds, as SO_SNDTIMEO wants them

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""A connection that cannot be accepted for one of these can be a little later: it is no reason to end."""


def clear_path(field: str, path: str) -> None:
    """Make way for a socket at `path`: removes one that nobody listens on.

    Raises:
        StoreNotStarted: The path cannot be used; the message begins with `field`.
    """
    if len(path.encode()) > PATH_BYTES:
        raise StoreNotStarted(
            f"{field}: {path} is longer than the {PATH_BYTES} bytes that a Unix socket's path may have"
        )
    file = Path(path)
    if not file.parent.is_dir():
        raise StoreNotStarted(f"{field}: {file.parent} is not a directory")
    if not file.exists():
        return
    if not stat.S_ISSOCK(file.stat().st_mode):
        raise StoreNotStarted(f"{field}: {path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            file.unlink()  # of a process that was killed
            return
        except OSError as error:
            raise StoreNotStarted(f"{field}: {path} cannot be used: {reason(error)}") from error
    raise StoreNotStarted(f"{field}: another process listens on {path}")


def listen(field: str, path: str) -> socket.socket:
    """A listening, non-blocking socket that only this user may connect to.

    Raises:
        StoreNotStarted: The path cannot be used.
    """
    clear_path(field, path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StoreNotStarted(f"{field}: {path} cannot be bound: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def connect(path: str, timeout_seconds: float) -> socket.socket:
    """A connection to a Unix socket, without a timeout for what follows.

    Where as many wait to be accepted as may, this one waits for its turn. With a timeout of Python's it would be refused at
    once, since such a socket does not block: hence the system's.

    Raises:
        OSError: Nobody listens there; BlockingIOError: its turn has not come in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        whole, part = divmod(max(timeout_seconds, 0.001), 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(int(whole), int(part * 1e6)))
        connection.connect(path)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(0, 0))
    except BaseException:
        connection.close()
        raise
    return connection
