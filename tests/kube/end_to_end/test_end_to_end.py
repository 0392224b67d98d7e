"""End-to-end test: from an empty cluster to an empty cluster, with a model that real processes serve.

Helm installs the chart. The deployment is scaled and updated under load, and the release is upgraded. At the end, all
objects are removed.
"""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import httpx
import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.certificates import Authority
from tests.support.kube.clients import Api, inhabitants
from tests.support.kube.kubelet.network import why_not
from tests.support.kube.tools import Command, helm_3, kubectl, tools_folder

if why := why_not():
    pytest.skip(why, allow_module_level=True)

from fleet.client import Client, FleetError
from fleet.core.requests import Source
from fleet.core.roles import Phase
from tests.support.kube.api.running import an_api_server
from tests.support.kube.kubelet.cluster import a_cluster
from tests.support.kube.kubelet.objects import condition
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)  # a dozen processes are started, possibly on a slow machine

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "fleet"
SAMPLE = Path(__file__).parents[3] / "deploy" / "samples" / "cpu.yaml"
CORE, APPS = "/api/v1/namespaces/default", "/apis/apps/v1/namespaces/default"
FLEET = "/apis/fleet-serving.io/v1alpha1/namespaces/default"
SECONDS = 60
HANDED_OVER = ("fleet_kv_blocks_total", {"model": "tiny", "phase": "decode", "source": "direct"})
PROMPT = "Say hello to everybody who is there, one after the other, and then once more to all of them together."
VALUES = {"routers": {"enabled": False}, "operator": {"replicas": 1}, "crds": {"keep": False}}


@pytest.fixture
def server(tmp_path):
    authority = Authority(tmp_path, "authority")
    with an_api_server(with_controllers=True, authority=authority) as server:
        yield server


@pytest.fixture
def cluster(server, tmp_path, model_dir):
    with a_cluster(server, tmp_path / "cluster", claims={"models": model_dir.parent}) as cluster:
        yield cluster


class Load:
    """Sends requests from several threads, half of them over gRPC and half over HTTP, and records failures."""

    def __init__(self, grpc: str, http: str, threads: int = 8) -> None:
        self.answered = 0
        # Revisions of the workers that sent blocks, and of those that received them.
        self.pairs: set[tuple[str, str]] = set()
        self.failed: list[str] = []
        self._grpc, self._http = grpc, http
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._by_http if number % 2 else self._by_grpc, daemon=True)
            for number in range(threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _by_http(self) -> None:
        with httpx.Client(base_url=f"http://{self._http}", trust_env=False, timeout=30) as client:
            while not self._stop.is_set():
                asked = {"model": "tiny", "prompt": f"{self.answered} {PROMPT}", "max_tokens": 16}
                try:
                    client.post("/v1/completions", json=asked).raise_for_status()
                    self.answered += 1
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))

    def _by_grpc(self) -> None:
        with Client(self._grpc) as client:
            while not self._stop.is_set():
                try:
                    answer = client.complete(f"{self.answered} {PROMPT}", max_tokens=16)
                    self.answered += 1
                    self.pairs |= {
                        (revision(origin.origin), revision(phase.worker_id))
                        for phase in answer.kv
                        for origin in phase.report.origins
                        if origin.source is Source.DIRECT
                    }
                except FleetError as error:
                    self.failed.append(repr(error))


def revision(worker_id: str) -> str:
    """Return the revision in the name of a pod, `tiny-ROLE-REVISION-...`."""
    return worker_id.split("-")[2]


def a_deployment(model_dir: Path) -> dict:
    """Return the sample for CPUs, with the simulated engine."""
    deployment = yaml.safe_load(SAMPLE.read_text())
    spec = deployment["spec"]
    spec["engine"] = "simulated"
    spec["routing"] = {"disaggregateAboveTokens": 16}
    spec["model"] = {"name": "tiny", "claim": "models", "uri": model_dir.name}
    for role in spec["roles"]:
        role.pop("podTemplate", None)
        if role["type"] != "router":
            # Real engines choose an address that others can reach; the simulated engine gets it from its settings.
            reached = {"name": "main", "args": ["--set=simulated.direct_listen=$(POD_IP):50062"]}
            role["podTemplate"] = {"spec": {"containers": [reached]}}
        if role["type"] == "prefill":
            role["scaling"] = {"mode": "External", "least": 1, "most": 4}
    return deployment


def that_fails(deployment: dict) -> dict:
    """Return a deployment of the same model with one aggregated worker, whose engine takes only very short prompts."""
    deployment["metadata"]["name"] = "broken"
    full = {"name": "main", "args": ["--set=simulated.kv_blocks=1"]}
    role = {"name": "all", "type": "aggregated", "podTemplate": {"spec": {"containers": [full]}}}
    deployment["spec"]["roles"] = [role]
    return deployment


def patch_template(kube: Command, operation: dict) -> None:
    """Add or remove a misspelt field in the podTemplate of the role decode."""
    roles = [each["name"] for each in yaml.safe_load(SAMPLE.read_text())["spec"]["roles"]]
    path = f"/spec/roles/{roles.index('decode')}/podTemplate/spec/containers/0/imagePullPolcy"
    patch = msgspec.json.encode([{"path": path} | operation]).decode()
    kube("patch", "disaggdeployment/tiny", "--type=json", "-p", patch)


def test_from_an_empty_cluster_to_an_empty_cluster(server, cluster, tmp_path, model_dir):
    config = server.kubeconfig(tmp_path, token="admin")
    helm = Command(helm_3(tools_folder()), config, tmp_path)
    kube = Command(kubectl(tools_folder()), config, tmp_path)
    values = tmp_path / "values.json"
    values.write_bytes(msgspec.json.encode(VALUES))
    with Api(server.url, authority=server.authority) as api:

        def pods(role: str = "") -> list[dict]:
            of_tiny = "app.kubernetes.io/instance=tiny,fleet-serving.io/role="
            selector = {"labelSelector": of_tiny + role} if role else {}
            return api.get(f"{CORE}/pods", **selector).expect(200)["items"]

        def registered(role: str) -> int:
            roles = api.get(f"{FLEET}/disaggdeployments/tiny").expect(200)["status"]["roles"]
            return next(each["registered"] for each in roles if each["name"] == role)

        def said(name: str = "tiny") -> dict[str, dict]:
            status = api.get(f"{FLEET}/disaggdeployments/{name}").expect(200).get("status", {})
            return {each["type"]: each for each in status.get("conditions", ())}

        def conditions() -> dict[str, str]:
            return {kind: each["status"] for kind, each in said().items()}

        def handed_over() -> float:
            """Return the number of blocks that decode workers have received so far, by the router's metrics."""
            page = httpx.get(f"http://{cluster.way_to('tiny-router', 8000)}/metrics", trust_env=False).text
            samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
            return sum(each.value for each in samples if (each.name, each.labels) == HANDED_OVER)

        helm("install", "fleet", str(CHART), "--values", str(values))
        kube("apply", "-f", "-", stdin=yaml.safe_dump(a_deployment(model_dir)))
        kube("wait", "disaggdeployment/tiny", "--for=condition=Ready", f"--timeout={SECONDS}s")
        assert handed_over() > 0, "it has served a request before it is called Ready, by a pair of workers"
        assert (said()["KVPathReady"]["status"], said()["KVPathReady"]["reason"]) == ("True", "HandedOver")
        kube("apply", "-f", "-", stdin=yaml.safe_dump(that_fails(a_deployment(model_dir))))

        with Client(cluster.way_to("tiny-router", 50051)) as client:
            answer = client.complete(PROMPT, max_tokens=4)
            assert answer.usage.completion_tokens == 4
            assert [each.phase for each in answer.kv] == [Phase.PREFILL, Phase.DECODE]
            assert answer.kv[1].report.origins[0].source is Source.DIRECT

        kube("scale", "rolescaler/tiny-prefill", "--replicas=2")
        eventually(lambda: registered("prefill") == 2, SECONDS)

        with Load(cluster.way_to("tiny-router", 50051), cluster.way_to("tiny-router", 8000)) as load:
            eventually(lambda: load.answered)
            for change in ({"image": "fleet-worker-cpu:next"}, {"routing": {"policy": "least_loaded"}}):
                before = {pod["metadata"]["uid"] for pod in pods("router" if "routing" in change else "decode")}
                patch = msgspec.json.encode({"spec": change}).decode()
                kube("patch", "disaggdeployment/tiny", "--type=merge", "-p", patch)
                eventually(lambda before=before: not before & {pod["metadata"]["uid"] for pod in pods()}, SECONDS)
                eventually(lambda: conditions()["Ready"] == "True", SECONDS)
            workers = {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in pods(role)}
            patch_template(kube, {"op": "add", "value": "Always"})
            wrong = eventually(lambda: (each := said()["Degraded"]).get("reason") == "Invalid" and each, SECONDS)
            assert "imagePullPolcy: field not declared in schema" in wrong["message"]
            assert conditions()["Ready"] == "False"
            rolled = load.answered
            eventually(lambda: load.answered > rolled)
            assert workers <= {pod["metadata"]["uid"] for pod in pods()}, "the old pods serve until it is mended"
            patch_template(kube, {"op": "remove"})
            eventually(lambda: conditions()["Ready"] == "True", SECONDS)
            assert workers == {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in pods(role)}
            rolled = load.answered
            helm("upgrade", "fleet", str(CHART), "--values", str(values), "--set", "operator.replicas=2")
            kube("rollout", "status", "deployment/fleet-operator", f"--timeout={SECONDS}s")
            eventually(lambda: load.answered > rolled)
        assert load.failed == []
        broken = eventually(
            lambda: (each := said("broken").get("Ready", {})).get("reason") == "ServedProbeFailed" and each
        )
        assert broken["status"] == "False"
        assert re.search(r"^broken-all-\S+: 413 too_large: ", broken["message"]), broken["message"]
        kube("delete", "disaggdeployment/broken")
        assert len(load.pairs) == 2, "both revisions were disaggregated"
        assert all(giver == taker for giver, taker in load.pairs), "no old worker paired with a new one"

        helm("uninstall", "fleet")
        eventually(lambda: not pods(), SECONDS)
        eventually(lambda: not cluster.processes())
        eventually(lambda: not left(api))


def test_embedding_model_is_ready_after_it_gave_a_vector(server, cluster, tmp_path, model_dir):
    config = server.kubeconfig(tmp_path, token="admin")
    kube = Command(kubectl(tools_folder()), config, tmp_path)
    values = tmp_path / "values.json"
    values.write_bytes(msgspec.json.encode(VALUES))
    deployment = a_deployment(model_dir)
    deployment["spec"] |= {"task": "embed", "roles": [{"name": "all", "type": "aggregated", "replicas": 2}]}
    Command(helm_3(tools_folder()), config, tmp_path)("install", "fleet", str(CHART), "--values", str(values))

    kube("apply", "-f", "-", stdin=yaml.safe_dump(deployment))
    kube("wait", "disaggdeployment/tiny", "--for=condition=Ready", f"--timeout={SECONDS}s")

    with httpx.Client(base_url=f"http://{cluster.way_to('tiny-router', 8000)}", trust_env=False) as client:
        samples = list(text_string_to_metric_families(client.get("/metrics").text))
        [requests] = [family for family in samples if family.name == "fleet_requests"]
        assert sum(each.value for each in requests.samples) >= 2, "each worker has answered a probe"
        asked = client.post("/v1/embeddings", json={"model": "tiny", "input": ["rain", "sun"]}).raise_for_status()
        assert [len(each["embedding"]) for each in asked.json()["data"]] == [64, 64]
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "rain"})
        assert refused.status_code == 400
        assert "embed" in refused.json()["error"]["message"]


ACCOUNTS = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: fleet}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: fleet}
rules: [{apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, list, watch, create, update, delete]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: fleet}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: fleet}
subjects: [{kind: ServiceAccount, name: fleet, namespace: default}]
"""


def found_by_leases(deployment: dict) -> dict:
    """Return two routers and one aggregated worker, which find each other by the Kubernetes API alone."""
    discovery = ["--set=discovery.kind=kubernetes", "--set=discovery.cluster=tiny"]
    owner = ["--set=discovery.pod=$(POD_NAME)", "--set=discovery.pod_uid=$(POD_UID)"]
    uid = {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    worker = {
        "args": ["--set=registry=", *discovery, *owner],
        "env": [uid],
    }
    roles = [("router", "router", 2, {"args": discovery}), ("workers", "aggregated", 1, worker)]
    deployment["spec"]["roles"] = [
        {
            "name": name,
            "type": kind,
            "replicas": replicas,
            "podTemplate": {
                "spec": {
                    "serviceAccountName": "fleet",
                    "automountServiceAccountToken": True,
                    "containers": [{"name": "main"} | container],
                }
            },
        }
        for name, kind, replicas, container in roles
    ]
    return deployment


def test_routers_find_workers_by_their_leases(server, cluster, tmp_path, model_dir):
    kube = Command(kubectl(tools_folder()), server.kubeconfig(tmp_path, token="admin"), tmp_path)
    rendered = subprocess.run(
        [sys.executable, "-m", "fleet.cli.main", "kube", "render", "-f", "-"],
        input=yaml.safe_dump(found_by_leases(a_deployment(model_dir))),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    with Api(server.url, authority=server.authority) as api:
        kube("apply", "-f", "-", stdin=ACCOUNTS)
        server.order_fault("status", verb="create", resource="leases", code=503, times=3)
        kube("apply", "-f", "-", stdin=rendered)

        routers = eventually(lambda: all_ready(api, "router", 2), SECONDS)
        [worker] = eventually(lambda: all_ready(api, "workers", 1), SECONDS)
        [lease] = api.get(LEASES).expect(200)["items"]
        assert lease["metadata"]["name"] == worker
        assert [fault["struck"] for fault in server.faults().values()] == [3]
        for router in routers:  # none of which the worker reported
            assert f"worker joined worker={worker}" in cluster.log(router)
        ways = [cluster.way_to("tiny-router", 50051) for _ in routers]
        with Client(ways[0]) as one, Client(ways[1]) as other:
            assert [each.complete("Hello", max_tokens=2).kv[0].worker_id for each in (one, other)] == [worker] * 2

            stream = one.generate("Hello", max_tokens=300, ignore_eos=True)
            next(stream)
            api.delete(f"{CORE}/pods/{worker}").expect(200)
            eventually(
                lambda: worker not in [each["metadata"]["name"] for each in api.get(LEASES).expect(200)["items"]]
            )
            assert api.get(f"{CORE}/pods/{worker}").code == 200, "it withdraws before it ends"
            assert sum(len(delta.token_ids) for delta in stream) > 250, "what runs is finished"
        eventually(lambda: api.get(f"{CORE}/pods/{worker}").code == 404)

        [successor] = eventually(lambda: all_ready(api, "workers", 1), SECONDS)
        cluster.kill_pod(successor)
        eventually(lambda: cluster.log(successor).count("INFO workers.registration worker registered") == 2, SECONDS)
        eventually(lambda: all_ready(api, "workers", 1), SECONDS)
        [lease] = api.get(LEASES).expect(200)["items"]
        assert lease["spec"]["leaseTransitions"] == 1, "a new incarnation of the same name took it over"


LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


def all_ready(api: Api, role: str, count: int) -> list[str] | None:
    """Return the names of a role's pods once there are that many and all are ready."""
    pods = api.get(f"{CORE}/pods", labelSelector=f"fleet-serving.io/role={role}").expect(200)["items"]
    ready = [pod["metadata"]["name"] for pod in pods if condition(pod, "Ready")]
    return ready if len(ready) == len(pods) == count else None


def left(api: Api) -> list[str]:
    """Return the objects in the namespace, and the kinds that are not Kubernetes' own."""
    kinds = api.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").expect(200)["items"]
    return [*inhabitants(api, "default"), *(kind["metadata"]["name"] for kind in kinds)]
