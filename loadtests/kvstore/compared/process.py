"""Process of a compared system: it starts at the first question, answers each question by one JSON line, and ends with its children."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtests.environments import SystemUnavailable

START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
END_SECONDS = 15.0


class ComparedSystemProcess:
    """Runs one of the scripts in this folder under the system's own interpreter, and asks it questions."""

    def __init__(self, name: str, python: Callable[[], Path], script: Path, log: Path):
        """Begin without a process.

        Args:
            name: Name for messages.
            python: Returns the Python interpreter; may install the system first, and may raise `SystemUnavailable`.
            script: The script of the system.
            log: File for the output of the script.
        """
        self._name = name
        self._python = python
        self._script = script
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._absent: SystemUnavailable | None = None  # set after a failure, so that later questions fail at once

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Ask one question and return the answer.

        Raises:
            SystemUnavailable: The system cannot be installed or started, does not answer in time, or answers with an error.
        """
        if self._absent is not None:
            raise self._absent
        try:
            if self._process is None:
                self._start()
            return self._exchange({"do": do, **arguments}, ANSWER_SECONDS)
        except SystemUnavailable as reason:
            if self._process is None or self._process.poll() is not None:
                self._absent = reason
            raise

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ends the processes that it started
        process.wait(END_SECONDS)
        process.stdout.close()

    def _start(self) -> None:
        python = self._python()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), "-P", str(self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                cwd=self._log.parent,
            )
        self._exchange({"do": "hello"}, START_SECONDS)

    def _exchange(self, question: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(time.monotonic() + timeout_seconds)
        except (OSError, TimeoutError) as error:
            self.end()
            raise SystemUnavailable(f"{self._name} does not answer ({error}): {self._last_words()}") from error
        answer: dict[str, Any] = json.loads(line)
        if "cannot" in answer:
            raise SystemUnavailable(f"{self._name}: {answer['cannot']}")
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError("not in time")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise ConnectionError("it ended")
            line += piece
        return line

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return lines[-1][:300] if lines else "it said nothing"
