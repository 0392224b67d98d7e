"""Store nodes as processes: started in the same way as by a supervisor; tests can kill, stop and restart them."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0  # time limit of a start, for a busy machine
STOP_SECONDS = 20.0


class NodeFailed(Exception):
    """The node did not start, or did not stop; the message contains the end of its log."""


def environment() -> dict[str, str]:
    """Return the environment variables of this process, with a PYTHONPATH by which child processes import this checkout."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


class StoreNode:
    """A process of `fleet serve kvstore`, with settings and log in a folder."""

    def __init__(self, folder: Path, **settings: Any):
        """Prepare a node without starting it.

        Args:
            folder: Folder for sockets, settings and log; its path must be short enough for Unix sockets.
            settings: Settings of the node; by default it listens in the folder, with shared memory and a TCP data plane.
        """
        self._folder = folder
        self._log = folder / "node.log"
        self.settings: dict[str, Any] = {
            "store_id": "store-1",
            "listen": [f"unix:{folder}/c"],
            "shm_socket": f"{folder}/m",
            "data_listen": f"127.0.0.1:{free_port()}",  # chosen once, so that the address is the same after a restart
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return str(self.settings["listen"][0])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_seconds: float = START_SECONDS) -> None:
        """Start the node and wait until it is ready.

        Raises:
            NodeFailed: The node ended, or was not ready in time.
        """
        config = self._folder / "node.json"
        config.write_text(json.dumps(self.settings))
        ready, theirs = os.pipe()
        command = [sys.executable, "-m", "fleet.cli.main", "serve", "kvstore", "--config", str(config)]
        command += ["--ready-fd", str(theirs), "--parent", str(os.getpid())]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs,),
                    cwd=ROOT,
                    env=environment(),
                    process_group=0,  # a stopped node must not send SIGHUP to the process group of its starter
                )
        finally:
            os.close(theirs)
        try:
            readable, _, _ = select.select([ready], [], [], timeout_seconds)
            if not readable or not os.read(ready, 1 << 16):
                self.kill()
                raise NodeFailed(f"the node is not ready within {timeout_seconds:.0f} s:\n{self.log()[-2000:]}")
        finally:
            os.close(ready)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        if self._process is not None:
            self._process.kill()  # also works on stopped processes
            self._process.wait(STOP_SECONDS)

    def signal(self, number: int) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the node like a supervisor, and wait for its end.

        Raises:
            NodeFailed: The node did not end in time, and was killed.
        """
        if self._process is None or self._process.poll() is not None:
            return
        self.signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise NodeFailed(f"the node does not stop within {STOP_SECONDS:.0f} s:\n{self.log()[-2000:]}") from None

    def log(self) -> str:
        """Return the output of the node since its first start."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def open_files(self) -> int:
        """Return the number of open descriptors, without those of existing files.

        Existing files belong to the tiers, whose capacity limits their number.
        """
        return sum(not _is_there(link) for link in Path(f"/proc/{self.pid}/fd").iterdir())


def _is_there(link: Path) -> bool:
    try:
        return link.readlink().is_file()
    except FileNotFoundError:  # the descriptor was closed meanwhile
        return True


@contextmanager
def running(**settings: Any) -> Iterator[StoreNode]:
    """Run a node while the context is open."""
    with short_folder() as folder:
        node = StoreNode(folder, **settings)
        node.start()
        try:
            yield node
        finally:
            node.stop()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Make a temporary folder with a path short enough for Unix sockets (107 bytes)."""
    with TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        yield Path(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def merged(settings: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, replaced or completed by the values of `over`; sections that are in both are merged recursively."""
    result = dict(settings)
    for key, value in over.items():
        present = result.get(key)
        result[key] = merged(present, value) if isinstance(present, dict) and isinstance(value, dict) else value
    return result
