"""Tests of worker directories with foreign entries: an invalid record must not affect any worker's record."""

import os
from contextlib import aclosing

import msgspec
import pytest

from fleet.core.discovery import EtcdDiscovery, FileDiscovery, WorkerRecord
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.discovery.file import SUFFIX
from fleet.membership.discovery.open import open_directory
from fleet.membership.messages import DirectoryListing, RecordMissing, RecordSeen
from tests.support.servers.etcd import an_etcd_server

pytestmark = pytest.mark.integration

WORKER, INCARNATION, ADDRESS = WorkerId("decode-0"), Incarnation("new"), "10.0.0.1:50060"
RECORD = msgspec.json.encode(
    WorkerRecord(worker_id=WORKER, incarnation=INCARNATION, address=ADDRESS, lease_seconds=9),
)
DEEP = b'{"more":' + b"[" * 30_000 + b"]" * 30_000 + b"}"
NO_RECORDS = {"deep": DEEP, "not UTF-8": RECORD.replace(b"new", b"\xff"), "empty": b"", "of nobody": b"null"}


async def registered_workers(settings) -> list[str]:
    async with open_directory(settings) as directory, aclosing(directory.readings()) as readings:
        found = await anext(readings)
    assert isinstance(found, DirectoryListing)
    return [seen.record.worker_id for seen in found.all]


@pytest.fixture
async def settings(tmp_path):
    """Return the settings of a folder with one worker."""
    settings = FileDiscovery(folder=str(tmp_path))
    async with open_directory(settings) as directory:
        await directory.register(WORKER, INCARNATION, ADDRESS)
    return settings


@pytest.mark.parametrize("content", NO_RECORDS.values(), ids=NO_RECORDS)
async def test_invalid_file_harms_no_other_record(tmp_path, settings, content):
    (tmp_path / f"other{SUFFIX}").write_bytes(content)

    assert await registered_workers(settings) == [WORKER]


async def test_pipe_and_cyclic_link_harm_no_record(tmp_path, settings):
    os.mkfifo(tmp_path / f"pipe{SUFFIX}")
    (tmp_path / f"link{SUFFIX}").symlink_to(f"link{SUFFIX}")

    assert await registered_workers(settings) == [WORKER]


async def test_a_copy_of_a_record_does_not_keep_a_dead_worker(tmp_path, settings):
    """Alternate between the record and its copy, whose numbers differ; the change must not count as a renewal."""
    (tmp_path / f"a copy{SUFFIX}").write_bytes((tmp_path / f"{WORKER}{SUFFIX}").read_bytes().replace(b":1}", b":7}"))

    assert await registered_workers(settings) == [WORKER]


async def test_invalid_etcd_key_harms_no_other_record():
    aetcd = pytest.importorskip("aetcd", reason="the extra `etcd` is not installed")
    with an_etcd_server() as server:
        async with (
            aetcd.Client(port=server.port) as client,
            open_directory(EtcdDiscovery(endpoints=(server.address,))) as directory,
        ):
            for key, content in zip((b"a", b"b", b"c", b"d\xff"), NO_RECORDS.values(), strict=True):
                await client.put(b"/fleet/workers/" + key, content)
            async with aclosing(directory.readings()) as readings:
                assert await anext(readings) == DirectoryListing(all=())
                await client.delete(b"/fleet/workers/d\xff")
                await client.put(b"/fleet/workers/a", DEEP)
                await directory.register(WORKER, INCARNATION, ADDRESS)
                match await anext(readings):
                    case RecordSeen() as seen:
                        assert seen.record.worker_id == WORKER
                    case other:
                        pytest.fail(f"{other}")
                await directory.deregister(WORKER, INCARNATION)
                assert await anext(readings) == RecordMissing(worker_id=WORKER)
