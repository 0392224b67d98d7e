"""Directories of workers: in memory, in a folder, in a real etcd. Kubernetes' is in tests/kube."""

import asyncio

import pytest

from fleet.adapters.discovery import directory_of
from fleet.adapters.discovery_memory import MemoryDirectory
from fleet.clock import SECOND
from fleet.discovery import EtcdDiscovery, FileDiscovery
from tests.contract.discovery_promises import *  # noqa: F403 - they run here
from tests.etcd import EtcdServer
from tests.kv_builders import a_short_folder
from tests.ways import Way

LEASE_SECONDS = 2


class MemoryWorld:
    lease = LEASE_SECONDS * SECOND

    def __init__(self) -> None:
        self.near = MemoryDirectory(LEASE_SECONDS)
        self.far = self.near.beside()

    def open(self):
        return self.near

    def open_far(self):
        return self.far

    async def cut(self) -> None:
        self.far.cut()

    async def mend(self) -> None:
        self.far.mend()

    async def lose(self, worker_id) -> None:
        await self.near.deregister(worker_id, self.near._content.seen[worker_id].record.incarnation)

    async def end_leases(self, clock) -> None:
        clock.move(self.lease)


class FileWorld:
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
        return directory_of(FileDiscovery(folder=str(folder), lease_seconds=LEASE_SECONDS, poll_ms=10))

    async def cut(self) -> None:
        self.way.unlink()

    async def mend(self) -> None:
        self.way.symlink_to(self.folder)

    async def lose(self, worker_id) -> None:
        [path] = self.folder.iterdir()
        path.unlink()

    async def end_leases(self, clock) -> None:
        clock.move(self.lease)


class EtcdWorld:
    lease = LEASE_SECONDS * SECOND

    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self.way = Way(server.port)

    def open(self):
        return self._open(self.server.address)

    def open_far(self):
        return self._open(f"127.0.0.1:{self.way.port}")

    def _open(self, address):
        return directory_of(EtcdDiscovery(endpoints=(address,), lease_seconds=LEASE_SECONDS))

    async def cut(self) -> None:
        await self.way.close()

    async def mend(self) -> None:
        await self.way.open()

    async def lose(self, worker_id) -> None:
        from aetcd import Client

        async with Client(port=self.server.port) as client:
            await client.delete_prefix(b"/fleet/workers/")

    async def end_leases(self, clock) -> None:
        await asyncio.sleep(LEASE_SECONDS / 2)  # etcd's clock is its own


@pytest.fixture(scope="module")
def etcd():
    pytest.importorskip("aetcd", reason="the extra `etcd` is not installed")
    with a_short_folder() as folder:
        server = EtcdServer(folder)
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture(params=["memory", "file", "etcd"])
async def a_world(request, tmp_path):
    match request.param:
        case "memory":
            yield MemoryWorld()
        case "file":
            yield FileWorld(tmp_path)
        case _:
            world = EtcdWorld(request.getfixturevalue("etcd"))
            await world.lose(None)
            await world.way.open()
            yield world
            await world.way.close()
