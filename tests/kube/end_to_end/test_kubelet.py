"""One-node cluster on this machine: it runs pods as real processes with real addresses."""

import textwrap

import pytest

from tests.support.certificates import Authority
from tests.support.kube.clients import Api
from tests.support.kube.kubelet.network import why_not

pytest.importorskip("aiohttp")
if why := why_not():
    pytest.skip(why, allow_module_level=True)

import httpx

from tests.support.kube.api.running import an_api_server
from tests.support.kube.kubelet.cluster import a_cluster
from tests.support.waiting import eventually

CORE, APPS = "/api/v1/namespaces/default", "/apis/apps/v1/namespaces/default"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
SERVER = """
import http.server, os, signal, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{os.environ['POD_NAME']} {open('/etc/app/greeting').read()}".encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(0)))
http.server.ThreadingHTTPServer(("0.0.0.0", 80), Answers).serve_forever()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("authority"), "authority")
    with an_api_server(with_controllers=True, authority=authority) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(server, tmp_path_factory):
    with a_cluster(server, tmp_path_factory.mktemp("cluster"), gpus=4) as cluster:
        yield cluster


@pytest.fixture
def api(server):
    with Api(server.url, authority=server.authority) as api:
        yield api
        for path in (f"{APPS}/deployments", f"{CORE}/pods"):
            for each in api.get(path).expect(200)["items"]:
                api.delete(f"{path}/{each['metadata']['name']}")
        eventually(lambda: not api.get(f"{CORE}/pods").expect(200)["items"])


def a_container(**fields):
    import sys

    return {
        "name": "main",
        "image": "any",
        "command": [sys.executable, "-c", textwrap.dedent(SERVER)],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"name": "http", "containerPort": 80}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        "volumeMounts": [{"name": "settings", "mountPath": "/etc/app"}],
    } | fields


def a_pod_spec(**container):
    volume = {"name": "settings", "configMap": {"name": "settings"}}
    return {"containers": [a_container(**container)], "volumes": [volume], "terminationGracePeriodSeconds": 5}


def a_deployment(replicas: int, **container):
    template = {"metadata": {"labels": {"app": "web"}}, "spec": a_pod_spec(**container)}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    return {"metadata": {"name": "web"}, "spec": spec}


def pods(api):
    return api.get(f"{CORE}/pods").expect(200)["items"]


def ready(api) -> list[str]:
    return [
        pod["metadata"]["name"]
        for pod in pods(api)
        for each in pod.get("status", {}).get("conditions", ())
        if (each["type"], each["status"]) == ("Ready", "True")
    ]


@pytest.fixture
def settings(api):
    api.post(f"{CORE}/configmaps", {"metadata": {"name": "settings"}, "data": {"greeting": "hello"}}).expect(201)
    yield
    api.delete(f"{CORE}/configmaps/settings")


@pytest.fixture
def service(api):
    spec = {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 8080, "targetPort": "http"}]}
    api.post(f"{CORE}/services", {"metadata": {"name": "web"}, "spec": spec}).expect(201)
    yield
    api.delete(f"{CORE}/services/web")


def test_pods_run_on_one_port_behind_a_service_in_turn(cluster, api, settings, service):
    api.post(f"{APPS}/deployments", a_deployment(2)).expect(201)
    names = eventually(lambda: len(ready(api)) == 2 and set(ready(api)))

    way = eventually(lambda: cluster.way_to("web", 8080))
    answers = eventually(lambda: asked(way, 4))

    assert set(answers) == {f"{name} hello" for name in names}
    assert len({pod["status"]["podIP"] for pod in pods(api)}) == 2


def asked(way: str, times: int) -> list[str]:
    return [httpx.get(f"http://{way}/", trust_env=False, timeout=60).text for _ in range(times)]


def test_deleted_pod_loses_traffic_then_gets_hook_and_sigterm(cluster, api, settings, service):
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hooked"]}}}
    api.post(f"{APPS}/deployments", a_deployment(1, lifecycle=hook)).expect(201)
    [name] = eventually(lambda: ready(api))

    api.delete(f"{CORE}/pods/{name}").expect(200)

    eventually(lambda: api.get(f"{CORE}/pods/{name}").code == 404)
    assert cluster.log(name).split("\n")[:2] == ["hooked", "asked to end"]
    eventually(lambda: ready(api) and ready(api) != [name])


def test_rolling_update_keeps_the_promised_ready_pods(cluster, api, settings, service):
    hook = {"preStop": {"sleep": {"seconds": 1}}}
    api.post(f"{APPS}/deployments", a_deployment(2, lifecycle=hook)).expect(201)
    before = eventually(lambda: len(ready(api)) == 2 and set(ready(api)))
    way = cluster.way_to("web", 8080)
    eventually(lambda: asked(way, 1))

    change = {"spec": {"template": {"metadata": {"annotations": {"changed": "yes"}}}}}
    api.patch(f"{APPS}/deployments/web", "merge", change).expect(200)
    while before & {pod["metadata"]["name"] for pod in pods(api)}:
        assert asked(way, 1)

    assert len(ready(api)) == 2


def test_ended_container_restarts_and_unplaceable_pod_waits(cluster, api, settings):
    limits = {"limits": {"nvidia.com/gpu": "3"}}
    api.post(f"{APPS}/deployments", a_deployment(2, resources=limits)).expect(201)
    [name] = eventually(lambda: ready(api))
    waiting = eventually(lambda: [pod for pod in pods(api) if pod["status"].get("phase") == "Pending"])
    assert waiting[0]["status"]["conditions"][0]["reason"] == "Unschedulable"

    cluster.kill_pod(name)

    def restarts() -> int:
        return api.get(f"{CORE}/pods/{name}").expect(200)["status"]["containerStatuses"][0]["restartCount"]

    eventually(lambda: restarts() == 1 and name in ready(api))
