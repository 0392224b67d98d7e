"""Router pods on a cluster of real processes: they are peers of each other, and their certificate is renewed."""

import base64
import ssl
import sys
from pathlib import Path

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

from fleet.client import Client
from tests.kube.end_to_end.test_end_to_end import CHART, CORE, SECONDS, VALUES, a_deployment
from tests.support.kube.api.running import an_api_server
from tests.support.kube.kubelet.cluster import a_cluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)  # many processes are started, possibly on a slow machine

CONTROL_FILE = "/etc/fleet-control/secret"


@pytest.fixture
def server(tmp_path):
    with an_api_server(with_controllers=True, authority=Authority(tmp_path, "authority")) as server:
        yield server


@pytest.fixture
def cluster(server, tmp_path, model_dir):
    with a_cluster(server, tmp_path / "cluster", claims={"models": model_dir.parent}) as cluster:
        yield cluster


@pytest.fixture
def api(server):
    with Api(server.url, authority=server.authority) as api:
        yield api


class Installed:
    """Installs a release of the chart, and runs commands as its user would."""

    def __init__(self, server, folder: Path, values: dict) -> None:
        config = server.kubeconfig(folder, token="admin")
        self.helm = Command(helm_3(tools_folder()), config, folder)
        self.kube = Command(kubectl(tools_folder()), config, folder)
        self._file = folder / "values.json"
        self._file.write_bytes(msgspec.json.encode(values))

    def install(self) -> None:
        self.helm("install", "fleet", str(CHART), "--values", str(self._file))


def routers(api, **labels) -> dict[str, str]:
    """Return the addresses of the ready pods with these labels, by name."""
    selector = ",".join(f"{key.replace('__', '/').replace('_', '-')}={value}" for key, value in labels.items())
    pods = api.get(f"{CORE}/pods", labelSelector=selector).expect(200)["items"]
    return {
        pod["metadata"]["name"]: pod["status"]["podIP"]
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp")
        and any(
            each["type"] == "Ready" and each["status"] == "True" for each in pod.get("status", {}).get("conditions", ())
        )
    }


def asking_pod(name: str, secret: str, *words: str) -> dict:
    """Return a pod that runs one `fleet` command with the control secret."""
    container = {
        "name": "main",
        "image": "fleet-router:test",
        "command": [sys.executable, "-m", "fleet.cli.main", *words, "--control-secret-file", CONTROL_FILE],
        "volumeMounts": [{"name": "control", "mountPath": "/etc/fleet-control"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "control", "secret": {"secretName": secret}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def explanation(api, cluster, name: str, secret: str, address: str, request_id: str) -> str:
    """Return the explanation of a request from the router at an address, or the router's error."""
    words = ("explain", request_id, "--control-address", f"{address}:50052")
    api.post(f"{CORE}/pods", asking_pod(name, secret, *words)).expect(201)
    phases = {"Succeeded", "Failed"}
    phase = eventually(
        lambda: (found := api.get(f"{CORE}/pods/{name}").expect(200)["status"].get("phase")) in phases and found,
        SECONDS,
    )
    return f"{phase}: {cluster.log(name)}"


def two_routers(model_dir: Path) -> dict:
    deployment = a_deployment(model_dir)
    deployment["spec"]["roles"] = [
        {"name": "router", "type": "router", "replicas": 2},
        {"name": "all", "type": "aggregated"},
    ]
    return deployment


def reached(cluster, names) -> bool:
    return all("peer router reached" in cluster.log(name) for name in names)


def test_router_pods_of_a_deployment_know_each_other(server, cluster, api, tmp_path, model_dir):
    release = Installed(server, tmp_path, VALUES)
    release.install()
    release.kube("apply", "-f", "-", stdin=yaml.safe_dump(two_routers(model_dir)))
    release.kube("wait", "disaggdeployment/tiny", "--for=condition=Ready", f"--timeout={SECONDS}s")
    of_tiny = {"app.kubernetes.io__instance": "tiny", "fleet-serving.io__role": "router"}
    found = routers(api, **of_tiny)
    assert len(found) == 2
    eventually(lambda: reached(cluster, found), SECONDS)

    with Client(cluster.way_to("tiny-router", 50051)) as client:
        asked = client.complete("Say hello.", max_tokens=2).request_id
    names = [each["metadata"]["name"] for each in api.get(f"{CORE}/secrets").expect(200)["items"]]
    [secret] = [each for each in names if each.startswith("tiny-control-")]
    said = [explanation(api, cluster, f"ask-{at}", secret, address, asked) for at, address in enumerate(found.values())]
    # Only one router has placed the request. The other router has got the explanation from it.
    assert [each.partition(":")[0] for each in said] == ["Succeeded", "Succeeded"], said

    release.kube("delete", "pod", next(iter(found)))
    later = eventually(lambda: len(now := routers(api, **of_tiny)) == 2 and now, SECONDS)
    [new] = later.keys() - found.keys()
    eventually(lambda: reached(cluster, [new]), SECONDS)


def test_router_pods_of_the_chart_know_each_other(server, cluster, api, tmp_path):
    values = VALUES | {
        "operator": {"enabled": False},
        "routers": {"replicas": 3, "controlSecret": "shared", "readiness": "Listening"},
    }
    release = Installed(server, tmp_path, values)
    release.kube("create", "secret", "generic", "shared", "--from-literal=secret=of these routers only")
    release.install()
    found = eventually(
        lambda: len(now := routers(api, **{"app.kubernetes.io__component": "routers"})) == 3 and now, SECONDS
    )

    for name in found:
        eventually(lambda name=name: cluster.log(name).count("peer router reached") == 2, SECONDS)
        assert "peer router rejected" not in cluster.log(name)

    release.helm("test", "fleet", "--timeout", "50s")
    release.helm("upgrade", "fleet", str(CHART), "--reuse-values", "--set", "test.model=absent")
    said = release.helm("test", "fleet", "--timeout", "50s", code=1)
    assert "fleet-test failed" in said
    assert "absent" in cluster.log("fleet-test"), "the log of the failed pod stays, and names the cause"


def public_secret(authority: Authority) -> dict:
    """Return a Secret with a certificate for clients of the routers, as cert-manager would write it."""
    issued = authority.issue("public", hosts=["fleet-routers.default.svc"])
    files = {"tls.crt": issued["certificate"], "tls.key": issued["key"], "ca.crt": authority.file}
    content = {key: base64.b64encode(Path(file).read_bytes()).decode() for key, file in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "public"}, "data": content}


def test_renewed_certificate_serves_without_a_restart(server, cluster, api, tmp_path):
    first, second = (Authority(tmp_path, name) for name in ("first", "second"))
    api.post(f"{CORE}/secrets", public_secret(first)).expect(201)
    values = VALUES | {
        "operator": {"enabled": False},
        "routers": {"replicas": 1, "tls": {"secret": "public"}, "readiness": "Listening"},
    }
    release = Installed(server, tmp_path, values)
    release.install()
    of_routers = {"app.kubernetes.io__component": "routers"}
    [name] = eventually(lambda: routers(api, **of_routers), SECONDS)
    address = cluster.way_to("fleet-routers", 8000)

    def verdict(authority: Authority) -> str:
        """Return the outcome of a request with this authority; the proxy of the Service may not know its pods yet."""
        context = ssl.create_default_context(cafile=authority.file)
        try:
            answer = httpx.get(f"https://{address}/openapi.json", verify=context, trust_env=False)
        except httpx.TransportError as error:
            return "refused" if "CERTIFICATE_VERIFY_FAILED" in str(error) else "absent"
        return "trusted" if answer.is_success else "absent"

    eventually(lambda: verdict(first) == "trusted", SECONDS)
    assert verdict(second) == "refused"
    release.helm("test", "fleet", "--timeout", "50s")

    api.patch(f"{CORE}/secrets/public", "merge", {"data": public_secret(second)["data"]}).expect(200)
    eventually(lambda: verdict(second) == "trusted", SECONDS)

    assert routers(api, **of_routers).keys() == {name}
    [status] = api.get(f"{CORE}/pods/{name}").expect(200)["status"]["containerStatuses"]
    assert status["restartCount"] == 0
    assert verdict(first) == "refused"
    release.helm("test", "fleet", "--timeout", "50s")
