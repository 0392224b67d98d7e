"""Control addresses on this machine: where a router without `control_listen` listens, and how commands find it.

Rules:

1. A router without `control_listen` listens on a Unix socket that only its own user can reach. The path of the socket
   follows from the router's gRPC address, so another process of the same user finds it. Its folder is in TMPDIR if that
   path is short enough, else in /tmp. A caller searches both folders, and so finds every router that has the same
   TMPDIR or no TMPDIR. A router that listens at all addresses is found only for an address of this machine.
2. The folder belongs to the user alone. It is made with mode 0700; a link, another user's folder, or one that is open
   to others is refused. Another user can thus prevent a router from starting, but cannot intercept its callers.
3. A socket on which a process listens is never replaced. A socket that a killed process left behind is replaced. The
   next process that uses the folder also removes the sockets of other killed processes.
4. A cluster of `fleet up` has its socket in the private folder of the local run instead (`fleet.local.runs`).
"""

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fleet.core.errors import ConfigurationRefused
from kvstore.errors import StoreNotStarted
from kvstore.net import unix_sockets as sockets
from kvstore.net.addresses import unix_path

# Maximum number of characters of the parent folder, and also of a socket's name before `.sock`, so that socket paths stay
# within Unix's limit of 107.
LONGEST_PARENT = 40
DEFAULT_PARENT = "/tmp"  # noqa: S108 - `private_folder` checks owner and mode of the folder in it
ALTERNATIVES = "set control_listen to a unix:/path of your own, or to host:port with control_credentials"
EVERY_HOST = ("0.0.0.0", "[::]")  # noqa: S104 - these hosts are compared with an address and never bound
THIS_HOST = ("127.0.0.1", "localhost", "[::1]", *EVERY_HOST)


def control_folder() -> Path:
    """Return the folder of this user's control sockets, which may not exist."""
    parent = tempfile.gettempdir()
    return _folder_in(parent if len(parent) <= LONGEST_PARENT else DEFAULT_PARENT)


def control_socket(grpc_address: str) -> str:
    """Return the control address (``unix:/path``) of a router with this gRPC address and no `control_listen`."""
    return f"unix:{control_folder() / _socket_name(grpc_address)}"


def _folder_in(parent: str) -> Path:
    return Path(parent) / f"fleet-control-{os.getuid()}"


def _socket_name(grpc_address: str) -> str:
    where = unix_path(grpc_address).replace("/", "_") or grpc_address.replace(":", "_")
    return f"{where[-LONGEST_PARENT:]}.sock"


def find_control_socket(grpc_address: str) -> str | None:
    """Return the control address of this user's router that serves `grpc_address` on this machine; None if there is no such socket."""
    host, _, port = grpc_address.rpartition(":")
    hosts = THIS_HOST if host in THIS_HOST else (host, *EVERY_HOST)
    asked = [grpc_address] if unix_path(grpc_address) else [f"{each}:{port}" for each in dict.fromkeys((host, *hosts))]
    for folder in dict.fromkeys((control_folder(), _folder_in(DEFAULT_PARENT))):
        for each in asked:
            path = folder / _socket_name(each)
            if not (_is_private(folder) and _is_own_socket(path)):
                continue
            if each == grpc_address or host in THIS_HOST or is_of_this_machine(host):
                return f"unix:{path}"
    return None


def private_folder() -> Path:
    """Create the folder of this user's control sockets, or check the existing one and remove dead sockets from it.

    Raises:
        ConfigurationRefused: The folder cannot be created, does not belong to this user alone, or other processes keep it locked.
    """
    folder = control_folder()
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationRefused(
            f"control_listen: {folder} cannot be made: {error.strerror}; {ALTERNATIVES}"
        ) from error
    if not _is_private(folder):
        raise ConfigurationRefused(
            f"control_listen: {folder} is not a folder of this user alone (mode 0700, no link): remove it, or {ALTERNATIVES}"
        )
    _remove_dead_sockets(folder)
    return folder


def remove_stale_socket(address: str) -> None:
    """Remove a Unix socket on which no process listens.

    Raises:
        ConfigurationRefused: Another process listens there, or the path cannot be used.
    """
    try:
        sockets.clear_path("control_listen", unix_path(address))
    except StoreNotStarted as error:
        raise ConfigurationRefused(f"{error}; {ALTERNATIVES}") from error


@contextmanager
def locked_folder(address: str) -> Iterator[None]:
    """Hold a lock on the folder of a Unix socket while the caller removes an old socket and starts to listen.

    Without the lock, another process that starts at the same time could believe that the socket belongs to a dead
    process, and remove it.

    Raises:
        ConfigurationRefused: The folder does not exist, or other processes keep it locked.
    """
    try:
        with sockets.folder_lock("control_listen", unix_path(address)):
            yield
    except StoreNotStarted as error:
        raise ConfigurationRefused(f"{error}; {ALTERNATIVES}") from error


@contextmanager
def private_umask() -> Iterator[None]:
    """Make files that are created within the context accessible to this user alone.

    The body must not await, because the umask holds for the whole process.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _remove_dead_sockets(folder: Path) -> None:
    """Remove the sockets of killed processes."""
    with locked_folder(f"unix:{folder}/any.sock"):
        for path in folder.glob("*.sock"):
            with suppress(OSError):  # raised if the socket's own process removes it meanwhile
                own = sockets.identity(str(path))
                if stat.S_ISSOCK(path.lstat().st_mode) and _is_dead(path):
                    sockets.remove(str(path), own)


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def is_of_this_machine(host: str) -> bool:
    """Return whether a host is this machine: a socket can be bound only to an address of this machine."""
    try:
        found = socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: this is no valid host name
        return False
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def _is_own_socket(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()
