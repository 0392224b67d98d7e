"""Processes of a benchmark: started on their own cores, measured by the operating system's counters, and ended with their children."""

import http.client
import json
import os
import select
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from loadtests.environments import SystemUnavailable
from loadtests.kvstore.nodes import ROOT, environment

READY_SECONDS = 60.0
END_SECONDS = 10.0
PAUSE_SECONDS = 0.1


class Cores(Struct, frozen=True, kw_only=True):
    """The cores on which the processes of a benchmark run. If there is only one core, all processes share it."""

    router: frozenset[int]
    others: frozenset[int]
    """Cores of workers and client."""


def cores_of_this_process() -> Cores:
    """Return the first core for the router, and the others for workers and client."""
    first, *rest = sorted(os.sched_getaffinity(0))
    return Cores(router=frozenset({first}), others=frozenset(rest or {first}))


@contextmanager
def running_on(cores: frozenset[int]) -> Iterator[None]:
    """Run this process on these cores while the context is open; processes that it starts in this time stay on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in this process, so that contexts end the processes that they have started."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class ProcessTree:
    """A process with all its children."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path):
        self.name = name
        self._process = process
        self._log = log

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def resident_bytes(self) -> int:
        return resident_bytes(self._process.pid)

    def end(self) -> None:
        """End the process and its children, and wait for them."""
        tree = _tree(self._process.pid)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(END_SECONDS)

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return " ".join(" | ".join(lines[-3:])[-600:].split()) or "it said nothing"


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process since its start, including all threads and children, living or not."""
    total = 0.0
    for process in _tree(pid):
        with suppress(psutil.NoSuchProcess, OSError):
            total += time.clock_gettime(_clock_of(process.pid))
            ended = process.cpu_times()
            total += ended.children_user + ended.children_system  # time of children that have ended
    return total


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children. Pages that several of them share count several times."""
    total = 0
    for process in _tree(pid):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


@contextmanager
def started(
    name: str, command: Sequence[str], folder: Path, cores: frozenset[int], more: Mapping[str, str]
) -> Iterator[ProcessTree]:
    """Run a server on these cores, with a log in the folder."""
    _exit_on_sigterm()
    log = folder / f"{name.replace(':', '-')}.log"
    with log.open("ab") as output, running_on(cores):
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, **more},
            start_new_session=True,
        )
    server = ProcessTree(name, process, log)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def started_module(
    module: str, arguments: Sequence[str], folder: Path, cores: frozenset[int]
) -> Iterator[tuple[ProcessTree, dict[str, Any]]]:
    """Run a module of this checkout on these cores; yield it with the JSON line that it prints when it is ready.

    Raises:
        SystemUnavailable: The module was not ready in time.
    """
    _exit_on_sigterm()
    name = module.rpartition(".")[2]
    log = folder / f"{name}.log"
    with log.open("ab") as output, running_on(cores):
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )
    server = ProcessTree(name, process, log)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], READY_SECONDS)
        line = process.stdout.readline() if readable else b""
        if not line:
            raise SystemUnavailable(f"{name} was not ready within {READY_SECONDS:.0f} s: {server.last_words()}")
        yield server, json.loads(line)
    finally:
        server.end()
        process.stdout.close()


def wait_until_it_answers(
    server: ProcessTree, port: int, request: tuple[str, bytes], seconds: float, *, tls: ssl.SSLContext | None = None
) -> None:
    """Wait until a server answers a streamed request completely.

    Args:
        server: The server.
        port: Port of the server.
        request: Path and body of the request.
        seconds: Longest wait.
        tls: TLS context of the connection; None: no TLS.

    Raises:
        SystemUnavailable: The server ended, or did not answer in time; the message contains the end of its log.
    """
    deadline = time.monotonic() + seconds
    complaint = "nobody listens"
    while time.monotonic() < deadline and server.alive:
        try:
            status, answer = ask(port, *request, tls=tls)
        except (OSError, http.client.HTTPException) as error:
            complaint = str(error)
        else:
            if status == http.HTTPStatus.OK and b"[DONE]" in answer:
                return
            complaint = f"HTTP {status}: {answer[:300].decode(errors='replace')}"
        time.sleep(PAUSE_SECONDS)
    what = f"does not answer within {seconds:.0f} s ({complaint})" if server.alive else "ended at its start"
    raise SystemUnavailable(f"{server.name} {what}: {server.last_words()}")


def ask(port: int, path: str, body: bytes | None = None, *, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """Send a POST with `body`, or a GET if `body` is None; return status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    if tls is not None:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=tls)
    try:
        headers = {} if body is None else {"content-type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _clock_of(pid: int) -> int:
    """Return the id of a process's CPU clock, as clock_getcpuclockid(3) does on Linux. This clock has a resolution of nanoseconds."""
    return (~pid << 3) | 2
