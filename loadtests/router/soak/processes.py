"""Processes of a soak test: started in the same way as by a supervisor; the test can stop, continue, terminate and kill them.

`subprocess` starts the processes, because it uses vfork. asyncio would use fork. After a fork, gRPC fails, because its threads do not
exist in the child process.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from loadtests.environments import SystemUnavailable
from loadtests.kvstore.nodes import ROOT, environment

START_SECONDS = 60.0  # time limit of a start, for a busy machine


class SoakProcess:
    """One process of `fleet serve KIND` with its own settings; its log is in the folder."""

    def __init__(self, kind: str, name: str, folder: Path, settings: Struct):
        """Prepare the process without starting it."""
        self.name = name
        self._kind = kind
        self._config = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        self._config.write_bytes(msgspec.json.encode(settings))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> Mapping[str, str]:
        """Start the process and return its endpoints when it is ready.

        Raises:
            SystemUnavailable: The process ended, or was not ready in time; the message contains the end of its log.
        """
        command = [sys.executable, "-m", "fleet.cli.main", "serve", self._kind, "--config", str(self._config)]
        command += ["--parent", str(os.getpid())]
        with self._log.open("ab") as log:  # not in another thread: the child would end with that thread
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment())  # noqa: ASYNC220
        self._process = process
        assert process.stdout is not None
        line = await asyncio.to_thread(_first_line, process.stdout)
        process.stdout.close()
        if not line:
            self.kill()
            status = await self.ended(START_SECONDS)
            raise SystemUnavailable(f"{self.name} was not ready, and ended with {status}: {self.log()[-2000:]}")
        endpoints: dict[str, str] = json.loads(line)
        return endpoints

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Send SIGTERM; a worker then drains and ends."""
        self._signal(signal.SIGTERM)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def ended(self, seconds: float) -> int | None:
        """Return the exit status, or None if the process does not end in time."""
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            assert self._process is not None
            self._process.send_signal(number)


def _first_line(pipe: IO[bytes]) -> bytes:
    """Return the first line; empty if none comes within `START_SECONDS`, or if the process ends before."""
    readable, _, _ = select.select([pipe], [], [], START_SECONDS)
    return pipe.readline() if readable else b""
