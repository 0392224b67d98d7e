"""Shell session: runs the commands of a document in one shell and one folder, with free ports instead of the document's ports."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.documents import ROOT, Block
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually

COMMAND_SECONDS = 300.0  # the longest command takes 20 seconds on an idle machine
END_SECONDS = 60.0

HTTP, GRPC = "127.0.0.1:8000", "127.0.0.1:50051"
ADDRESS = re.compile(r"\b(?:127\.0\.0\.1|10\.0\.0\.\d+):\d+")

RUNNERS = frozenset({"bash", "make"})
"""Names of programs that end when their child processes have ended, so that they need no signal."""

SETUP = """
set -m -e -o pipefail
HTTP={http} GRPC={grpc}
PATH="$PWD/.venv/bin:$PATH"
"""

FLEET = """#!/bin/bash
case "$*" in
  *address*|*--deployment*|*--connector*|*--http-port*) ;;
  up*) ports="--http-port {http} --grpc-port {grpc}" ;;
  generate*|status*|explain*|scale*|"router thresholds"*) ports="--address 127.0.0.1:{grpc}" ;;
esac
exec {python} -m fleet.cli.main "$@" $ports
"""
"""Script that replaces the command `fleet`; it adds options with the ports of this session."""

PYTHON = """#!/bin/bash
exec {python} "$@"
"""


class CommandFailed(AssertionError):
    """Raised if a block of a page ended with an error, or did not end in time."""


class ShellSession:
    """Runs a shell in a folder with links to the files and folders at the root of the repository."""

    def __init__(self, replaced: Mapping[str, str], programs: Mapping[str, Path] | None = None, **environment: str):
        """Prepare a session.

        Args:
            replaced: Replacements in commands, by regular expression; FOLDER in a replacement is the session's folder.
            programs: Further programs that commands may call, by name.
            environment: Further environment variables.
        """
        self._replaced = replaced
        self._programs = programs or {}
        self._environment = environment
        self._open = ExitStack()
        self._ports: dict[str, int] = defaultdict(a_free_port)
        self._number = 0
        self.folder = Path()
        self.output = ""
        """The output of the last block."""

        self.request_id = ""
        """The id of the request that a command has sent; it replaces REQUEST in later commands."""

    def __enter__(self) -> Self:
        # Sockets need short paths.
        self.folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="page")))
        for each in ROOT.iterdir():
            if not each.name.startswith(".") and each.name != "report.html":
                (self.folder / each.name).symlink_to(each)
        values = {"http": self._port(HTTP), "grpc": self._port(GRPC), "python": sys.executable}
        programs = self.folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name, script in (
            ("fleet", FLEET),
            ("python", PYTHON),
            ("python3", PYTHON),
            ("pip", PYTHON.replace('"$@"', '-m pip "$@"')),
        ):
            (programs / name).write_text(script.format(**values))
            (programs / name).chmod(0o755)
        for name, program in self._programs.items():
            (programs / name).symlink_to(program)
        self._shell = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.folder), **self._environment},
            start_new_session=True,
        )
        self._tell(SETUP.format(**values))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes that this session has left running, as Ctrl-C does, and remove the folder."""
        found = (each for each in psutil.process_iter(["name", "ppid"]) if _temporary_folder(each) == str(self.folder))
        running = {each.pid: each for each in found if each.info["name"] not in RUNNERS}
        for each in running.values():
            if each.info["ppid"] not in running:  # a running parent ends its children
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGINT)
        _, stubborn = psutil.wait_procs(running.values(), END_SECONDS)
        for each in stubborn:
            each.kill()
        self._shell.kill()
        self._shell.communicate()
        self._open.close()
        if kind is None:
            assert not stubborn, f"these did not end after Ctrl-C: {stubborn}"

    def local(self, text: str) -> str:
        """Return a text of the page with the ports, folders and request id of this session."""
        for there, here in self._replaced.items():
            text = re.sub(there, here.replace("FOLDER", str(self.folder)), text)
        text = re.sub(r"(--\w+-port) (\d+)", lambda found: f"{found[1]} {self._port(f'127.0.0.1:{found[2]}')}", text)
        text = ADDRESS.sub(lambda found: f"127.0.0.1:{self._port(found[0])}", text)
        return re.sub(r"\bREQUEST\b", self.request_id or "REQUEST", text)

    def run(self, block: Block) -> None:
        """Write the file that the block contains, or run the block's commands.

        Raises:
            CommandFailed: A command ended with an error, or did not end in time; the message has its output.
        """
        text = self.local(block.text)
        if "file" in block.clauses:
            path = self.folder / self.local(block.clauses["file"])
            path.parent.mkdir(parents=True, exist_ok=True)
            assert self.folder.resolve() in path.resolve().parents, f"{path} is a file of the repository"
            path.write_text(text)
            return
        if not block.language:
            text = f"fleet up --engine simulated {self.local(block.clauses['cluster'])}\n"
        elif block.language == "python":
            text = f"python - <<'END_OF_BLOCK'\n{text}END_OF_BLOCK\n"
        if "background" in block.clauses or not block.language:
            self._run_beside(block, text, block.clauses.get("until", "stops it" if not block.language else ""))
        elif "until" in block.clauses:
            eventually(lambda: re.search(block.clauses["until"], self._run(block, text, may_fail=True), re.DOTALL))
        else:
            self._run(block, text)
        if not block.language:
            self._run(block, "fleet generate 'Once upon a time' --max-tokens 4\n")
        if sent := re.findall(r"fleet explain (\w+)", self.output):
            self.request_id = sent[-1]

    def _run(self, block: Block, text: str, may_fail: bool = False) -> str:
        script, output, status = self._files()
        script.write_text(text)
        failure = f"|| echo $? > {status}" if may_fail else ""
        self._tell(f"source {script} < /dev/null > {output} 2>&1 {failure}\necho 0 >> {status}\n")
        eventually(lambda: _lines(status) or self._shell.poll() is not None, COMMAND_SECONDS)
        self.output = output.read_text() if output.exists() else ""
        if not may_fail and _lines(status) != ["0"]:
            raise CommandFailed(f"{block}: failed:\n{text}\n{self.output}")
        return self.output

    def _run_beside(self, block: Block, text: str, until: str) -> None:
        outputs, ends = [], []
        for line in text.splitlines():
            _, output, status = self._files()
            output.touch()
            end = status.with_suffix(".end")
            self._tell(f"{{ {line}\n}} < /dev/null > {output} 2>&1 || touch {end} &\necho 0 > {status}\n")
            eventually(lambda status=status: _lines(status))
            outputs.append(output)
            ends.append(end)

        def seen() -> bool:
            self.output = "".join(each.read_text() for each in outputs)
            assert not any(end.exists() for end in ends), "a command ended"
            return bool(re.search(until, self.output, re.DOTALL))

        try:
            eventually(seen, COMMAND_SECONDS)
        except AssertionError as error:
            raise CommandFailed(f"{block}: {until!r} was not seen:\n{text}\n{self.output}") from error

    def _files(self) -> tuple[Path, Path, Path]:
        self._number += 1
        return tuple(self.folder / f"step-{self._number}.{kind}" for kind in ("sh", "out", "status"))  # type: ignore[return-value]

    def _tell(self, text: str) -> None:
        assert self._shell.stdin
        self._shell.stdin.write(text)
        self._shell.stdin.flush()

    def _port(self, address: str) -> str:
        return str(self._ports[address])


def _temporary_folder(process: psutil.Process | None) -> str:
    try:
        return process.environ().get("TMPDIR", "") if process else ""
    except psutil.Error:  # the process has ended, or belongs to another user
        return ""


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
