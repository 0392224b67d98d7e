"""Plan connector to RoleScalers, with the operator and the API server for tests."""

import contextlib

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.core.errors import ConfigurationRefused
from fleet.net.kubernetes.kinds import GROUP, VERSION
from fleet.planner.connectors.open import connector_of
from fleet.planner.messages import PlanWriter, PoolGapReason
from fleet.planner.ports import ConnectorUnreachable, PlanConflict, PlanRefused
from fleet.planner.settings import KubernetesTarget
from tests.contract.planner.connector_contract import *  # noqa: F403 - they run here
from tests.contract.planner.connector_contract import (
    DECODE,
    PREFILL,
    ROOM,
    ProcessKilled,
    a_plan,
    observed,
    observed_sizes,
)
from tests.support.fleet_processes import run_fleet
from tests.support.kube.api.running import RunningApiServer
from tests.support.kube.operator import a_deployment, an_operator
from tests.support.planner.connectors import KilledOnWrite, silent_port

PLANNED = {"mode": "Planner", "most": 8}


def a_role(name, kind=None, **fields):
    return {"name": name, "type": kind or name, "gpus": {"perReplica": 1}, "scaling": PLANNED} | fields


class KubernetesWorld:
    def __init__(self, asked, nodes, silent: RunningApiServer, folder) -> None:
        self.asked, self.nodes, self.silent, self.folder = asked, nodes, silent, folder

    def open(self, writer=PlanWriter.PLANNER):
        return self._open(self.asked.kubeconfig, writer)

    def _open(self, kubeconfig, writer=PlanWriter.PLANNER):
        target = KubernetesTarget(deployment="dd", namespace=self.asked.namespace, kubeconfig=kubeconfig)
        return connector_of(target, writer)

    @contextlib.asynccontextmanager
    async def open_mortal(self, answered):
        async with self.open() as connector:
            connector.cluster = KilledOnWrite(connector.cluster, "apply", answered, ProcessKilled)
            yield connector

    def open_cut(self):
        return self._open(str(self.silent.kubeconfig(self.folder)))

    async def occupy(self) -> None:
        self.nodes.holds_leaving = True

    async def finish(self) -> None:
        self.nodes.holds_leaving = False

    async def pin(self, pool, replicas) -> None:
        """Set the number of replicas, as `kubectl scale` does."""
        path = f"{self.asked.path('rolescalers')}/dd-{pool}/scale"
        self.asked.api.patch(path, "merge", {"spec": {"replicas": replicas}}, fieldManager="kubectl").expect(200)


@pytest.fixture
async def a_world(asked, nodes, tmp_path):
    nodes.gpus = ROOM
    asked.apply(a_deployment(a_role("prefill"), a_role("decode"))).expect(201)
    (tmp_path / "silent").mkdir()
    with silent_port() as port:
        async with an_operator(asked):
            world = KubernetesWorld(asked, nodes, RunningApiServer(f"http://127.0.0.1:{port}"), tmp_path / "silent")
            async with world.open() as planner:
                await observed_sizes(planner, decode=(1, 1, 0), prefill=(1, 1, 0))
            yield world


async def test_planner_leaves_static_roles_alone(a_world):
    roles = (a_role("prefill", scaling={"mode": "Static"}), a_role("decode", scaling={"mode": "External", "most": 8}))
    async with a_world.open() as planner, a_world.open(PlanWriter.PERSON) as person:
        before = await planner.observe()
        a_world.asked.apply(a_deployment(*roles)).expect(200)
        seen = await observed(planner, lambda seen: all(each.pinned for each in seen.pools))

        with pytest.raises(PlanRefused, match=r"^decode: scaling\.mode is External"):
            await planner.apply(a_plan("more", decode=2), before)
        for writer in (planner, person):
            with pytest.raises(PlanRefused, match=r"^prefill: scaling\.mode is Static"):
                await writer.apply(a_plan("more", prefill=2, decode=2), seen)
        await person.apply(a_plan("more", decode=2), seen)
        await observed_sizes(person, decode=(2, 2, 0), prefill=(1, 1, 0))


async def test_role_bounds_explain_fewer_replicas(a_world):
    async with a_world.open() as planner:
        await planner.apply(a_plan("many", decode=9), await planner.observe())
        seen = await observed(planner, lambda seen: seen.pool(DECODE).why is PoolGapReason.LIMITED)

    assert seen.pool(DECODE).wanted == 9
    assert "8" in seen.pool(DECODE).message


async def test_crash_looping_replica_is_failing(a_world, nodes):
    nodes.crashes["cpu:1"] = nodes.crashes["cuda:1"] = "fleet: model_dir: no such folder"
    async with a_world.open() as planner:
        await planner.apply(a_plan("more", decode=2), await planner.observe())
        seen = await observed(planner, lambda seen: seen.pool(DECODE).why is PoolGapReason.FAILING)

    assert seen.pool(DECODE).wanted == 2
    assert "dd-decode-" in seen.pool(DECODE).message


async def test_pool_is_not_settled_before_the_operator_acts(asked):
    def said(desired):
        role = {"name": "decode", "desired": desired, "ready": 1, "registered": 1}
        status = {"observedGeneration": 1, "roles": [role]}
        path = f"{asked.path('disaggdeployments', 'dd')}/status"
        asked.api.patch(path, "merge", {"status": status}, fieldManager="other").expect(200)

    asked.apply(a_deployment(a_role("prefill"), a_role("decode"))).expect(201)
    scaler = {"target": {"deployment": "dd", "role": "decode"}, "replicas": 1}
    meta = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "RoleScaler", "metadata": {"name": "dd-decode"}}
    asked.api.apply(asked.path("rolescalers", "dd-decode"), meta | {"spec": scaler}, "somebody").expect(201)
    target = KubernetesTarget(deployment="dd", namespace=asked.namespace, kubeconfig=asked.kubeconfig)
    async with connector_of(target, PlanWriter.PERSON) as planner:
        said(desired=3)  # two replicas begin
        early = (await planner.observe()).pool(DECODE)
        said(desired=1)
        acted = (await planner.observe()).pool(DECODE)

    assert [(each.wanted, each.ready, each.why) for each in (early, acted)] == [
        (1, 1, PoolGapReason.NOT_TAKEN_UP),
        (1, 1, None),
    ]
    assert (early.settled, acted.settled) == (False, True)


class Meanwhile:
    """Wraps a cluster in which another client writes once between the operator's read and its write."""

    def __init__(self, behind, write) -> None:
        self._behind, self._write = behind, write

    def __getattr__(self, name):
        if name == "apply":
            self._write()
            self._write = lambda: None
        return getattr(self._behind, name)


async def test_concurrent_status_write_is_no_conflict(a_world):
    path = a_world.asked.path("rolescalers", "dd-decode")

    def write(patch, part=""):
        a_world.asked.api.patch(f"{path}{part}", "merge", patch, fieldManager="other").expect(200)

    async with a_world.open() as planner:
        seen, behind = await planner.observe(), planner.cluster
        planner.cluster = Meanwhile(behind, lambda: write({"status": {"selector": "a=b"}}, "/status"))
        await planner.apply(a_plan("more", decode=2), seen)
        seen = await observed_sizes(planner, decode=(2, 2, 0), prefill=(1, 1, 0))

        planner.cluster = Meanwhile(behind, lambda: write({"spec": {"replicas": 0}}))
        with pytest.raises(PlanConflict):
            await planner.apply(a_plan("less", decode=1), seen)
        assert (await planner.observe()).pool(DECODE).wanted == 0


async def test_replicas_serve_without_known_registrations(a_world, nodes):
    nodes.registers, nodes.gpus = False, 2 * ROOM
    a_world.asked.apply(a_deployment(a_role("both", kind="aggregated"), name="unheard")).expect(201)
    target = KubernetesTarget(
        deployment="unheard", namespace=a_world.asked.namespace, kubeconfig=a_world.asked.kubeconfig
    )
    async with connector_of(target, PlanWriter.PLANNER) as planner:
        await observed_sizes(planner, both=(1, 1, 0))


async def test_missing_object_is_reported(a_world, tmp_path):
    target = KubernetesTarget(deployment="away", namespace="default", kubeconfig=a_world.asked.kubeconfig)
    async with connector_of(target, PlanWriter.PLANNER) as planner:
        with pytest.raises(ConnectorUnreachable, match="no DisaggDeployment away in namespace default"):
            await planner.observe()
    with pytest.raises(ConfigurationRefused, match=r"^connector\.kubeconfig: /nowhere"):
        async with connector_of(KubernetesTarget(deployment="dd", kubeconfig="/nowhere"), PlanWriter.PLANNER):
            pass


async def test_released_pool_may_be_planned_again(a_world):
    async with a_world.open() as planner:
        await a_world.pin("decode", 2)
        seen = await observed_sizes(planner, decode=(2, 2, 0), prefill=(1, 1, 0))
        assert seen.pool(DECODE).pinned.startswith("pinned: kubectl has set it to 2; ")

        await planner.release([DECODE])
        seen = await planner.observe()
        assert (seen.pool(DECODE).pinned, seen.pool(DECODE).wanted, seen.pool(DECODE).plan) == ("", 2, "")
        await planner.apply(a_plan("less", decode=1), seen)
        await observed_sizes(planner, decode=(1, 1, 0), prefill=(1, 1, 0))


async def test_person_pins_a_released_pool_again(a_world):
    async with a_world.open() as planner, a_world.open(PlanWriter.PERSON) as person:
        await a_world.pin("decode", 2)
        await planner.release([DECODE])
        assert not (await planner.observe()).pool(DECODE).pinned
        await person.apply(a_plan("same", decode=2), await person.observe())
        assert (await planner.observe()).pool(DECODE).pinned.partition(";")[0].endswith(" has set it to 2")
        await planner.release([DECODE])
        assert not (await planner.observe()).pool(DECODE).pinned
        await a_world.pin("decode", 1)
        assert (await planner.observe()).pool(DECODE).pinned.startswith("pinned: kubectl has set it to 1; ")


async def test_only_pools_in_mode_planner_are_released(a_world):
    static = a_role("prefill", scaling={"mode": "Static"})
    async with a_world.open() as planner:
        a_world.asked.apply(a_deployment(static, a_role("decode"))).expect(200)
        await a_world.pin("decode", 2)
        with pytest.raises(PlanRefused, match=r"^prefill: scaling\.mode is Static"):
            await planner.release([DECODE, PREFILL])
        with pytest.raises(PlanRefused, match=r"^none: there is no such pool; there are decode, prefill"):
            await planner.release(["none"])
        assert (await planner.observe()).pool(DECODE).pinned, "nothing was written"


def test_scale_command_releases_a_pool_on_kubernetes(asked):
    asked.apply(a_deployment(a_role("prefill"), a_role("decode"))).expect(201)
    scaler = {"target": {"deployment": "dd", "role": "decode"}, "replicas": 1}
    meta = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "RoleScaler", "metadata": {"name": "dd-decode"}}
    asked.api.apply(asked.path("rolescalers", "dd-decode"), meta | {"spec": scaler}, "somebody").expect(201)
    place = ["--deployment", f"{asked.namespace}/dd", "--kubeconfig", asked.kubeconfig]

    done = run_fleet("scale", "--release", "decode", *place)

    assert done.returncode == 0, done.stderr
    kept = asked.api.get(asked.path("rolescalers", "dd-decode")).expect(200)["metadata"]
    assert kept["annotations"]["fleet-serving.io/released"] == str(kept["generation"])
    assert "fleet-planner" in {each["manager"] for each in kept["managedFields"]}
    refused = run_fleet("scale", "--release", "prefill", *place)
    assert refused.returncode == 1
    assert "has not made its RoleScaler yet" in refused.stderr
