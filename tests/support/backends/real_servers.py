"""Real OpenAI-compatible servers of other projects, each in its own process, with the built-in model."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fleet.local.process_group import end_group
from fleet.local.tiny_model import build_tiny_model
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually

START_SECONDS = 240  # time limit of a start, which takes ten to thirty seconds on an idle machine

ENVIRONMENT = {
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class RealServer:
    """Runs one server. The current folder of its process contains the model's folder, which is named like the model."""

    def __init__(self, name: str, command: Sequence[str], model: Path) -> None:
        self.name = name
        self.port = a_free_port()
        self._output = model.parent / f"{name}.log"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command, "--host", "127.0.0.1", "--port", str(self.port)],
                cwd=model.parent,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the server has children
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Wait until the health check succeeds."""
        eventually(lambda: self._is_healthy() or self._process.poll() is not None, START_SECONDS)
        assert self._process.poll() is None, self._output.read_text(errors="replace")[-4000:]

    def _is_healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return answer.status == 200
        return False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop all processes of the server during the context, so that it computes and sends nothing."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        end_group(self._process.pid)
        self._process.wait(30)


def commands(model: str) -> Mapping[str, Sequence[str]]:
    """Return the command of each server, by server name. The folder `model` is in the current folder of the server."""
    vllm = (
        *("-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)),
        "--enable-scale-out",  # paths that only render prompts
    )
    transformers = ("-m", "transformers.cli.transformers", "serve", model, "--device", "cpu")
    return {"vllm": vllm, "transformers": transformers}


@contextmanager
def real_servers(folder: Path, model: str) -> Iterator[dict[str, RealServer]]:
    """Run all servers at the same time, each with the built-in model under the name `model`."""
    (folder / model).symlink_to(build_tiny_model(folder / "models"))
    servers: dict[str, RealServer] = {}
    try:
        for name, command in commands(model).items():
            servers[name] = RealServer(name, command, folder / model)
        for server in servers.values():
            server.wait()
        yield servers
    finally:
        for server in servers.values():
            server.end()
