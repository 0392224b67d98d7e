"""Redis server for one run: it listens at a Unix socket, and can be killed and started again."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

START_SECONDS = 10.0
MEMORY = "64mb"


class RedisMissing(Exception):
    """No `redis-server` or `valkey-server` is installed."""


class RedisServer:
    """A Redis server that keeps nothing over a restart, like a cache."""

    def __init__(self, folder: Path, memory: str = MEMORY):
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise RedisMissing("neither redis-server nor valkey-server is installed: apt-get install redis-server")
        self._program = program
        self._memory = memory
        self._folder = folder
        self._socket = folder / "redis"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Start the server and wait until it listens."""
        self._socket.unlink(missing_ok=True)
        command = [self._program, "--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._folder)]
        command += [
            "--save",
            "",
            "--appendonly",
            "no",
            "--maxmemory",
            self._memory,
            "--maxmemory-policy",
            "allkeys-lru",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not self._socket.exists():
            assert self._process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline, "redis-server does not listen"
            time.sleep(0.02)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(START_SECONDS)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._socket.unlink(missing_ok=True)
