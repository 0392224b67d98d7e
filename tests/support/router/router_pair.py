"""Router pair: two routers of one cluster in separate processes that a test can kill, with simulated workers."""

import signal
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.support.fleet_processes import start_service
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually


class RouterProcess(Struct):
    process: "subprocess.Popen[Any]"
    grpc: str
    http: str
    control: str
    log: Path

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


class Workers:
    """Runs workers that publish themselves in a directory, so that every router finds them."""

    def __init__(self, folder: Path, model_dir: Path, *, count: int = 2, speedup: float = 1.0) -> None:
        self.folder = folder
        self.model_dir = model_dir
        (folder / "members").mkdir()
        self._processes = {name: self._start(name, speedup) for name in [f"w{number}" for number in range(count)]}

    @property
    def discovery(self) -> dict[str, Any]:
        return {"kind": "file", "folder": str(self.folder / "members"), "lease_seconds": 20, "poll_ms": 50}

    def _start(self, name: str, speedup: float) -> "subprocess.Popen[Any]":
        config = {
            "worker_id": name,
            "engine": "simulated",
            "model": "tiny",
            "model_dir": str(self.model_dir),
            "listen": f"unix:{self.folder / name}.sock",
            "control_listen": f"unix:{self.folder / name}-c.sock",
            "discovery": self.discovery,
            "simulated": {"speedup": speedup, "eos_probability": 0.0},
        }
        process, endpoints = start_service("worker", config, self.folder / f"{name}.json")
        assert endpoints
        return process

    def signal(self, worker_id: str, number: int) -> None:
        self._processes[worker_id].send_signal(number)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(60)


@contextmanager
def open_workers(folder: Path, model_dir: Path, **options: Any) -> Iterator[Workers]:
    workers = Workers(folder, model_dir, **options)
    try:
        yield workers
    finally:
        workers.end()


@contextmanager
def open_router_pair(
    workers: Workers,
    folder: Path,
    *,
    peers: bool = True,
    each: tuple[Mapping[str, Any], ...] = ({}, {}),
    **settings: Any,
) -> Iterator[tuple[RouterProcess, RouterProcess]]:
    """Run two routers until the context ends.

    Args:
        workers: The workers of both routers.
        folder: The folder for settings, logs and sockets.
        peers: True if the routers are peers of each other.
        each: Settings of each router.
        settings: Settings of both routers.
    """
    replicas = [f"127.0.0.1:{a_free_port()}" for _ in each]

    def start(number: int) -> RouterProcess:
        config: dict[str, Any] = {
            "router_id": f"router-{number}",
            "http_listen": "127.0.0.1:0",
            "grpc_listen": "127.0.0.1:0",
            "control_listen": f"unix:{folder / f'control-{number}.sock'}",
            "models": {"tiny": str(workers.model_dir)},
            "discovery": workers.discovery,
            "prompt_secret": "a secret of both routers",
            **settings,
            **each[number],
        }
        if peers:
            others = [address for address in replicas if address != replicas[number]]
            config |= {"replicas_listen": replicas[number], "replicas": others}
            config |= {"replicas_credentials": {"insecure": True}}
        log = folder / f"router-{number}.log"
        with log.open("w") as output:
            process, endpoints = start_service(
                "router", config, folder / f"router-{number}.json", stdout=output, stderr=output
            )
        assert endpoints, log.read_text()
        return RouterProcess(process, endpoints["grpc"], endpoints["http"], config["control_listen"], log)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(start, (0, 1))
    try:
        if peers:
            for router in (first, second):
                eventually(lambda: "peer router reached" in router.log.read_text())  # noqa: B023
        yield first, second
    finally:
        for router in (first, second):
            router.signal(signal.SIGCONT)
            router.end()
