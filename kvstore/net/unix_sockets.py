"""Unix sockets: paths that a node may take, those that a killed node left behind, and connecting to one that is busy."""

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

PATH_BYTES = 107  # of sun_path, less its final zero; unix(7)
PROBE_SECONDS = 1.0
BACKLOG = 1024  # connections that wait to be accepted
ALONE_SECONDS = 3.0  # that one node waits for others to take their sockets in the same folder
ALONE_AGAIN_SECONDS = 0.01

TIMEVAL = struct.Struct("@ll")  # seconds and microseconds, as SO_SNDTIMEO wants them

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""A connection that cannot be accepted for one of these can be a little later: it is no reason to end."""


Identity = tuple[int, int, int]
"""Of one file: device, inode, and when it was changed, since inodes are used again."""


@contextlib.contextmanager
def alone(field: str, path: str) -> Iterator[None]:
    """Nobody else makes way for a socket in that folder meanwhile. For `clear_path`, and until the socket is listened on.

    Of two that begin at once, one would else take the socket of the other for one that was left behind, and remove it.
    The folder itself is locked: nothing is left when a process is killed.

    Raises:
        StoreNotStarted: There is no such folder, or others do not come to an end with theirs.
    """
    folder, waiting = Path(path).absolute().parent, threading.Event()
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotStarted(f"{field}: {folder} is not a directory") from error
    except OSError:  # nor can others read it
        yield
        return
    try:
        for _ in range(round(ALONE_SECONDS / ALONE_AGAIN_SECONDS)):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting.wait(ALONE_AGAIN_SECONDS)
            except OSError:
                break  # a file system without locks: as well as it can be
            else:
                break
        else:
            raise StoreNotStarted(f"{field}: {folder} is locked by another process; start this node again")
        yield
    finally:
        os.close(held)


def identity(path: str) -> Identity:
    """Of the file at that path, for `remove`. Not to be changed any more.

    Raises:
        OSError: There is none.
    """
    found = Path(path).lstat()
    return found.st_dev, found.st_ino, found.st_ctime_ns


def remove(path: str, own: Identity) -> None:
    """Remove the socket at that path, unless it is another's by now."""
    with contextlib.suppress(FileNotFoundError):
        if identity(path) == own:
            Path(path).unlink()


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
    with alone(field, path):
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
