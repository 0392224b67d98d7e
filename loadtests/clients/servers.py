"""Servers that client programs are run against: `fleet up`, and plain vLLM for comparison, both with the built-in model."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from fleet.local.process_group import end_group
from fleet.local.tiny_model import build_tiny_model
from loadtests.environments import SystemUnavailable

START_SECONDS = 300.0  # time limit of a start; vLLM needs a minute on two busy cores
PAUSE_SECONDS = 0.2
MODEL = "tiny"
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerAddresses(Struct, frozen=True):
    """Addresses of the APIs of a server; the address of an API that the server does not have is empty."""

    http: str  # base URL of the OpenAI API; it ends in /v1
    grpc: str = ""  # host:port of the gRPC API
    kserve: str = ""  # host:port of the Open Inference Protocol


def model_folder(folder: Path) -> Path:
    """Return a folder with the files of the built-in model, including its weights. The folder has the name of the model."""
    built = build_tiny_model(folder / "built")
    link = folder / MODEL
    if not link.exists():
        link.symlink_to(built)
    return link


@contextmanager
def fleet_up(folder: Path, engine: str) -> Iterator[ServerAddresses]:
    """Run a cluster of one prefill and one decode worker; yield the addresses of its APIs.

    Raises:
        SystemUnavailable: The cluster did not start; the message contains the end of its log.
    """
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "fleet.cli.main", "up", "--engine", engine, "--ready-file", str(ready)]
    command += ["--http-port", "0", "--grpc-port", "0", "--kserve-port", "0"]
    with _process(command, folder / "fleet.log") as process:
        _wait(process, ready.exists, folder / "fleet.log")
        started = json.loads(ready.read_text())
        yield ServerAddresses(f"{started['http']}/v1", started["grpc"], started["kserve"])


@contextmanager
def vllm_serve(folder: Path) -> Iterator[str]:
    """Run plain vLLM's server with the built-in model; yield the base URL of its API.

    Raises:
        SystemUnavailable: vLLM is not installed, or did not start.
    """
    if importlib.util.find_spec("vllm") is None:
        raise SystemUnavailable("plain vLLM is not installed beside this Python")
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    model = model_folder(folder)
    # This is what `vllm serve` runs. The command itself fails if vLLM is installed as vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    url = f"http://127.0.0.1:{port}"
    with _process(command, folder / "vllm.log") as process:
        _wait(process, lambda: _answers(f"{url}/health"), folder / "vllm.log")
        yield f"{url}/v1"


@contextmanager
def _process(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {**os.environ, **VLLM_ENVIRONMENT}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # so that `end_group` can end its child processes, too
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
        end_group(process.pid)
        process.wait(60)


def _wait(process: "subprocess.Popen[bytes]", ready: "object", log: Path) -> None:
    ends = time.monotonic() + START_SECONDS
    assert callable(ready)
    while not ready():
        if process.poll() is not None or time.monotonic() > ends:
            raise SystemUnavailable(f"it did not start: {log.read_text(errors='replace')[-1500:]}")
        time.sleep(PAUSE_SECONDS)


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False
