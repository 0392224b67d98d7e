"""Tests of the pools of a local cluster under plans in files; processes are only recorded."""

import json
import shutil
from types import SimpleNamespace

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import Role
from fleet.local.pools import LocalPools
from fleet.local.settings import ClusterSection, PoolSection, Topology
from fleet.local.supervision import ChildState
from fleet.local.topology import LocalPool
from workers.settings import WorkerSettings

pytestmark = pytest.mark.integration


class Processes:
    """Processes whose children are ready at once."""

    def __init__(self, *names):
        self.names = frozenset(names)

    def child_states(self):
        return dict.fromkeys(self.names, ChildState.READY)

    def failing(self):
        return frozenset()

    def add(self, process):
        self.names |= {process.child.name}


def a_pool(role, *workers, settings):
    return LocalPool(name=str(role), role=role, workers=workers, settings=settings, ready_within=1)


def worker(name):
    return WorkerSettings(worker_id=name, engine="simulated", model="tiny")


def refused(name):
    raise ConfigurationRefused("simulated.speedup: must be finite")


def test_pool_with_impossible_workers_says_why(tmp_path):
    sections = (PoolSection(role=Role.BOTH), PoolSection(role=Role.DECODE, replicas=0))
    topology = Topology(cluster=ClusterSection(engine="simulated"), pools=sections)
    planned = SimpleNamespace(
        pools=(a_pool(Role.BOTH, "both-0", settings=worker), a_pool(Role.DECODE, settings=refused))
    )
    processes = Processes("both-0")
    pools = LocalPools(topology, planned, processes, tmp_path, lambda line: None)
    wanted = {"plan": "plan", "writer": "me", "revision": 1}
    plan = {"revision": 1, "pools": {"decode": wanted | {"replicas": 1}, "both": wanted | {"replicas": 2}}}
    (pools.folder / "plan.json").write_text(json.dumps(plan))

    pools.step()
    pools.step()

    report = json.loads((pools.folder / "report.json").read_text())["pools"]
    assert (report["decode"]["ready"], report["decode"]["why"]) == (0, "limited")
    assert report["decode"]["message"] == "simulated.speedup: must be finite"
    assert (report["both"]["ready"], report["both"]["why"]) == (2, None)
    assert processes.names == {"both-0", "both-1"}


def test_deleted_report_is_rewritten_and_no_worker_ends(tmp_path):
    topology = Topology(cluster=ClusterSection(engine="simulated"), pools=(PoolSection(role=Role.BOTH),))
    planned = SimpleNamespace(pools=(a_pool(Role.BOTH, "both-0", settings=worker),))
    pools = LocalPools(topology, planned, Processes("both-0"), tmp_path, lambda line: None)
    wanted = {"replicas": 2, "plan": "plan", "writer": "me", "revision": 1}
    (pools.folder / "plan.json").write_text(json.dumps({"revision": 1, "pools": {"both": wanted}}))
    pools.step()
    pools.step()
    said = (pools.folder / "report.json").read_text()

    shutil.rmtree(pools.folder)
    pools.step()

    again = json.loads((pools.folder / "report.json").read_text())
    assert again["pools"] == json.loads(said)["pools"]
    assert again["revision"] == 0
