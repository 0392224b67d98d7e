"""Fleet processes: runs the command `fleet` in separate processes, as single services or as a cluster of `fleet up`.

`run_load_test` runs the command of a load test.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from fleet.client import Client
from loadtests.kvstore.nodes import ROOT, environment
from tests.support.shared_memory import segments_of
from tests.support.waiting import eventually

FLEET = (sys.executable, "-m", "fleet.cli.main")
READY_SECONDS = 120.0  # a start takes about five seconds on an idle machine, but test machines are busy


def run_fleet(*arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run([*FLEET, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def run_load_test(
    module: str, *arguments: str, folder: Path = ROOT, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run `python -m loadtests.MODULE` in a folder to its end."""
    return subprocess.run(
        [sys.executable, "-m", f"loadtests.{module}", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_service(
    part: str,
    settings: Mapping[str, Any],
    file: Path,
    *options: str,
    within: Sequence[str] = (),
    **started: Any,
) -> tuple[subprocess.Popen[Any], dict[str, Any]]:
    """Start `fleet serve` and wait until it is ready or has ended.

    Args:
        part: The service, such as `router`, `worker` or `operator`.
        settings: Settings of the service.
        file: File for the settings.
        options: Further options of the command.
        within: Command in front of the service's command, which prepares the process and then executes it, such as `prlimit`.
        started: Further arguments of `subprocess.Popen`, but no `preexec_fn`: with it, Python would fork and run gRPC's
            handlers for forks. In a test process whose threads call gRPC, one child of ten would then die of SIGSEGV
            or SIGABRT.

    Returns:
        The process, and the addresses that it printed when it was ready; no addresses if it ended before.
    """
    assert "preexec_fn" not in started, "use `within`"
    file.write_text(json.dumps(settings))
    reading, writing = os.pipe()
    command = [*within, *FLEET, "serve", part, "--config", str(file), "--ready-fd", str(writing), *options]
    process = subprocess.Popen(command, pass_fds=[writing], **started)
    os.close(writing)
    with os.fdopen(reading) as ready:
        line = ready.readline()
    return process, json.loads(line) if line else {}


class LocalClusterProcess:
    """Represents a running `fleet up`."""

    def __init__(self, process: subprocess.Popen[bytes], endpoints: dict[str, Any]):
        self.process = process
        self.endpoints = endpoints

    @property
    def grpc(self) -> str:
        return self.endpoints["grpc"]

    def pids(self) -> list[int]:
        return [process.pid for process in psutil.Process(self.process.pid).children(recursive=True)]

    def segments(self) -> set[str]:
        """Return the names of the segments in /dev/shm that the processes of the cluster have mapped."""
        return set().union(*map(segments_of, self.pids()))

    def pid_of(self, name: str) -> int:
        """Return the process id of the running child with this name, such as `router`; 0 if it does not run."""
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
    """Run a cluster while the context is open; its log and its ready file are in `folder`."""
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
    """Return the process ids in `pids` that still run; a zombie does not count as running."""
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may have ended just now
        return False


def routers_of(parent: int) -> list[int]:
    """Return the process ids of the running routers of `fleet serve router --processes`."""
    children = psutil.Process(parent).children()
    return alive(child.pid for child in children if "router-" in " ".join(command_of(child)))


def workers_seen(client: Client) -> set[str]:
    """Return the ids of the workers that the client's router knows."""
    return {worker.worker_id for pool in client.status().pools for worker in pool.workers}


def is_listening(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process, or an empty list if it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
