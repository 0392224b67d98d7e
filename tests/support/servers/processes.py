"""Real servers for tests, each in its own process; they can be killed, frozen and restarted at the same address."""

import atexit
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest

from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import eventually

START_SECONDS = 60
PORTS = 10_000  # number of ports to choose from


_given: set[int] = set()  # ports that this process has returned; their servers may listen later


def a_free_port() -> int:
    """Return a free port, each one only once; below the range in which the system chooses ports, if this range begins high enough."""
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for _ in range(100):
        port = random.SystemRandom().randrange(int(first) - PORTS, int(first)) if int(first) > 2 * PORTS else 0
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found: int = listener.getsockname()[1]
            if found not in _given:
                _given.add(found)
                return found
    raise AssertionError("no port is free")


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive free ports, the first one from `a_free_port`."""
    for _ in range(100):
        ports = list(range(first := a_free_port(), first + count))
        with suppress(OSError), ExitStack() as held:
            for port in ports:
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports
    raise AssertionError("no ports are free")


class ServerProcess:
    """Runs a command that listens at an address; its output goes to a file in its folder."""

    def __init__(self, command: list[str], folder: Path, listens):
        self.command = command
        self.folder = folder
        self._listens = listens
        self.start()

    def start(self) -> None:
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

        def failure() -> str:
            return f"{self.command[0]} does not start: {(self.folder / 'output').read_text()}"

        def is_ready() -> bool:
            assert self.process.poll() is None, failure()
            return self._listens()

        try:
            eventually(is_ready, START_SECONDS, failure)
        except AssertionError:
            self.kill()
            raise

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # ends a frozen process too
        self.process.wait(60)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def can_connect(address: str | tuple[str, int]) -> bool:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(1)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


class RedisServer(ServerProcess):
    """Runs Redis on a Unix socket and a port; it loses its data when it ends."""

    def __init__(self, folder: Path, *options: str):
        executable = shutil.which("redis-server") or shutil.which("valkey-server")
        if executable is None:
            pytest.skip("needs redis-server or valkey-server: apt-get install redis-server")
        self.socket = folder / "redis"
        self.port = a_free_port()
        self.url = f"unix://{self.socket}"
        ports = () if "--port" in options else ("--port", str(self.port))
        memory_only = ("--save", "", "--appendonly", "no", "--dir", str(folder))
        command = [executable, "--bind", "127.0.0.1", "--unixsocket", str(self.socket), *memory_only, *ports, *options]
        super().__init__(command, folder, lambda: can_connect(str(self.socket)))

    def client(self, **options):
        """Return a separate client, with which a test writes and reads data."""
        import redis

        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=10, **options)


class S3Server(ServerProcess):
    """Runs Moto's S3 server; it loses its data when it ends."""

    def __init__(self, folder: Path):
        self.port = a_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        super().__init__(command, folder, lambda: can_connect(("127.0.0.1", self.port)))

    @functools.cached_property
    def client(self):
        """Return a separate client, with which a test writes and reads data."""
        import boto3

        return boto3.session.Session().client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="s"
        )

    def kill(self) -> None:
        super().kill()
        if client := self.__dict__.pop("client", None):
            client.close()


@contextmanager
def s3_credentials() -> Iterator[None]:
    """Set the environment variables in which the S3 library looks for credentials first; the test server accepts any credentials."""
    with mock.patch.dict(os.environ, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}):
        yield


@contextmanager
def a_redis_server(*options: str) -> Iterator[RedisServer]:
    with a_short_folder() as folder:
        server = RedisServer(folder, *options)
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def an_s3_server() -> Iterator[S3Server]:
    with a_short_folder() as folder:
        server = S3Server(folder)
        try:
            yield server
        finally:
            server.kill()


@functools.cache
def shared_redis() -> RedisServer:
    """Return the only Redis server of the test run, for tests that use keys of their own and change no setting."""
    return _until_exit(RedisServer)


@functools.cache
def shared_s3() -> S3Server:
    return _until_exit(S3Server)


def _until_exit(kind):
    folder = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    server = kind(folder)
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:  # a forked child inherits this handler, and must not end the server
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return server
