"""Pools of a local cluster follow plans; the processes are fakes."""

import asyncio

import pytest
from msgspec import structs

from fleet.config import load
from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import ModelName
from fleet.core.roles import KvPath, Role
from fleet.local.pools import DRAIN, LocalPools
from fleet.local.settings import ClusterSection, PoolSection, Topology
from fleet.local.supervision import ChildState
from fleet.local.topology import LocalPlan, LocalPool, plan, pool_names
from fleet.planner.connectors.folder import FolderRecords
from fleet.planner.connectors.virtual import Intent, PoolIntent
from fleet.planner.messages import PlanId, PoolGapReason, PoolName
from fleet.planner.ports import ConnectorUnreachable
from fleet.router.settings.router import RouterSettings
from fleet.router.tenants import TenantSettings
from kvstore.security.credentials import Credentials
from kvstore.service.settings import StoreSettings
from kvstore.tracing.settings import TracingSettings
from tests.support.waiting import until
from workers.settings import SimulatedSettings, WorkerSettings


class Processes:
    """Fake of `LocalProcesses`, which starts no processes."""

    def __init__(self, *names: str) -> None:
        self.has = dict.fromkeys(names, ChildState.READY)
        self.dying: set[str] = set()
        self.removed: list[str] = []

    @property
    def names(self):
        return frozenset(self.has)

    def child_states(self):
        return {name: condition for name, condition in self.has.items() if condition is not None}

    def failing(self):
        return frozenset(self.dying)

    def add(self, process):
        self.has[process.child.name] = None  # the machine has not seen it yet

    def remove(self, name, within):
        assert within == DRAIN
        self.removed.append(name)
        self.has[name] = ChildState.DRAINING

    def start(self):
        self.has = {
            name: condition if condition is ChildState.DRAINING else ChildState.READY
            for name, condition in self.has.items()
        }

    def finish(self):
        self.has = {name: each for name, each in self.has.items() if each is not ChildState.DRAINING}


def a_pool(role: Role, replicas: int) -> LocalPool:
    workers = tuple(f"{role}-{number}" for number in range(replicas))

    def settings(name):
        return WorkerSettings(worker_id=name, role=role, model="tiny", engine="simulated", kv_paths=(KvPath.DIRECT,))

    return LocalPool(name=str(role), role=role, workers=workers, settings=settings, ready_within=Nanos(SECOND))


class World:
    def __init__(self, folder, most_workers=4, ask_worth=None) -> None:
        topology = Topology(cluster=ClusterSection(engine="simulated", most_workers=most_workers))
        pools = (a_pool(Role.PREFILL, 1), a_pool(Role.DECODE, 1))
        self.processes = Processes("router", "prefill-0", "decode-0")
        planned = LocalPlan(
            processes=(),
            model="tiny",
            model_dir=folder,
            http="",
            grpc="",
            health="",
            control="",
            control_credentials=Credentials(),
            kserve="",
            speaks_tls=False,
            authority="",
            pools=pools,
            disaggregates=True,
            max_model_len=4096,
        )
        self.pools = LocalPools(topology, planned, self.processes, folder, print, ask_worth)
        self.records = FolderRecords(self.pools.folder)

    async def plan(self, **replicas: int) -> None:
        kept = await self.records.read()
        revision = kept.intent.revision + 1
        pools = {
            PoolName(name): PoolIntent(replicas=count, plan=PlanId("plan"), writer="test", revision=revision)
            for name, count in replicas.items()
        }
        assert await self.records.write(Intent(revision=revision, pools=kept.intent.pools | pools), kept)

    async def step(self):
        """Let the pools make a step, and return their report by pool: asked, ready, draining, why."""
        self.pools.step()
        report = (await self.records.read()).report
        return {name: (each.asked, each.ready, each.draining, each.why) for name, each in report.pools.items()}


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


async def test_a_pool_grows_by_names_that_are_free(world):
    await world.plan(decode=3)
    assert await world.step() == {"prefill": (1, 1, 0, None), "decode": (3, 1, 0, None)}
    assert {"decode-1", "decode-2"} <= world.processes.names
    world.processes.start()
    assert (await world.step())["decode"] == (3, 3, 0, None)


async def test_idle_worker_is_removed_first_then_the_last_one(world):
    await world.plan(decode=3)
    await world.step()
    world.processes.has |= {"decode-1": ChildState.STARTING, "decode-2": ChildState.READY}

    await world.plan(decode=2)
    await world.step()
    await world.plan(decode=1)
    assert (await world.step())["decode"] == (1, 1, 2, None)

    assert world.processes.removed == ["decode-1", "decode-2"]
    world.processes.finish()
    assert (await world.step())["decode"] == (1, 1, 0, None)


@pytest.mark.parametrize(
    ("worth", "victims"),
    [
        ({"decode-0": 9.0, "decode-1": 0.5, "decode-2": 4.0}, ["decode-1", "decode-2"]),
        ({"decode-0": 0.0, "decode-1": 0.0, "decode-2": 0.1}, ["decode-1", "decode-0"]),
        ({}, ["decode-2", "decode-1"]),
    ],
)
async def test_workers_with_the_least_valuable_caches_go_first(tmp_path, worth, victims):
    asked = []

    async def ask():
        asked.append(1)
        return worth

    world = World(tmp_path, ask_worth=ask)
    following = asyncio.get_running_loop().create_task(world.pools.follow())
    try:
        await world.plan(decode=3)
        await until(lambda: "decode-2" in world.processes.names)
        world.processes.start()
        assert not asked
        await world.plan(decode=1)
        await until(lambda: len(world.processes.removed) == 2)
    finally:
        following.cancel()
        await asyncio.wait([following])
    assert world.processes.removed == victims
    assert len(asked) == 1


async def test_draining_worker_keeps_its_place(tmp_path):
    world = World(tmp_path, most_workers=3)
    await world.plan(decode=2)
    await world.step()
    world.processes.start()

    await world.plan(decode=1, prefill=2)
    assert await world.step() == {"prefill": (2, 1, 0, PoolGapReason.NO_ROOM), "decode": (1, 1, 1, None)}
    world.processes.finish()
    await world.step()
    world.processes.start()
    assert await world.step() == {"prefill": (2, 2, 0, None), "decode": (1, 1, 0, None)}


async def test_a_worker_that_does_not_start_is_why(world):
    await world.plan(decode=2)
    await world.step()
    world.processes.has["decode-1"] = ChildState.PAUSED
    world.processes.dying = {"decode-1"}

    assert (await world.step())["decode"] == (2, 1, 0, PoolGapReason.FAILING)


async def test_plan_with_invalid_topology_is_not_obeyed(world):
    await world.plan(decode=0, prefill=2)
    assert await world.step() == {
        "prefill": (1, 1, 0, PoolGapReason.LIMITED),
        "decode": (1, 1, 0, PoolGapReason.LIMITED),
    }
    assert world.processes.removed == []

    await world.plan(decode=1)
    assert await world.step() == {"prefill": (2, 1, 0, None), "decode": (1, 1, 0, None)}


async def test_a_plan_that_cannot_be_read_is_not_obeyed(world):
    await world.step()
    (world.pools.folder / "plan.json").write_text("{")

    with pytest.raises(ConnectorUnreachable, match=r"plan\.json"):
        world.pools.step()


async def test_plans_are_obeyed_without_a_lock_file(world, capsys):
    (world.pools.folder / ".orchestrator").mkdir()  # a folder instead of the lock file, so that it cannot be made
    following = asyncio.create_task(world.pools.follow())
    try:
        await until(lambda: following.done() or (world.pools.folder / "report.json").exists())
        assert not following.done() or following.result()
    finally:
        following.cancel()
    assert capsys.readouterr().out == f"{world.pools.folder}: Is a directory\n"
    assert not (world.pools.folder / ".orchestrator.new").exists()


def test_pools_of_one_role_are_numbered():
    of = [PoolSection(role=Role.DECODE), PoolSection(role=Role.PREFILL), PoolSection(role=Role.DECODE)]

    assert pool_names(Topology(pools=tuple(of[:2]))) == ["decode", "prefill"]
    assert pool_names(structs.replace(Topology(), pools=tuple(of))) == ["decode/1", "prefill", "decode/2"]


def test_simulated_loading_time_extends_the_limit_of_a_start(tmp_path):
    """Plan a simulated worker that loads for ten minutes: its time limit for the start is longer than this."""
    (tmp_path / "config.json").write_text("{}")
    sections = tuple(
        PoolSection(role=Role.BOTH, simulated=SimulatedSettings(start_ms=start_ms)) for start_ms in (0, 600_000)
    )
    router = RouterSettings(http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0")
    topology = Topology(cluster=ClusterSection(engine="simulated"), router=router, pools=sections)

    quick, slow = plan(topology, folder=tmp_path, model_dir=tmp_path, model=ModelName("tiny")).pools

    assert slow.ready_within == quick.ready_within + 600 * SECOND


def test_all_processes_trace_alike(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    router = RouterSettings(http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0")
    tracing = TracingSettings(endpoint="http://collector:4317")
    topology = Topology(cluster=ClusterSection(engine="simulated"), router=router, tracing=tracing)
    pools = plan(topology, folder=tmp_path, model_dir=tmp_path, model=ModelName("tiny")).pools

    assert load(tmp_path / "router.json", RouterSettings).tracing == tracing
    assert load(tmp_path / "kvstore.json", StoreSettings).tracing == tracing
    assert all(pool.settings(worker).tracing == tracing for pool in pools for worker in pool.workers)
    with pytest.raises(ValueError, match="use the section `tracing`"):
        Topology(router=structs.replace(router, tracing=tracing))


@pytest.mark.parametrize(
    ("router", "makes_one"),
    [
        (RouterSettings(tenants={"acme": TenantSettings(api_key_sha256=("0" * 64,))}), True),
        (RouterSettings(tenants={"acme": TenantSettings(api_key_sha256=("0" * 64,))}, tenant_secret="mine"), False),
        (RouterSettings(tenants={"acme": TenantSettings()}), False),
    ],
)
def test_router_with_keys_gets_a_secret_of_its_cluster(tmp_path, router, makes_one):
    """Check the router's settings file: with a secret, streams can be resumed, also after a restart of the router."""
    (tmp_path / "config.json").write_text("{}")
    router = structs.replace(router, http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0")
    topology = Topology(cluster=ClusterSection(engine="simulated"), router=router)
    plan(topology, folder=tmp_path, model_dir=tmp_path, model=ModelName("tiny"))
    written = load(tmp_path / "router.json", RouterSettings)
    assert (len(written.prompt_secret) == 64) is makes_one
