"""TLS cluster: real processes that use TLS on every port that supports TLS, with certificates that tests can renew."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet.client import Client, ClientTls
from kvstore.security.credentials import Credentials
from tests.support.certificates import Authority
from tests.support.fleet_processes import start_service, workers_seen
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually

PARTS = ("router", "peer", "prefill", "decode", "store", "planner")
BLOCK_TOKENS = 16
HTTP, GRPC = "http/1.1", "h2"
SUBJECT = re.compile(rb"^subject=.*CN ?= ?(\S+)$", re.MULTILINE)


def an_address() -> str:
    return f"127.0.0.1:{a_free_port()}"


class TlsCluster:
    """Runs two routers, a prefill worker, a decode worker, a store node and a planner.

    Attributes:
        ports: The address and the application protocol of each port with TLS, by name; for ports with frames, the
            protocol is empty.
        plain: Names of the ports whose callers need no certificate of their own.
    """

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.folder = folder
        self.model_dir = model_dir
        self.first, self.second = Authority(folder, "first"), Authority(folder, "second")
        self.authority = folder / "authority.pem"
        self.trust(self.first)
        self.client = self.first.issue("client")
        self.second_client = self.second.issue("second-client")
        self.renew("old", self.first)
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        names = ("http", "grpc", "kserve", "health", "picker", "control", "peers")
        router = {name: an_address() for name in names}
        peer = {name: an_address() for name in ("http", "grpc", "control", "peers")}
        self.http, self.grpc = router["http"], router["grpc"]
        self.store, self.planner = an_address(), an_address()
        self.metrics = {part: an_address() for part in ("store", "planner", "prefill")}
        self.streams = {part: an_address() for part in ("prefill", "decode")}
        self.worker_control = an_address()
        self.router, self.peer = router, peer
        self.plain = frozenset(
            {"http", "grpc", "kserve", "health", "picker", *(f"{each}-metrics" for each in self.metrics)}
        )
        self.ports = {
            "http": (router["http"], HTTP),
            "health": (router["health"], HTTP),
            **{name: (router[name], GRPC) for name in ("grpc", "kserve", "picker", "control")},
            "peers": (router["peers"], ""),
            "worker-stream": (self.streams["prefill"], ""),
            "worker-control": (self.worker_control, GRPC),
            "store-calls": (self.store, GRPC),
            "planner-control": (self.planner, GRPC),
            **{f"{part}-metrics": (address, HTTP) for part, address in self.metrics.items()},
        }

    def trust(self, *authorities: Authority) -> None:
        """Write the file with the certificate authorities that all processes and clients trust from now on."""
        self._replace(self.authority, "".join(Path(each.file).read_text() for each in authorities))

    def renew(self, generation: str, authority: Authority) -> None:
        """Give every process a new certificate and key, while it runs."""
        for part in PARTS:
            issued = authority.issue(f"{part}-{generation}", hours=(-1, 24 * 60), rsa_key=True)
            for field in ("key", "certificate"):
                self._replace(self.folder / f"{part}.{field}", Path(issued[field]).read_text())

    def _replace(self, path: Path, content: str) -> None:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(content)
        unfinished.replace(path)

    def own(self, part: str) -> dict[str, str]:
        """Return the settings fields `certificate` and `key` of a process."""
        return {name: f"{self.folder}/{part}.{name}" for name in ("certificate", "key")}

    def credentials(self, part: str) -> dict[str, str]:
        return {**self.own(part), "authority": str(self.authority)}

    def start(self) -> None:
        """Start all processes, and wait until the workers serve."""
        self._start("kvstore", "store", self._store_settings())
        self._start("router", "router", self._router_settings("router", self.router, self.peer))
        self._start("router", "peer", self._router_settings("peer", self.peer, self.router))
        for role in ("prefill", "decode"):
            self._start("worker", role, self._worker_settings(role))
        self._start("planner", "planner", self._planner_settings())
        with Client(
            self.grpc,
            tls=ClientTls(authority=str(self.authority)),
            control=self.router["control"],
            control_credentials=Credentials(authority=str(self.authority), **self.client),
        ) as client:
            eventually(lambda: workers_seen(client) == {"prefill", "decode"}, 60.0)

    def _store_settings(self) -> dict[str, Any]:
        return {
            "store_id": "store",
            "listen": [self.store],
            "data_listen": "127.0.0.1:0",
            "credentials": self.credentials("store"),
            "metrics_listen": self.metrics["store"],
            "metrics_tls": self.own("store"),
        }

    def _router_settings(self, part: str, own: Mapping[str, str], other: Mapping[str, str]) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "router_id": part,
            **{f"{name}_listen": own[name] for name in ("http", "grpc", "control")},
            "replicas_listen": own["peers"],
            "replicas": [other["peers"]],
            **{f"{name}_credentials": self.credentials(part) for name in ("control", "replicas", "worker", "store")},
            "models": {"tiny": str(self.model_dir)},
            "prompt_secret": "a secret of both routers",
            "store": self.store,
            "remote_prefill_min_tokens": 2 * BLOCK_TOKENS,
            "tls": {**self.own(part), "renewal_check_seconds": 0.2},
        }
        if "kserve" in own:
            settings |= {"kserve_listen": own["kserve"], "health_listen": own["health"]}
            settings["tls"] |= {"health": True, "endpoint_picker": True}
            host, _, port = own["picker"].rpartition(":")
            settings["endpoint_picker"] = {"host": host, "port": int(port), "router_endpoint": own["http"]}
        return settings

    def _worker_settings(self, role: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "worker_id": role,
            "role": role,
            "engine": "simulated",
            "model": "tiny",
            "listen": self.streams[role],
            "credentials": self.credentials(role),
            "registry": self.router["control"],
            "registry_credentials": self.credentials(role),
            "store": self.store,
            "store_credentials": self.credentials(role),
            "kv_paths": ["store"],
            "block_tokens": BLOCK_TOKENS,
            "load_interval_ms": 20,
            "simulated": {
                "eos_probability": 0.0,
                "vocab_size": 500,
                "load_timeout_ms": 20_000,
                "publish_timeout_ms": 20_000,
                "speedup": 20,
            },
        }
        if role == "prefill":
            settings |= {"control_listen": self.worker_control, "metrics_listen": self.metrics[role]}
            settings["metrics_tls"] = self.own(role)
        return settings

    def _planner_settings(self) -> dict[str, Any]:
        bounds = {"least": 1, "most": 2, "start_seconds": 1, "drain_seconds": 1}
        return {
            "model": "tiny",
            "mode": "active",
            "goals": {"ttft_seconds": 1.0, "tpot_seconds": 0.1},
            "pools": [{"name": role, "role": role, **bounds} for role in ("decode", "prefill")],
            "rule": {"kind": "load", "requests_per_replica": 4, "interval_seconds": 0.2},
            "source": {
                "kind": "routers",
                "addresses": [self.router["control"]],
                "credentials": self.credentials("planner"),
            },
            "target": {"kind": "folder", "folder": f"{self.folder}/plans"},
            "listen": self.planner,
            "control_credentials": self.credentials("planner"),
            "metrics_listen": self.metrics["planner"],
            "metrics_tls": self.own("planner"),
        }

    def _start(self, service: str, part: str, settings: Mapping[str, Any]) -> None:
        with (self.folder / f"{part}.log").open("w") as output:
            process, endpoints = start_service(
                service, settings, self.folder / f"{part}.json", stdout=output, stderr=output
            )
        self.processes[part] = process
        assert endpoints, self.log(part)

    def restart_peer(self) -> None:
        """End the second router, and start it again with the current files."""
        self.processes["peer"].kill()
        self.processes["peer"].wait(60)
        self._start("router", "peer", self._router_settings("peer", self.peer, self.router))

    def log(self, part: str) -> str:
        return (self.folder / f"{part}.log").read_text()

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(60)

    def shake_hands(
        self, port: str, *options: str, client: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Connect to a port by `openssl s_client`, with the client's certificate unless `client` is empty; verify the port's certificate."""
        address, protocol = self.ports[port]
        shown = client if client is not None else self.client
        command = ["openssl", "s_client", "-connect", address, "-CAfile", str(self.authority), "-verify_return_error"]
        command += ["-verify_ip", "127.0.0.1"]
        if shown:
            command += ["-cert", shown["certificate"], "-key", shown["key"]]
        if protocol:
            command += ["-alpn", protocol]
        return subprocess.run([*command, *options], input=b"", capture_output=True, timeout=60, check=False)

    def name_at(self, port: str) -> str:
        """Return the name in the certificate that a port shows now; empty if the handshake fails."""
        found = SUBJECT.search(self.shake_hands(port).stdout)
        return found.group(1).decode() if found else ""


@contextmanager
def a_tls_cluster(folder: Path, model_dir: Path) -> Iterator[TlsCluster]:
    """Run the cluster until the context ends."""
    assert shutil.which("openssl"), "these tests need openssl"
    cluster = TlsCluster(folder, model_dir)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
