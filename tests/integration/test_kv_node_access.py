"""Nodes that are reached from elsewhere: what they ask for, and by which way the bytes come."""

import importlib.util

import pytest

from kvstore.client import StoreClient
from kvstore.credentials import Credentials
from kvstore.errors import StoreNotStarted, StoreUnreachable
from kvstore.messages import DataPath
from kvstore.monotonic import MonotonicClock
from kvstore.server import open_node
from kvstore.settings import StoreSettings
from tests.certificates import Authority
from tests.kv_builders import BLOCK_BYTES, a_block, a_chain, a_namespace, a_node, a_store_client

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
async def test_a_node_does_not_open_itself_to_strangers(addresses, field):
    with pytest.raises(StoreNotStarted, match=field):
        async with open_node(StoreSettings(store_id="s", **addresses), MonotonicClock()):
            pytest.fail("it started")


def test_a_node_with_a_secret_serves_who_has_it_and_nobody_else(tmp_path, secret):
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


@needs_nixl
def test_memory_is_shared_on_one_host_and_nixl_is_taken_before_tcp_elsewhere():
    with a_node(nixl="require") as node:
        with a_store_client(node.address, a_namespace()) as client:
            assert client.path is DataPath.SHM
        with a_store_client(
            node.address, a_namespace(), prefer=(DataPath.NIXL, DataPath.TCP), timeout_seconds=30
        ) as client:
            assert client.path is DataPath.NIXL
            round_trip(client)


def test_without_nixl_on_the_node_the_next_way_is_taken():
    prefer = (DataPath.NIXL, DataPath.TCP)
    with a_node(nixl="never") as node, a_store_client(node.address, a_namespace(), prefer=prefer) as client:
        assert client.path is DataPath.TCP
        round_trip(client)
