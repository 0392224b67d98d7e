"""Unix sockets: listen at a path where a killed node may have left its socket, and connect to a socket with a full queue."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import StoreNotStarted, reason

PATH_BYTES = 107  # maximum length of a socket's path: the field `sun_path` without its final zero; unix(7)
PROBE_SECONDS = 1.0
BACKLOG = 1024  # maximum number of connections that wait to be accepted
ALONE_SECONDS = 3.0  # maximum wait for the lock on a folder; other nodes hold it while they prepare their sockets
ALONE_AGAIN_SECONDS = 0.01

TIMEVAL = struct.Struct("@ll")  # seconds and microseconds, as SO_SNDTIMEO takes them

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` that mean a temporary lack of files or memory.

The server can call `accept` again a little later.
"""


Identity = tuple[int, int, int]
"""Identity of a file: device, inode, and time of change. The time is needed, because a new file may get the inode of a
removed file."""


@contextlib.contextmanager
def folder_lock(field: str, path: str) -> Iterator[None]:
    """Lock the folder of a socket while the path is cleared and until the socket listens.

    Without the lock, if two nodes start at once, one node could mistake the other node's socket for an abandoned one,
    and remove it. The folder itself is locked, so a killed process leaves no lock file behind. If the folder cannot be
    read, or its file system has no locks, the context opens without the lock.

    Raises:
        StoreNotStarted: The folder does not exist, or other processes keep it locked.
    """
    folder, waiting = Path(path).absolute().parent, threading.Event()
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotStarted(f"{field}: {folder} is not a directory") from error
    except OSError:  # the folder cannot be read, so no process can lock it
        yield
        return
    try:
        for _ in range(round(ALONE_SECONDS / ALONE_AGAIN_SECONDS)):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting.wait(ALONE_AGAIN_SECONDS)
            except OSError:
                break  # the file system has no locks: continue without a lock
            else:
                break
        else:
            raise StoreNotStarted(f"{field}: {folder} is locked by another process; start this node again")
        yield
    finally:
        os.close(held)


def identity(path: str) -> Identity:
    """Return the identity of the file at this path, for `remove`.

    The file must not be changed after this call, because a change also changes the identity.
    """
    found = Path(path).lstat()
    return found.st_dev, found.st_ino, found.st_ctime_ns


def remove(path: str, own: Identity) -> None:
    """Remove the socket at this path; do nothing if another process has put its own socket at the path meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        if identity(path) == own:
            Path(path).unlink()


def clear_path(field: str, path: str) -> None:
    """Remove the socket at `path` if no process listens on it, so that the path can be used.

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
            file.unlink()  # a killed process has left this socket behind
            return
        except OSError as error:
            raise StoreNotStarted(f"{field}: {path} cannot be used: {reason(error)}") from error
    raise StoreNotStarted(f"{field}: another process listens on {path}")


def listen(field: str, path: str) -> socket.socket:
    """Return a listening, non-blocking socket that only this user may connect to.

    Raise StoreNotStarted if the path cannot be used, as `clear_path` does.
    """
    with folder_lock(field, path):
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
    """Connect to a Unix socket. The timeout limits only the time to connect.

    If the listener's queue of connections is full, the call waits for a place in the queue. Therefore the timeout is
    set in the system: Python's own timeout would make the socket non-blocking, and a full queue refuses a non-blocking
    socket at once.

    Raises:
        OSError: No process listens at the path.
        BlockingIOError: There was no place in the listener's queue in time.
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
