"""The command `fleet` in processes of its own: parts that it serves, and whole clusters of `fleet up`."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.shared_memory import segments_of
from tests.support.waiting import eventually

FLEET = (sys.executable, "-m", "fleet.cli.main")
READY_SECONDS = 120.0  # five on an idle machine, which is asserted nowhere: test machines are busy


def run_fleet(*arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """One command, which ended by itself."""
    return subprocess.run([*FLEET, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def start_service(
    part: str, settings: Mapping[str, Any], file: Path, *options: str, **started: Any
) -> tuple[subprocess.Popen[Any], dict[str, Any]]:
    """`fleet serve`, as soon as it serves or has ended.

    Args:
        part: What it is to be: a router, a worker, an operator.
        settings: Its own.
        file: Where they are written for it to read.
        options: More of the command line.
        started: More for `subprocess.Popen`.

    Returns:
        The process, and the addresses that it announced: none where it ended before.
    """
    file.write_text(json.dumps(settings))
    reading, writing = os.pipe()
    command = [*FLEET, "serve", part, "--config", str(file), "--ready-fd", str(writing), *options]
    process = subprocess.Popen(command, pass_fds=[writing], **started)
    os.close(writing)
    with os.fdopen(reading) as ready:
        line = ready.readline()
    return process, json.loads(line) if line else {}


class LocalClusterProcess:
    """A running `fleet up`."""

    def __init__(self, process: subprocess.Popen[bytes], endpoints: dict[str, Any]):
        self.process = process
        self.endpoints = endpoints

    @property
    def grpc(self) -> str:
        return self.endpoints["grpc"]

    def pids(self) -> list[int]:
        return [process.pid for process in psutil.Process(self.process.pid).children(recursive=True)]

    def segments(self) -> set[str]:
        """Names in /dev/shm of what its processes have mapped."""
        return set().union(*map(segments_of, self.pids()))

    def pid_of(self, name: str) -> int:
        """Of the child that runs now; 0 while none does."""
        for process in psutil.Process(self.process.pid).children():
            if any(part.endswith(f"/{name}.json") for part in command_of(process)):
                return process.pid
        return 0

    def runtime_folder(self) -> Path:
        router = psutil.Process(self.endpoints["pids"]["router"])
        return Path(next(part for part in command_of(router) if "/router.json" in part)).parent

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def fleet_up(
    folder: Path,
    *options: str,
    engine: str = "simulated",
    ports: Iterable[str] = ("--http-port", "0", "--grpc-port", "0"),
    ready_seconds: float = READY_SECONDS,
) -> Iterator[LocalClusterProcess]:
    """A cluster that serves; its log and the file that says where it is are in that folder."""
    ready, log = folder / "ready.json", folder / "up.log"
    command = [*FLEET, "up", "--engine", engine, *ports, "--ready-file", str(ready), *options]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        eventually(lambda: ready.exists() or process.poll() is not None, ready_seconds)
        assert ready.exists(), log.read_text()
        yield LocalClusterProcess(process, json.loads(ready.read_text()))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def alive(pids: Iterable[int]) -> list[int]:
    """Those of them that run; one that has ended and was not waited for does not."""
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may have ended just now
        return False


def routers_of(parent: int) -> list[int]:
    """Process ids of the routers that run, of `fleet serve router --processes`."""
    children = psutil.Process(parent).children()
    return alive(child.pid for child in children if "router-" in " ".join(command_of(child)))


def is_listening(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def command_of(process: psutil.Process) -> list[str]:
    """Nothing of one that has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
