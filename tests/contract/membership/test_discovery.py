"""Contract tests of worker directories: in a folder, in a real etcd. The Kubernetes directory is in tests/kube."""

from pathlib import Path

import pytest

from fleet.core.clock import SECOND
from fleet.core.discovery import EtcdDiscovery, FileDiscovery
from fleet.core.errors import ConfigurationRefused
from fleet.membership.discovery.open import open_directory
from fleet.membership.ports import RegistryUnreachable
from kvstore.security.credentials import Credentials
from tests.contract.membership.discovery_contract import *  # noqa: F403 - they run here
from tests.contract.membership.discovery_contract import ADDRESS, NEW, OLD, WORKER
from tests.support.certificates import Authority
from tests.support.servers.etcd import EtcdServer, an_etcd_server
from tests.support.servers.processes import a_free_port
from tests.support.servers.severable_proxy import SeverableProxy
from tests.support.waiting import pace

LEASE_SECONDS = 2


class FileDirectorySetup:
    lease = LEASE_SECONDS * SECOND

    def __init__(self, folder) -> None:
        self.folder = folder / "workers"
        self.way = folder / "way"
        self.folder.mkdir()
        self.way.symlink_to(self.folder)

    def open(self):
        return self._open(self.folder)

    def open_far(self):
        return self._open(self.way)

    def _open(self, folder):
        return open_directory(FileDiscovery(folder=str(folder), lease_seconds=LEASE_SECONDS, poll_ms=10))

    async def cut(self) -> None:
        self.way.unlink()

    async def mend(self) -> None:
        self.way.symlink_to(self.folder)

    async def lose(self, worker_id) -> None:
        [path] = self.folder.iterdir()
        path.unlink()

    async def half_a_lease(self, *clocks) -> None:
        for clock in clocks:
            clock.move(self.lease // 2)

    async def shows(self, addresses) -> None:
        pass


class EtcdDirectorySetup:
    lease = LEASE_SECONDS * SECOND

    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self.way = SeverableProxy(server.port)

    def open(self):
        return self._open(self.server.address)

    def open_far(self):
        return self._open(f"127.0.0.1:{self.way.port}")

    def _open(self, address):
        return open_directory(EtcdDiscovery(endpoints=(address,), lease_seconds=LEASE_SECONDS))

    async def cut(self) -> None:
        await self.way.close()

    async def mend(self) -> None:
        await self.way.open()

    async def lose(self, worker_id) -> None:
        from aetcd import Client

        async with Client(port=self.server.port) as client:
            await client.delete_prefix(b"/fleet/workers/")

    async def half_a_lease(self, *clocks) -> None:
        for clock in clocks:
            clock.move(self.lease // 2)
        await pace(LEASE_SECONDS / 2, "half a lease by the clock of etcd, which a test cannot move")

    async def shows(self, addresses) -> None:
        pass


@pytest.fixture(scope="module")
def etcd():
    with an_etcd_server() as server:
        yield server


async def test_etcd_tls_checks_both_ends_and_tries_next_endpoint(tmp_path):
    authority = Authority(tmp_path, "authority")
    ours, theirs = authority.issue("worker"), authority.issue("etcd")
    options = ("--cert-file", theirs["certificate"], "--key-file", theirs["key"])
    options += ("--client-cert-auth", "--trusted-ca-file", authority.file)
    with an_etcd_server(*options, scheme="https") as server:
        endpoints = (f"127.0.0.1:{a_free_port()}", server.address)
        credentials = Credentials(authority=authority.file, **ours)
        async with open_directory(EtcdDiscovery(endpoints=endpoints, credentials=credentials)) as directory:
            with pytest.raises(RegistryUnreachable, match="UNAVAILABLE"):
                await directory.register(WORKER, OLD, ADDRESS)
            await directory.register(WORKER, OLD, ADDRESS)
        unknown = Credentials(authority=authority.file)
        async with open_directory(EtcdDiscovery(endpoints=endpoints[1:], credentials=unknown)) as directory:
            with pytest.raises(
                RegistryUnreachable, match=r"shows no certificate: set discovery\.credentials\.certificate"
            ):
                await directory.register(WORKER, NEW, ADDRESS)
        others = Credentials(authority=Authority(tmp_path, "others").file, **ours)
        async with open_directory(EtcdDiscovery(endpoints=endpoints[1:], credentials=others)) as directory:
            with pytest.raises(RegistryUnreachable, match=r"is not signed by the authority in .*others\.pem"):
                await directory.register(WORKER, NEW, ADDRESS)
        async with open_directory(EtcdDiscovery(endpoints=endpoints[1:])) as directory:
            with pytest.raises(RegistryUnreachable, match=r"speaks TLS, and this client does not: set discovery\.cred"):
                await directory.register(WORKER, NEW, ADDRESS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (FileDiscovery(folder="/nowhere"), r"^discovery\.folder: /nowhere is not a folder"),
        (
            EtcdDiscovery(endpoints=("127.0.0.1:1",), credentials=Credentials(authority="/nowhere")),
            r"^discovery\.credentials\.authority: /nowhere: No such file",
        ),
    ],
    ids=["file", "etcd"],
)
def test_settings_with_missing_targets_are_rejected(settings, message):
    if isinstance(settings, EtcdDiscovery):
        pytest.importorskip("aetcd", reason="the extra `etcd` is not installed")

    with pytest.raises(ConfigurationRefused, match=message):
        open_directory(settings)


def test_invalid_file_is_skipped_and_logged_once(tmp_path, caplog):
    (tmp_path / "torn.worker.json").write_text('{"worker_id": "a", ')
    (tmp_path / "huge.worker.json").write_bytes(b" " * (1 << 20))
    (tmp_path / "unrelated.json").write_text("{}")
    directory = open_directory(FileDiscovery(folder=str(tmp_path)))

    assert directory.read_records() == directory.read_records() == []
    assert len(caplog.records) == 2

    (tmp_path / "huge.worker.json").unlink()
    assert directory.read_records() == []
    (tmp_path / "huge.worker.json").write_text("{}")
    assert directory.read_records() == directory.read_records() == []
    assert [Path(each.path).name.partition(".")[0] for each in caplog.records] == ["huge", "torn", "huge"]


@pytest.fixture(params=["file", "etcd"])
async def a_world(request, tmp_path):
    match request.param:
        case "file":
            yield FileDirectorySetup(tmp_path)
        case _:
            world = EtcdDirectorySetup(request.getfixturevalue("etcd"))
            await world.lose(None)
            await world.way.open()
            yield world
            await world.way.close()
