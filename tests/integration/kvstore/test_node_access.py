"""Tests of nodes that are reached from other hosts: their credentials and their data paths."""

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.errors import StoreNotStarted, StoreUnreachable
from kvstore.messages import DataPath
from kvstore.security.credentials import Credentials
from kvstore.security.open_ports import UCX_PORTS
from kvstore.service.server import open_node
from kvstore.service.settings import StoreSettings
from kvstore.system_clock import MonotonicClock
from tests.support.certificates import Authority
from tests.support.fleet_processes import start_service
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, a_chain, a_namespace, a_node, a_store_client
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture
def secret(tmp_path) -> Credentials:
    return a_secret(tmp_path / "secret", "a secret of this deployment")


def a_secret(path, secret: str) -> Credentials:
    path.write_text(secret + "\n")
    return Credentials(secret_file=str(path))


def round_trip(client: StoreClient) -> None:
    assert client.write(a_chain(3), [a_block(seed) for seed in range(3)]) == 3
    match = client.match(a_chain(3), lease_seconds=5)
    into = [bytearray(BLOCK_BYTES) for _ in range(3)]
    assert client.read(match, range(3), into) == [True] * 3
    assert [bytes(block) for block in into] == [bytes(a_block(seed)) for seed in range(3)]


@pytest.mark.parametrize(
    ("addresses", "field"),
    [
        ({"listen": ("0.0.0.0:0",)}, r"listen\[0\]"),
        ({"listen": ("127.0.0.1:0",), "data_listen": "0.0.0.0:0"}, "data_listen"),
    ],
)
async def test_open_node_address_without_credentials_is_rejected(addresses, field):
    with pytest.raises(StoreNotStarted, match=field):
        async with open_node(StoreSettings(store_id="s", **addresses), MonotonicClock()):
            pytest.fail("it started")


def test_node_with_a_secret_serves_only_its_holders(tmp_path, secret):
    other = a_secret(tmp_path / "other", "a secret of another deployment")
    with a_node(listen=["0.0.0.0:0"], data_listen="0.0.0.0:0", shm_socket="", credentials=secret) as node:
        address = f"127.0.0.1:{node.endpoints.listen[0].rpartition(':')[2]}"

        with a_store_client(address, a_namespace(), credentials=secret) as client:
            assert client.path is DataPath.TCP
            round_trip(client)
        for credentials in (other, None):
            with pytest.raises(StoreUnreachable, match="UNAUTHENTICATED"):
                a_store_client(address, a_namespace(), credentials=credentials, timeout_seconds=2)


def test_a_node_with_certificates_serves_clients_with_one(tmp_path, secret):
    authority = Authority(tmp_path, "authority")
    node_side = Credentials(secret_file=secret.secret_file, authority=authority.file, **authority.issue("node"))
    client_side = Credentials(secret_file=secret.secret_file, authority=authority.file, **authority.issue("client"))
    with a_node(listen=["0.0.0.0:0"], data_listen="0.0.0.0:0", shm_socket="", credentials=node_side) as node:
        address = f"127.0.0.1:{node.endpoints.listen[0].rpartition(':')[2]}"

        with a_store_client(address, a_namespace(), credentials=client_side) as client:
            round_trip(client)
        with pytest.raises(StoreUnreachable):
            a_store_client(address, a_namespace(), credentials=secret, timeout_seconds=0.5)


@pytest.fixture(scope="module")
def tls_nodes(tmp_path_factory) -> "Iterator[TlsNodes]":
    nodes = TlsNodes(tmp_path_factory.mktemp("tls"))
    try:
        yield nodes
    finally:
        nodes.close()


class TlsNodes:
    """Node processes with certificates of one authority, and their logs."""

    def __init__(self, folder: Path):
        self.authority, self.stranger = Authority(folder, "authority"), Authority(folder, "stranger")
        self.folder = folder
        self._processes: list[subprocess.Popen] = []
        self.sound = self._node("sound", authority=self.authority.file, **self.authority.issue("node"))
        self.old = self._node("old", authority=self.authority.file, **self.authority.issue("old", hours=(-9, -8)))
        self.plain = self._node("plain")

    def _node(self, name: str, **credentials: str) -> str:
        settings = {
            "store_id": name,
            "listen": ["127.0.0.1:0"],
            "capacity_bytes": 1 << 20,
            "credentials": credentials,
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            process, ready = start_service("kvstore", settings, self.folder / f"{name}.json", stdout=log, stderr=log)
        self._processes.append(process)
        return ready["grpc"]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def refusal(self, address: str, credentials: Credentials, **fields: str) -> str:
        """Return the error of a client of the node."""
        with pytest.raises(StoreUnreachable) as refused:
            a_store_client(address, a_namespace(), credentials=credentials, timeout_seconds=1, **fields)
        return str(refused.value)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)


def test_expired_certificates_are_named_on_both_sides(tls_nodes):
    client = tls_nodes.authority.issue("late", hours=(-9, -8))
    late = Credentials(authority=tls_nodes.authority.file, **client)
    assert f"{client['certificate']}: certificate has expired" in tls_nodes.refusal(tls_nodes.sound, late)
    eventually(lambda: "certificate has expired" in tls_nodes.log("sound"))

    good = Credentials(authority=tls_nodes.authority.file, **tls_nodes.authority.issue("good"))
    assert "expired on" in tls_nodes.refusal(tls_nodes.old, good)
    assert "clients will not accept this node's certificate" in tls_nodes.log("old")


def test_wrong_authorities_are_named_on_both_sides(tls_nodes):
    client = tls_nodes.stranger.issue("strange")
    strange = Credentials(authority=tls_nodes.authority.file, **client)
    says = tls_nodes.refusal(tls_nodes.sound, strange)
    assert f"{client['certificate']} is not signed by the authority in {tls_nodes.authority.file}" in says
    eventually(lambda: "unable to get local issuer certificate" in tls_nodes.log("sound"))

    suspicious = Credentials(authority=tls_nodes.stranger.file, **tls_nodes.authority.issue("suspicious"))
    says = tls_nodes.refusal(tls_nodes.sound, suspicious)
    assert f"not signed by the authority in {tls_nodes.stranger.file}" in says


def test_plain_peers_are_named_on_both_sides(tls_nodes):
    good = Credentials(authority=tls_nodes.authority.file, **tls_nodes.authority.issue("good"))
    assert "does not speak TLS, and this client does" in tls_nodes.refusal(tls_nodes.plain, good)
    assert "set credentials.authority" in tls_nodes.refusal(tls_nodes.sound, Credentials())
    says = tls_nodes.refusal(tls_nodes.sound, Credentials(), credentials_field="store_credentials")
    assert "set store_credentials.authority" in says
    eventually(lambda: "WRONG_VERSION_NUMBER" in tls_nodes.log("sound"))
    assert "shows no certificate" in tls_nodes.refusal(tls_nodes.sound, Credentials(authority=tls_nodes.authority.file))
    eventually(lambda: "PEER_DID_NOT_RETURN_A_CERTIFICATE" in tls_nodes.log("sound"))


@needs_nixl
def test_one_host_shares_memory_and_others_prefer_nixl_to_tcp():
    with a_node(nixl="require") as node:
        with a_store_client(node.address, a_namespace()) as client:
            assert client.path is DataPath.SHM
        with a_store_client(
            node.address, a_namespace(), prefer=(DataPath.NIXL, DataPath.TCP), timeout_seconds=30
        ) as client:
            assert client.path is DataPath.NIXL
            round_trip(client)


@needs_nixl
def test_a_node_with_nixl_warns_once_of_the_ports_of_ucx(tmp_path):
    settings = {"store_id": "s", "listen": ["127.0.0.1:0"], "capacity_bytes": 1 << 20, "nixl": "require"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process, _ = start_service("kvstore", settings, tmp_path / "node.json", stdout=output, stderr=output)
    process.terminate()
    process.wait(60)

    (warning,) = [line for line in log.read_text().splitlines() if "port open to other hosts" in line]
    assert UCX_PORTS in warning


def test_client_uses_tcp_when_the_node_has_no_nixl():
    prefer = (DataPath.NIXL, DataPath.TCP)
    with a_node(nixl="never") as node, a_store_client(node.address, a_namespace(), prefer=prefer) as client:
        assert client.path is DataPath.TCP
        round_trip(client)
