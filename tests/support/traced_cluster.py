"""Traced cluster: a router, workers with simulated engines, and a store node, all with tracing switched on."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet.client import Client
from fleet.net.control.address import control_socket
from tests.support.fleet_processes import start_service, workers_seen
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually

BLOCK_TOKENS = 16


class TracedCluster:
    """Runs the processes of a cluster with these tracing settings."""

    def __init__(self, folder: Path, model_dir: Path, tracing: Mapping[str, Any], **router: Any) -> None:
        self.folder = folder
        self.tracing = dict(tracing)
        self.http, self.grpc = f"127.0.0.1:{a_free_port()}", f"127.0.0.1:{a_free_port()}"
        self.kserve = f"127.0.0.1:{a_free_port()}"
        self.control = control_socket(self.grpc)
        self.store = f"unix:{folder}/store.sock"
        self.metrics: dict[str, str] = {"router": self.http}
        """Addresses of all processes' metrics, by the name of the process."""
        self.workers: dict[str, subprocess.Popen[Any]] = {}
        self._processes: list[subprocess.Popen[Any]] = []
        store = {"store_id": "store", "listen": [self.store], "shm_socket": f"{folder}/shm.sock"}
        self.start("kvstore", "store", {**store, "metrics_listen": self._metrics_of("store")})
        self.router = self.start(
            "router",
            "router",
            {
                "http_listen": self.http,
                "grpc_listen": self.grpc,
                "kserve_listen": self.kserve,
                "models": {"tiny": str(model_dir)},
                "store": self.store,
                "remote_prefill_min_tokens": 2 * BLOCK_TOKENS,
                **router,
            },
        )

    def add_worker(self, name: str, role: str, **simulated: Any) -> None:
        settings = {
            "worker_id": name,
            "role": role,
            "engine": "simulated",
            "model": "tiny",
            "listen": f"unix:{self.folder}/{name}.sock",
            "registry": self.control,
            "store": self.store,
            "kv_paths": ["store"],
            "block_tokens": BLOCK_TOKENS,
            "load_interval_ms": 20,
            "metrics_listen": self._metrics_of(name),
            "simulated": {
                "eos_probability": 0.0,
                "vocab_size": 500,
                "load_timeout_ms": 20_000,
                "publish_timeout_ms": 20_000,
                **simulated,
            },
        }
        self.workers[name] = self.start("worker", name, settings)

    def start(self, part: str, name: str, settings: Mapping[str, Any]) -> subprocess.Popen[Any]:
        log = self.folder / f"{name}.log"
        with log.open("w") as output:
            process, endpoints = start_service(
                part, {**settings, "tracing": self.tracing}, self.folder / f"{name}.json", stdout=output, stderr=output
            )
        self._processes.append(process)
        assert endpoints, log.read_text()
        return process

    def _metrics_of(self, name: str) -> str:
        return self.metrics.setdefault(name, f"127.0.0.1:{a_free_port()}")

    def wait_for_workers(self) -> None:
        with Client(self.grpc) as client:
            eventually(lambda: workers_seen(client) == set(self.workers))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(60)


@contextmanager
def a_traced_cluster(
    folder: Path, model_dir: Path, tracing: Mapping[str, Any], workers: Mapping[str, str], **fields: Any
) -> Iterator[TracedCluster]:
    """Run a cluster with these tracing settings and with workers of these roles, by name."""
    cluster = TracedCluster(folder, model_dir, {"export_seconds": 0.05, **tracing}, **fields)
    try:
        for name, role in workers.items():
            cluster.add_worker(name, role)
        cluster.wait_for_workers()
        yield cluster
    finally:
        cluster.stop()
