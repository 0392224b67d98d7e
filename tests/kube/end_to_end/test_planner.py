"""ServingPlan on a cluster of real processes: pools follow the load, and `kubectl scale` pins a pool.

If a planner is killed, the next one finishes its plan.
"""

import threading
from pathlib import Path
from typing import Self

import httpx
import msgspec
import pytest
import yaml

from tests.support.certificates import Authority
from tests.support.kube.clients import Api
from tests.support.kube.kubelet.network import why_not
from tests.support.kube.tools import Command, helm_3, kubectl, tools_folder

if why := why_not():
    pytest.skip(why, allow_module_level=True)

from tests.support.fleet_processes import run_fleet
from tests.support.kube.api.running import an_api_server
from tests.support.kube.kubelet.cluster import a_cluster
from tests.support.kube.kubelet.objects import condition
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(420)  # a dozen processes are started, possibly on a slow machine

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "fleet"
FLEET = "/apis/fleet-serving.io/v1alpha1/namespaces/default"
SECONDS = 90
VALUES = {
    "routers": {"enabled": False},
    "operator": {"replicas": 1},
    "planner": {
        "enabled": True,
        "settings": {"lease": {"duration_seconds": 6, "renew_within_seconds": 4, "retry_seconds": 0.5}},
    },
    "crds": {"keep": False},
}
PLAN = {
    "apiVersion": "fleet-serving.io/v1alpha1",
    "kind": "ServingPlan",
    "metadata": {"name": "tiny"},
    "spec": {
        "deployment": "tiny",
        "mode": "Active",
        "requestsPerReplica": 4,
        "intervalSeconds": 1,
        "coolDownSeconds": 3,
        "roles": [{"role": "workers", "least": 1, "most": 3, "startSeconds": 60}],
    },
}


def a_deployment(model_dir: Path) -> dict:
    """Return a deployment of one planned role, whose simulated engine takes 12 s to start, and 20 ms for a token.

    A plan then outlasts the Lease of a killed planner, so that its successor finds the plan under way.
    """
    engine = ["--set=simulated.start_ms=12000", "--set=simulated.latency.step_base_ms=20.0"]
    pods = {"spec": {"containers": [{"name": "main", "args": engine}]}}
    scaling = {"mode": "Planner", "least": 1, "most": 4}
    drain = {"timeoutSeconds": 30}
    worker = {"name": "workers", "type": "aggregated", "scaling": scaling, "drain": drain, "podTemplate": pods}
    return {
        "apiVersion": "fleet-serving.io/v1alpha1",
        "kind": "DisaggDeployment",
        "metadata": {"name": "tiny"},
        "spec": {
            "engine": "simulated",
            "model": {"name": "tiny", "claim": "models", "uri": model_dir.name},
            "roles": [{"name": "router", "type": "router"}, worker],
        },
    }


class RisingLoad:
    """Keeps a number of requests running, which a test may change, and records failures."""

    MOST = 12

    def __init__(self, http: str) -> None:
        self.running = 0
        self.answered = 0
        self.failed: list[str] = []
        self._http = http
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(self.MOST)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=f"http://{self._http}", trust_env=False, timeout=60) as client:
            while not self._stop.is_set():
                if number >= self.running:
                    self._stop.wait(0.05)
                    continue
                asked = {"model": "tiny", "prompt": f"{self.answered} Hello", "max_tokens": 100, "ignore_eos": True}
                try:
                    client.post("/v1/completions", json=asked).raise_for_status()
                    self.answered += 1
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))


class PlannedCluster:
    """Reads the state of the cluster from the API server."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def pods(self, label: str) -> dict[str, dict]:
        found = self.api.get("/api/v1/namespaces/default/pods", labelSelector=label).expect(200)["items"]
        return {each["metadata"]["name"]: each for each in found}

    def ready_workers(self) -> int:
        return sum(bool(condition(pod, "Ready")) for pod in self.pods("fleet-serving.io/role=workers").values())

    def workers(self) -> int:
        return len(self.pods("fleet-serving.io/role=workers"))

    def plan(self) -> dict:
        return self.api.get(f"{FLEET}/servingplans/tiny").expect(200).get("status", {})

    def said(self, kind: str) -> dict:
        return next((each for each in self.plan().get("conditions", ()) if each["type"] == kind), {})

    def holds(self, kind: str, status: str = "True") -> bool:
        return self.said(kind).get("status") == status

    def latest_wants(self, workers: int) -> bool:
        """Return whether the latest plan in the status changes the pool to this number; the status may lag behind the pool."""
        return self.plan()["plans"][0]["changes"].endswith(f" to {workers}") and self.wanted() == workers

    def wanted(self) -> int:
        return self.api.get(f"{FLEET}/rolescalers/tiny-workers").expect(200)["spec"]["replicas"]


def test_planner_follows_load_pins_and_kills(tmp_path, model_dir):
    authority = Authority(tmp_path, "authority")
    with (
        an_api_server(with_controllers=True, authority=authority) as server,
        a_cluster(server, tmp_path / "cluster", claims={"models": model_dir.parent}) as cluster,
        Api(server.url, authority=server.authority) as api,
    ):
        config = server.kubeconfig(tmp_path, token="admin")
        helm = Command(helm_3(tools_folder()), config, tmp_path)
        kube = Command(kubectl(tools_folder()), config, tmp_path)
        values = tmp_path / "values.json"
        values.write_bytes(msgspec.json.encode(VALUES))
        seen = PlannedCluster(api)
        helm("install", "fleet", str(CHART), "--values", str(values))
        kube("apply", "-f", "-", stdin=yaml.safe_dump(a_deployment(model_dir)))
        kube("apply", "-f", "-", stdin=yaml.safe_dump(PLAN))
        kube("wait", "disaggdeployment/tiny", "--for=condition=Ready", f"--timeout={SECONDS}s")
        kube("wait", "servingplan/tiny", "--for=condition=Settled", f"--timeout={SECONDS}s")
        assert seen.workers() == 1
        with RisingLoad(cluster.way_to("tiny-router", 8000)) as load:
            # A rising load grows real processes.
            load.running = 10
            eventually(lambda: seen.ready_workers() == 3, SECONDS)
            eventually(lambda: seen.holds("Settled"), SECONDS)

            # A falling load shrinks them.
            load.running = 1
            eventually(lambda: seen.workers() == 1, SECONDS)

            # A number of replicas that a person sets pins the pool, until the person releases it.
            kube("scale", "rolescaler/tiny-workers", "--replicas=2")
            eventually(lambda: seen.holds("Pinned"), SECONDS)
            assert "has set it to 2" in seen.said("Pinned")["message"]
            load.running = 10
            eventually(lambda: seen.ready_workers() == 2, SECONDS)
            assert seen.wanted() == 2
            place = ["--deployment", "default/tiny", "--kubeconfig", str(config)]
            assert run_fleet("scale", "--release", "workers", *place).returncode == 0
            eventually(lambda: seen.holds("Pinned", "False"), SECONDS)

            # The leader is killed while its plan is under way, and its pod is removed.
            eventually(lambda: seen.said("Settled").get("reason") == "PlanUnderWay" and seen.latest_wants(3), SECONDS)
            leader, plan = seen.plan()["planner"], seen.plan()["plans"][0]["id"]
            cluster.kill_pod(leader)
            kube("delete", "pod", leader, "--grace-period=0", "--force", "--wait=false")
            successor = eventually(lambda: (now := seen.plan()["planner"]) != leader and now, SECONDS)
            assert successor in seen.pods("app.kubernetes.io/component=planner")
            eventually(lambda: seen.ready_workers() == 3, SECONDS)
            eventually(lambda: seen.holds("Settled"), SECONDS)
            adopted = next(each for each in seen.plan()["plans"] if each["id"] == plan)
            assert adopted["state"] == "settled", "the successor has finished the plan of the killed planner"

            load.running = 0
            eventually(lambda: seen.workers() == 1, SECONDS)
        assert load.failed == []
        assert load.answered > 50
        helm("uninstall", "fleet")
        eventually(lambda: not cluster.processes(), SECONDS)
