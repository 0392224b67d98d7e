"""Contract tests of connectors: a folder, a real etcd, and `fleet up`. tests/kube tests the Kubernetes connector."""

import asyncio
import contextlib
import fcntl
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from fleet.cli.main import run
from fleet.client import AsyncClient
from fleet.core.system_clock import SystemClock, utc_now
from fleet.planner.connectors.folder import MOST_BYTES, FolderRecords
from fleet.planner.connectors.open import connector_of
from fleet.planner.connectors.virtual import Intent
from fleet.planner.execution import PlanOutcome
from fleet.planner.messages import PlanWriter, PoolGapReason
from fleet.planner.ports import ConnectorUnreachable
from fleet.planner.server import carry_out
from fleet.planner.settings import EtcdTarget, FolderTarget
from tests.contract.planner.connector_contract import *  # noqa: F403 - they run here
from tests.contract.planner.connector_contract import DECODE, ROOM, SECONDS, ProcessKilled, a_plan, sizes
from tests.support.planner.connectors import FakeOrchestrator, KilledOnWrite, silent_port
from tests.support.servers.etcd import EtcdServer, an_etcd_server
from tests.support.waiting import eventually, stays

TOPOLOGY = f"""
[cluster]
engine = "simulated"
kv_paths = ["direct"]
most_workers = {ROOM}
[router]
http_listen = "127.0.0.1:0"
grpc_listen = "127.0.0.1:0"
[[pools]]
role = "prefill"
[[pools]]
role = "decode"
simulated = {{speedup = 0.1, eos_probability = 0.0}}
"""


class VirtualConnectorSetup:
    """An orchestrator that shares a folder with the connector."""

    def __init__(self, folder: Path) -> None:
        self.target = FolderTarget(folder=str(folder))
        self.folder = folder
        self.orchestrator = FakeOrchestrator(ROOM, self.read, self.write)

    async def read(self) -> bytes:
        path = self.folder / "plan.json"
        return path.read_bytes() if path.exists() else b""

    async def write(self, report: bytes) -> None:
        (self.folder / "new").write_bytes(report)
        (self.folder / "new").rename(self.folder / "report.json")

    def open(self, writer=PlanWriter.PLANNER):
        return connector_of(self.target, writer)

    @contextlib.asynccontextmanager
    async def open_mortal(self, answered):
        async with self.open() as connector:
            connector.records = KilledOnWrite(connector.records, "write", answered, ProcessKilled)
            yield connector

    def open_cut(self):
        return connector_of(FolderTarget(folder=str(self.folder / "away")), PlanWriter.PLANNER)

    async def occupy(self) -> None:
        self.orchestrator.finishes = False

    async def finish(self) -> None:
        self.orchestrator.finishes = True

    async def pin(self, pool, replicas) -> None:
        async with self.open(PlanWriter.PERSON) as person:
            await person.apply(a_plan("by hand", **{pool: replicas}), await person.observe())


class EtcdConnectorSetup(VirtualConnectorSetup):
    """An orchestrator that shares a real etcd with the connector."""

    def __init__(self, server: EtcdServer, client, silent: int) -> None:
        self.target = EtcdTarget(endpoints=(server.address,))
        self.client = client
        self.silent = silent
        self.orchestrator = FakeOrchestrator(ROOM, self.read, self.write)

    async def read(self) -> bytes:
        found = await self.client.get(b"/fleet/scaling/plan")
        return found.value if found is not None else b""

    async def write(self, report: bytes) -> None:
        await self.client.put(b"/fleet/scaling/report", report)

    def open_cut(self):
        return connector_of(EtcdTarget(endpoints=(f"127.0.0.1:{self.silent}",)), PlanWriter.PLANNER)


class LocalConnectorSetup(VirtualConnectorSetup):
    """A cluster of `fleet up`, which a person scales by the command line."""

    def __init__(self, endpoints) -> None:
        self.endpoints = endpoints
        self.folder = Path(endpoints["plans"])
        self.target = FolderTarget(folder=endpoints["plans"])
        self.asking = contextlib.AsyncExitStack()

    async def occupy(self) -> None:
        """Give each decode worker a long answer."""
        client = await self.asking.enter_async_context(AsyncClient(self.endpoints["grpc"]))
        asked = {"max_tokens": 3000, "ignore_eos": True, "timeout_seconds": SECONDS}
        self.streams = [
            await self.asking.enter_async_context(client.generate(list(range(100, 140)), **asked)) for _ in range(2)
        ]
        for stream in self.streams:
            await anext(aiter(stream))
        assert await self.booked() == {"prefill-0": 0, "decode-0": 1, "decode-1": 1}

    async def booked(self) -> dict[str, int]:
        """Return the number of reserved requests by worker."""
        async with AsyncClient(self.endpoints["grpc"]) as client:
            status = await client.status()
        return {worker.worker_id: worker.booked_requests for pool in status.pools for worker in pool.workers}

    async def finish(self) -> None:
        """Check that all workers, also the draining one, go on with their answers; then cancel the answers."""
        for stream in self.streams:
            for _ in range(50):
                await anext(aiter(stream))
        assert await self.booked() == {"prefill-0": 0, "decode-0": 1, "decode-1": 1}
        await self.asking.aclose()

    async def pin(self, pool, replicas) -> None:
        command = ["scale", "--plans", self.endpoints["plans"], f"{pool}={replicas}"]
        assert await asyncio.to_thread(run, command) == 0


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up")
    (folder / "cluster.toml").write_text(TOPOLOGY)
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "fleet.cli.main", "up", "--config", str(folder / "cluster.toml")]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=output, stderr=output)
    try:
        eventually(lambda: ready.exists() or process.poll() is not None, SECONDS)
        assert ready.exists(), (folder / "output").read_text()
        yield json.loads(ready.read_text())
        process.terminate()
        assert process.wait(SECONDS) == 0, (folder / "output").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def etcd():
    with an_etcd_server() as server:
        yield server


@contextlib.asynccontextmanager
async def beside(world: VirtualConnectorSetup):
    await world.orchestrator.step()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.orchestrator.run())
        yield world
        running.cancel()


@pytest.fixture(params=["folder", "etcd", "local"])
async def a_world(request, tmp_path):
    match request.param:
        case "folder":
            async with beside(VirtualConnectorSetup(tmp_path)) as world:
                yield world
        case "etcd":
            server = request.getfixturevalue("etcd")
            from aetcd import Client

            with silent_port() as silent:
                async with Client(port=server.port) as client:
                    await client.delete_prefix(b"/fleet/scaling/")
                    async with beside(EtcdConnectorSetup(server, client, silent)) as world:
                        yield world
        case _:
            yield LocalConnectorSetup(request.getfixturevalue("local"))


@pytest.mark.parametrize("a_world", ["local"], indirect=True)
async def test_plan_without_serving_workers_is_rolled_back(a_world):
    async with a_world.open() as planner:
        before = await planner.observe()
        outcome, seen = await carry_out(planner, a_plan("odd", decode=0), before, SystemClock(), lambda seen: None)

    assert outcome is PlanOutcome.ROLLED_BACK
    assert sizes(seen) == sizes(before)


@pytest.mark.parametrize("a_world", ["folder", "etcd"], indirect=True)
async def test_one_of_many_concurrent_writers_is_not_late(a_world):
    async with contextlib.AsyncExitStack() as stack:
        records = [(await stack.enter_async_context(a_world.open())).records for _ in range(8)]
        kept = await records[0].read()
        async with asyncio.TaskGroup() as tasks:
            writes = [
                tasks.create_task(each.write(Intent(revision=1, settle_by=str(number)), kept))
                for number, each in enumerate(records)
            ]

        assert sum(each.result() for each in writes) == 1
        [winner] = [number for number, each in enumerate(writes) if each.result()]
        assert (await records[0].read()).intent.settle_by == str(winner)


async def test_writer_waits_for_another_writer(tmp_path):
    records = FolderRecords(tmp_path)
    kept = await records.read()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with asyncio.TaskGroup() as tasks:
            write = tasks.create_task(records.write(Intent(revision=1), kept))
            await stays(
                lambda: not write.done() and not (tmp_path / "plan.json").exists(),
                0.1,
                "a writer without a lock is done",
            )
            fcntl.flock(lock, fcntl.LOCK_UN)

        assert write.result()


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"revision": -1}', b"\xff", b"[" * 100_000, b'{"pools": {}}'.ljust(MOST_BYTES + 1)],
    ids=["torn", "array", "negative", "no text", "deep", "long"],
)
@pytest.mark.parametrize("name", ["plan.json", "report.json"])
async def test_invalid_plan_or_report_is_ignored_and_not_overwritten(tmp_path, name, content):
    (tmp_path / "report.json").write_text('{"pools": {"decode": {"asked": 1, "ready": 1}}}')
    async with connector_of(FolderTarget(folder=str(tmp_path)), PlanWriter.PLANNER) as planner:
        seen = await planner.observe()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConnectorUnreachable, match=name):
            await planner.observe()
        with pytest.raises(ConnectorUnreachable, match=name):
            await planner.apply(a_plan("more", decode=2), seen)

    assert (tmp_path / name).read_bytes() == content


async def test_error_in_a_report_names_the_pool(tmp_path):
    pool = {"asked": 1, "ready": 1}
    (tmp_path / "report.json").write_text(json.dumps({"pools": {"decode": pool, "prefill": pool | {"ready": "one"}}}))
    async with connector_of(FolderTarget(folder=str(tmp_path)), PlanWriter.PLANNER) as planner:
        with pytest.raises(
            ConnectorUnreachable, match=r"report.json: pools\.prefill\.ready: Expected `int`, got `str`"
        ):
            await planner.observe()


@pytest.mark.parametrize(
    ("report", "field"),
    [
        ({"pools": {"decode": {"asked": 20_000, "ready": 1}}}, "asked"),
        ({"pools": {"decode": {"asked": 1, "ready": 20_000}}}, "ready"),
        ({"revision": (1 << 53) - 1, "pools": {"decode": {"asked": 1, "ready": 1}}}, "revision"),
        ({"revision": 1 << 64, "pools": {"decode": {"asked": 1, "ready": 1}}}, "revision"),
    ],
)
async def test_report_cannot_make_the_plan_unreadable(tmp_path, report, field):
    (tmp_path / "report.json").write_text('{"pools": {"decode": {"asked": 1, "ready": 1}}}')
    async with connector_of(FolderTarget(folder=str(tmp_path)), PlanWriter.PLANNER) as planner:
        seen = await planner.observe()
        (tmp_path / "report.json").write_text(json.dumps(report))
        with pytest.raises(ConnectorUnreachable, match=field):
            await planner.apply(a_plan("more", decode=2), seen)

    assert not (tmp_path / "plan.json").exists()


async def test_report_with_a_very_long_revision_is_unreadable(tmp_path):
    report = '{"revision": %s, "pools": {"decode": {"asked": 1, "ready": 1}}}' % ("9" * 4300)
    (tmp_path / "report.json").write_text(report)
    async with connector_of(FolderTarget(folder=str(tmp_path)), PlanWriter.PLANNER) as planner:
        with pytest.raises(ConnectorUnreachable, match="revision"):
            await planner.observe()


@pytest.mark.parametrize("name", ["plan.json", "report.json"])
async def test_special_files_do_not_block_the_connector(tmp_path, name):
    (tmp_path / "report.json").write_text('{"pools": {"decode": {"asked": 1, "ready": 1}}}')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    async with connector_of(FolderTarget(folder=str(tmp_path)), PlanWriter.PLANNER) as planner:
        with pytest.raises(ConnectorUnreachable, match=name):
            await asyncio.wait_for(planner.observe(), 60)


async def test_plan_shows_deadline_while_no_orchestrator_takes_it_up(tmp_path):
    report = {"revision": 7, "later_field": 1, "pools": {"decode": {"asked": 1, "ready": 1, "why": None}}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    async with connector_of(FolderTarget(folder=str(tmp_path)), PlanWriter.PLANNER) as planner:
        await planner.apply(a_plan("more", decode=2), await planner.observe())
        pool = (await planner.observe()).pool(DECODE)

    assert (pool.wanted, pool.pending, pool.why) == (2, 1, PoolGapReason.NOT_TAKEN_UP)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["revision"] == plan["pools"]["decode"]["revision"] == 8
    assert 0 < (datetime.fromisoformat(plan["settle_by"]) - utc_now()).total_seconds() <= SECONDS


async def test_plan_is_not_settled_by_state_from_before_it(tmp_path):
    def report(revision, asked, draining):
        pool = {"asked": asked, "ready": 1, "draining": draining}
        (tmp_path / "report.json").write_text(json.dumps({"revision": revision, "pools": {"decode": pool}}))

    report(revision=7, asked=3, draining=0)  # two replicas start
    async with connector_of(FolderTarget(folder=str(tmp_path)), PlanWriter.PLANNER) as planner:
        await planner.apply(a_plan("less", decode=1), await planner.observe())
        early = (await planner.observe()).pool(DECODE)
        report(revision=8, asked=1, draining=1)
        leaving = (await planner.observe()).pool(DECODE)
        report(revision=8, asked=1, draining=0)
        left = (await planner.observe()).pool(DECODE)

    assert [each.settled for each in (early, leaving, left)] == [False, False, True]
    assert [each.why for each in (early, leaving, left)] == [PoolGapReason.NOT_TAKEN_UP, None, None]


async def test_folder_without_a_report_has_no_orchestrator(tmp_path):
    async with connector_of(FolderTarget(folder=str(tmp_path)), PlanWriter.PLANNER) as planner:
        with pytest.raises(ConnectorUnreachable, match="is it running"):
            await planner.observe()
