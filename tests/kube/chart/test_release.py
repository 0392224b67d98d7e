"""Releases of the chart: install, upgrade, rollback, test and uninstall by both Helms, while users have objects."""

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fleet.core.discovery import KubernetesDiscovery
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.discovery.open import open_directory
from fleet.membership.messages import RecordMissing
from fleet.membership.ports import RegistryUnreachable
from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.chart.crds import KINDS, definition
from operators.rbac import ACCESS, PLANNER_ACCESS
from tests.support.kube.api.running import OTHER_SERVER, RunningApiServer, an_api_server
from tests.support.kube.charts import CHART
from tests.support.kube.clients import Api
from tests.support.kube.tools import Command, helm_3, helm_4, tools_folder
from tests.support.waiting import eventually

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAMES = [definition(kind)["metadata"]["name"] for kind in KINDS]
SAMPLE = Path(__file__).parents[3] / "deploy" / "samples" / "h100-llama-70b.yaml"


@pytest.fixture(scope="module")
def cluster():
    """Return an API server for this module, with controllers that remove orphaned objects; or the real server."""
    if given := os.environ.get(OTHER_SERVER):
        yield RunningApiServer(given)
        return
    with an_api_server(with_controllers=True) as server:
        yield server


@pytest.fixture
def api(cluster):
    with Api(cluster.url) as api:
        _forget_definitions(api)
        yield api
        _forget_definitions(api)


def _forget_definitions(api: Api) -> None:
    for name in NAMES:
        api.delete(f"{DEFINITIONS}/{name}")
    eventually(lambda: all(api.get(f"{DEFINITIONS}/{name}").code == 404 for name in NAMES))


class Third:
    """Runs Helm 3 as a command, as users do."""

    def __init__(self, kubeconfig: Path, home: Path):
        self._helm = Command(helm_3(tools_folder()), kubeconfig, home)

    def install(self, chart: Path, values: dict[str, Any]) -> None:
        self._helm("install", "fleet", str(chart), "--values", "-", stdin=msgspec.json.encode(values).decode())

    def upgrade(self, chart: Path, values: dict[str, Any]) -> None:
        self._helm("upgrade", "fleet", str(chart), "--values", "-", stdin=msgspec.json.encode(values).decode())

    def rollback(self, revision: int) -> None:
        self._helm("rollback", "fleet", str(revision))

    def uninstall(self) -> None:
        self._helm("uninstall", "fleet")

    def test(self) -> None:
        self._helm("test", "fleet", "--timeout", "30s")


class Fourth:
    """Calls Helm 4 as a library; it uses server-side apply."""

    def __init__(self, kubeconfig: Path, namespace: str):
        self._config = helm_4(tools_folder()).Config(kubeconfig_path=kubeconfig, namespace=namespace)

    def install(self, chart: Path, values: dict[str, Any]) -> None:
        self._config.install(chart, "fleet", values)

    def upgrade(self, chart: Path, values: dict[str, Any]) -> None:
        self._config.upgrade(chart, "fleet", values)

    def rollback(self, revision: int) -> None:
        self._config.rollback("fleet", version=revision)

    def uninstall(self) -> None:
        self._config.uninstall("fleet")

    def test(self) -> None:
        self._config.test("fleet", timeout=30)


@pytest.fixture(params=["Helm 3", "Helm 4"])
def helm(request, cluster, namespace, tmp_path):
    kubeconfig = cluster.kubeconfig(tmp_path, namespace=namespace)
    return Third(kubeconfig, tmp_path) if request.param == "Helm 3" else Fourth(kubeconfig, namespace)


def everything(api, namespace) -> set[str]:
    """Return the paths of all objects that a release could have made, in its namespace or for the whole cluster."""
    found = set()
    groups = api.get("/apis").expect(200)["groups"]
    for root in ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]:
        for each in api.get(root).expect(200)["resources"]:
            if "/" in each["name"] or "list" not in each["verbs"] or each["name"] in {"events", "namespaces"}:
                continue
            where = f"{root}/namespaces/{namespace}" if each["namespaced"] else root
            answer = api.get(f"{where}/{each['name']}")
            if answer.code == 200:  # a kind may have been removed meanwhile
                found |= {f"{where}/{each['name']}/{item['metadata']['name']}" for item in answer.body["items"]}
    return found


def a_deployment() -> dict[str, Any]:
    return yaml.safe_load(SAMPLE.read_text())


def served(api) -> None:
    """Wait until the API server serves Fleet's kinds."""
    eventually(lambda: all(api.get(f"/apis/{GROUP}/{VERSION}/{kind.plural}").code == 200 for kind in KINDS))


def test_a_release_from_install_to_uninstall_leaves_nothing(helm, api, namespace):
    before = everything(api, namespace)

    def router():
        return api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/fleet-routers").expect(200)

    helm.install(CHART, {"crds": {"keep": False}, "redis": {"install": True}})
    served(api)
    first = router()
    assert first["spec"]["replicas"] == 2
    assert len(everything(api, namespace) - before) > 20
    assert api.get(f"/apis/apps/v1/namespaces/{namespace}/statefulsets/fleet-redis").code == 200

    helm.upgrade(CHART, {"crds": {"keep": False}, "routers": {"replicas": 5}})
    assert router()["spec"]["replicas"] == 5
    assert api.get(f"/apis/apps/v1/namespaces/{namespace}/statefulsets/fleet-redis").code == 404

    helm.rollback(1)
    again = router()
    assert (again["metadata"]["uid"], again["spec"]["template"]) == (
        first["metadata"]["uid"],
        first["spec"]["template"],
    )
    assert again["spec"]["replicas"] == 2
    assert api.get(f"/apis/apps/v1/namespaces/{namespace}/statefulsets/fleet-redis").code == 200

    helm.uninstall()
    eventually(lambda: everything(api, namespace) <= before)


def test_upgrade_leaves_replicas_to_the_autoscaler(helm, api, namespace):
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/fleet-routers"
    scaled = {"routers": {"autoscaling": {"enabled": True}}, "crds": {"keep": False}}

    def replicas():
        return api.get(path).expect(200)["spec"]["replicas"]

    helm.install(CHART, {"routers": {"replicas": 4}, "crds": {"keep": False}})
    helm.upgrade(CHART, scaled)
    assert replicas() == 4
    api.patch(f"{path}/scale", "merge", {"spec": {"replicas": 7}}).expect(200)
    for _ in range(2):
        helm.upgrade(CHART, scaled)
        assert replicas() == 7
    helm.uninstall()


def test_kept_crds_keep_deployments_for_a_new_release(helm, api, namespace):
    helm.install(CHART, {})
    served(api)
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/disaggdeployments"
    made = api.post(path, a_deployment(), fieldValidation="Strict").expect(201)
    helm.uninstall()
    eventually(lambda: api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments").expect(200)["items"] == [])

    # The definitions' versions are APIServices, which the server makes itself.
    left = {
        each.rpartition("/")[2] for each in everything(api, namespace) if GROUP in each and "/apiservices/" not in each
    }
    assert left == {*NAMES, "llama-70b"}

    helm.install(CHART, {})
    assert api.get(f"{path}/llama-70b").expect(200)["metadata"]["uid"] == made["metadata"]["uid"]


def test_objects_survive_upgrade_and_downgrade(helm, api, namespace, tmp_path):
    """The release is upgraded from an older chart and downgraded again while a DisaggDeployment runs.

    The older chart lacks a field and an object, and has an object that the newer chart lacks.
    """
    older = an_older_chart(tmp_path)
    helm.install(older, {})
    served(api)
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/disaggdeployments"
    made = api.post(path, a_deployment(), fieldValidation="Strict").expect(201)
    child = a_child_of(api, namespace, made)

    def unchanged():
        now = api.get(f"{path}/llama-70b").expect(200)
        assert now["metadata"]["uid"] == made["metadata"]["uid"]
        assert now["metadata"]["generation"] == made["metadata"]["generation"]
        assert now["spec"].items() >= made["spec"].items()
        there = api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/llama-70b-decode").expect(200)
        # A controller-manager writes annotations and the status.
        assert (there["metadata"]["uid"], there["spec"]) == (child["metadata"]["uid"], child["spec"])

    def has(kind, name):
        return api.get(f"/{kind.format(namespace)}/{name}").code == 200

    assert not known(api, "suspend")
    helm.upgrade(CHART, {})
    eventually(lambda: known(api, "suspend"))
    unchanged()
    assert not has("api/v1/namespaces/{}/configmaps", "fleet-obsolete")
    assert has("apis/policy/v1/namespaces/{}/poddisruptionbudgets", "fleet-routers")
    suspended = api.patch(f"{path}/llama-70b", "merge", {"spec": {"suspend": True}}, fieldValidation="Strict")
    assert suspended.expect(200)["spec"]["suspend"] is True
    made = api.patch(f"{path}/llama-70b", "merge", {"spec": {"suspend": False}}).expect(200)
    made["spec"].pop("suspend")  # the older definition hides fields that it does not know

    helm.rollback(1)
    eventually(lambda: not known(api, "suspend"))
    unchanged()
    assert has("api/v1/namespaces/{}/configmaps", "fleet-obsolete")


def an_older_chart(folder: Path) -> Path:
    older = folder / "older"
    shutil.copytree(CHART, older)
    chart = older / "Chart.yaml"
    chart.write_text(chart.read_text().replace("version: 0.1.0\n", "version: 0.0.9\n", 1))
    (older / "templates" / "scaling.yaml").unlink()
    obsolete = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fleet-obsolete"}}
    (older / "templates" / "obsolete.yaml").write_text(yaml.safe_dump(obsolete))
    written = older / "templates" / "crds" / "disaggdeployments.yaml"
    (kind,) = (each for each in KINDS if each.plural == "disaggdeployments")
    made = definition(kind)
    del spec_of(made)["properties"]["suspend"]
    begin, _, _ = written.read_text().partition("\nspec:\n")
    written.write_text(f"{begin}\n{yaml.safe_dump({'spec': made['spec']})}{{{{- end }}}}\n")
    return older


def spec_of(definition: dict[str, Any]) -> dict[str, Any]:
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def known(api, field: str) -> bool:
    found = api.get(f"{DEFINITIONS}/disaggdeployments.{GROUP}").expect(200)
    return field in spec_of(found)["properties"]


def a_child_of(api, namespace: str, owner: dict[str, Any]) -> dict[str, Any]:
    """Make a child object of a deployment, as the operator does."""
    labels = {"app.kubernetes.io/instance": "llama-70b", f"{GROUP}/role": "decode"}
    reference = {key: owner[key] for key in ("apiVersion", "kind")} | {
        key: owner["metadata"][key] for key in ("name", "uid")
    }
    child = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "llama-70b-decode", "labels": labels, "ownerReferences": [reference]},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "main", "image": "example.invalid/worker:1"}]},
            },
        },
    }
    return api.post(f"/apis/apps/v1/namespaces/{namespace}/deployments", child).expect(201)


def test_helm_test_waits_for_the_answer(helm, api, namespace):
    helm.install(CHART, {"test": {"model": "llama"}})
    path = f"/api/v1/namespaces/{namespace}/pods/fleet-test"

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        testing = threads.submit(helm.test)
        pod = eventually(lambda: (found := api.get(path)).code == 200 and found.body)
        assert pod["spec"]["containers"][0]["command"][:2] == ["fleet", "generate"]
        assert not testing.done()
        api.patch(f"{path}/status", "merge", {"status": {"phase": "Succeeded"}}).expect(200)
        testing.result(30)

    eventually(lambda: api.get(path).code == 404)


def test_failing_helm_test_fails_the_command(helm, api, namespace):
    helm.install(CHART, {})
    path = f"/api/v1/namespaces/{namespace}/pods/fleet-test"

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        testing = threads.submit(helm.test)
        eventually(lambda: api.get(path).code == 200)
        api.patch(f"{path}/status", "merge", {"status": {"phase": "Failed"}}).expect(200)
        with pytest.raises(Exception, match="failed"):
            testing.result(30)


@pytest.mark.skipif(OTHER_SERVER in os.environ, reason="tokens that say who they are: our server's alone")
@pytest.mark.parametrize("scope", ["Namespace", "Cluster"])
def test_operators_account_has_exactly_its_rights(cluster, api, namespace, tmp_path, scope):
    kubeconfig = cluster.kubeconfig(tmp_path, namespace=namespace)
    release = Third(kubeconfig, tmp_path)
    release.install(CHART, {"crds": {"keep": False}, "operator": {"scope": scope}})
    served(api)
    versions = {each["name"]: each["preferredVersion"]["version"] for each in api.get("/apis").expect(200)["groups"]}
    listed = [each for each in ACCESS if "list" in each.verbs and (not each.group or each.group in versions)]
    assert len(listed) > 8  # this server does not have the other kinds
    with Api(cluster.url, token=f"system:serviceaccount:{namespace}:fleet-operator") as operator:
        for each in listed:
            root = f"/apis/{each.group}/{versions[each.group]}" if each.group else "/api/v1"
            assert operator.get(f"{root}/namespaces/{namespace}/{each.resource}").code == 200, each
            elsewhere = operator.get(f"{root}/namespaces/default/{each.resource}").code
            assert elsewhere == (200 if scope == "Cluster" else 403), each
        for forbidden in ("secrets", "serviceaccounts", "events", "persistentvolumeclaims"):
            operator.get(f"/api/v1/namespaces/{namespace}/{forbidden}").refused(403, "Forbidden")
        if scope == "Cluster":
            operator.get("/api/v1/nodes").expect(200)  # to choose domains for groups of pods
        else:
            operator.get("/api/v1/nodes").refused(403, "Forbidden")
        operator.delete("/api/v1/nodes/any").refused(403, "Forbidden")
        operator.delete(f"{DEFINITIONS}/{NAMES[0]}").refused(403, "Forbidden")
    release.uninstall()


@pytest.mark.skipif(OTHER_SERVER in os.environ, reason="tokens that say who they are: our server's alone")
@pytest.mark.parametrize("scope", ["Namespace", "Cluster"])
def test_planners_account_has_exactly_its_rights(cluster, api, namespace, tmp_path, scope):
    release = Third(cluster.kubeconfig(tmp_path, namespace=namespace), tmp_path)
    release.install(CHART, {"crds": {"keep": False}, "operator": {"scope": scope}, "planner": {"enabled": True}})
    served(api)
    versions = {each["name"]: each["preferredVersion"]["version"] for each in api.get("/apis").expect(200)["groups"]}
    listed = [each for each in PLANNER_ACCESS if "list" in each.verbs]
    assert {each.resource for each in listed} == {"disaggdeployments", "rolescalers", "servingplans", "pods"}
    with Api(cluster.url, token=f"system:serviceaccount:{namespace}:fleet-planner") as planner:
        for each in listed:
            root = f"/apis/{each.group}/{versions[each.group]}" if each.group else "/api/v1"
            assert planner.get(f"{root}/namespaces/{namespace}/{each.resource}").code == 200, each
            elsewhere = planner.get(f"{root}/namespaces/default/{each.resource}").code
            assert elsewhere == (200 if scope == "Cluster" else 403), each
        own, fleet = f"/api/v1/namespaces/{namespace}", f"/apis/fleet-serving.io/v1alpha1/namespaces/{namespace}"
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        assert planner.get(f"{own}/secrets/fleet-operator-control").code == 404, "allowed, but not made yet"
        assert planner.get(f"{leases}/fleet-planner").code == 404
        for forbidden in (
            f"{own}/secrets",
            f"{own}/secrets/hugging-face",
            f"{leases}/fleet-operator",
            f"{own}/services",
        ):
            planner.get(forbidden).refused(403, "Forbidden")
        for path in (f"{fleet}/disaggdeployments/dd", f"{fleet}/servingplans/plan", f"{own}/pods/any"):
            planner.patch(path, "merge", {"spec": {}}).refused(403, "Forbidden")
        planner.delete(f"{own}/pods/any").refused(403, "Forbidden")
    release.uninstall()


def verbs_of(cluster: RunningApiServer, user: str) -> set[tuple[str, str]]:
    return {(each["resource"], each["verb"]) for each in cluster.requests() if each["user"] == user}


@pytest.mark.skipif(OTHER_SERVER in os.environ, reason="tokens that say who they are: our server's alone")
async def test_chart_rights_let_routers_find_workers(cluster, api, namespace, tmp_path):
    release = Third(cluster.kubeconfig(tmp_path, namespace=namespace), tmp_path)
    await asyncio.to_thread(release.install, CHART, {"discovery": {"source": "Kubernetes"}, "crds": {"keep": False}})

    roles = ("workers", "routers")

    def directory(account: str, **fields: str):
        token = f"system:serviceaccount:{namespace}:fleet-{account}"
        config = str(cluster.kubeconfig(tmp_path, namespace=namespace, token=token))
        return open_directory(KubernetesDiscovery(cluster="fleet", namespace=namespace, kubeconfig=config, **fields))

    async with directory("workers", service="decode", lease_seconds=10) as workers, directory("routers") as routers:
        await workers.register(WorkerId("decode-0"), Incarnation("first"), "10.0.0.1:50060")
        await workers.register(WorkerId("decode-0"), Incarnation("first"), "10.0.0.1:50060")  # renews the Lease
        async with contextlib.aclosing(routers.readings()) as readings, asyncio.timeout(60):
            listed = await anext(readings)
            assert [each.record.worker_id for each in listed.all] == ["decode-0"]
            await workers.deregister(WorkerId("decode-0"), Incarnation("first"))
            assert isinstance(await anext(readings), RecordMissing)
            await workers.register(WorkerId("decode-0"), Incarnation("second"), "10.0.0.1:50060")
            while not isinstance(await anext(readings), RecordMissing):
                pass  # nobody renews its Lease any more, so routers remove it
        used = {account: verbs_of(cluster, f"system:serviceaccount:{namespace}:fleet-{account}") for account in roles}
        with pytest.raises(RegistryUnreachable, match=r"403|orbidden"):
            await routers.register(WorkerId("decode-1"), Incarnation("first"), "10.0.0.2:50060")
    for account, verbs in used.items():
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/fleet-{account}"
        rules = api.get(path).expect(200)["rules"]
        granted = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
        # For a real server, applying a missing object needs `create`, too; ours does not check that.
        assert verbs | {(resource, "create") for resource, verb in verbs if verb == "patch"} == granted
    await asyncio.to_thread(release.uninstall)


def test_two_releases_in_one_namespace_share_no_deployment(cluster, api, namespace, tmp_path):
    kubeconfig = cluster.kubeconfig(tmp_path, namespace=namespace)
    helm = Command(helm_3(tools_folder()), kubeconfig, tmp_path)
    helm("install", "blue", str(CHART))
    helm("install", "green", str(CHART), "--set", "crds.install=false")

    found = api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments").expect(200)["items"]
    assert {each["metadata"]["name"] for each in found} == {
        f"{release}-fleet-{part}" for release in ("blue", "green") for part in ("routers", "operator")
    }
    helm("uninstall", "green")
    helm("uninstall", "blue")
