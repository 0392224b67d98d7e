"""Operator as a process, as it is deployed: settings file, health server, and the account and rights of the chart."""

import signal
import subprocess

import httpx
import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from msgspec import to_builtins

from operators.chart.metric_catalogue import OPERATOR
from operators.rbac import ACCESS
from tests.support.certificates import Authority
from tests.support.fleet_processes import start_service
from tests.support.kube.api.running import an_api_server
from tests.support.kube.clients import Api
from tests.support.kube.nodes import Nodes
from tests.support.kube.operator import IMAGES, QUICK, AskedRouters, a_deployment, install
from tests.support.metric_pages import differences
from tests.support.waiting import until

ACCOUNT = "system:serviceaccount:default:fleet-operator"
GPU = {"gpus": {"perReplica": 2}, "parallelism": {"tensor": 2}, "nodesPerReplica": 2}
# Pods of third-party processes: the operator ends them when one of their group was restarted.
GROUP_OF_THEIR_OWN = {"podTemplate": {"spec": {"containers": [{"name": "main", "command": ["theirs"]}]}}}

OWN = {
    "metadata": {"name": "fleet-operator"},
    "spec": {
        "replicas": 0,
        "selector": {"matchLabels": {"its": "own"}},
        "template": {
            "metadata": {"labels": {"its": "own"}},
            "spec": {"containers": [{"name": "operator", "image": "operator:1"}]},
        },
    },
}
PLAN = {"metadata": {"name": "plan"}, "spec": {"deployment": "dd"}}
WORKLOAD = {"promptTokens": 1000, "answerTokens": 100, "concurrency": 8}
REQUEST = {
    "metadata": {"name": "request"},
    "spec": {
        "model": {"name": "Qwen/Qwen3-8B"},
        "hardware": {"gpu": "h100", "count": 8},
        "workload": WORKLOAD,
        "apply": True,
    },
}


def a_process(settings, folder):
    """Run the operator's process; yield it with the first line of its output."""
    return start_service("operator", settings, folder / "operator.json", stderr=subprocess.PIPE, text=True)


def grant(api, namespace, without=""):
    """Create a Role with exactly the rules that `operators.rbac` lists."""
    rules = [
        {"apiGroups": [each.group], "resources": [each.resource], "verbs": list(each.verbs)}
        for each in ACCESS
        if each.resource != without
    ]
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"}
    subject = {"kind": "ServiceAccount", "name": "fleet-operator", "namespace": "default"}
    api.post(f"{rbac}/roles", {"metadata": {"name": "operator"}, "rules": rules}).expect(201)
    binding = {"metadata": {"name": "operator"}, "roleRef": reference, "subjects": [subject]}
    api.post(f"{rbac}/rolebindings", binding).expect(201)


async def test_operator_process_uses_exactly_the_listed_rights(tmp_path):
    nodes = Nodes()
    authority = Authority(tmp_path, "authority")
    roles = (
        {"name": "all", "type": "aggregated", "replicas": 2, "scaling": {"mode": "External"}},
        {"name": "wide", "type": "aggregated", **GPU, **GROUP_OF_THEIR_OWN},
    )
    with an_api_server(with_controllers=True, beside=nodes.run, authority=authority) as server:
        install(server)
        with Api(server.url, authority=authority.file) as api:
            grant(api, "default")
            asked = AskedRouters(server, api, "default", tmp_path)
            api.post(asked.path("deployments", "", "apps/v1"), OWN).expect(201)
            settings = {
                "images": to_builtins(IMAGES),
                "identity": "operator-0",
                "namespaces": ["default"],
                "lease": {"namespace": "default", "owner": OWN["metadata"]["name"], **QUICK},
                "listen": "127.0.0.1:0",
                "kubeconfig": str(server.kubeconfig(tmp_path, token=ACCOUNT)),
                "ask_routers": False,
                "probe": {"enabled": False},  # there is no router to answer
            }
            process, endpoints = a_process(settings, tmp_path)
            try:
                for kind, made in (("servingplans", PLAN), ("servingrequests", REQUEST)):
                    api.post(asked.path(kind), made).expect(201)
                proposed = asked.path("disaggdeployments", "request")
                await until(lambda: api.get(proposed).code == 200)
                api.delete(asked.path("servingrequests", "request")).expect(200)
                await until(lambda: api.get(proposed).code == 404 and not asked.children("pods", "v1"))
                asked.apply(a_deployment(*roles)).expect(201)
                await until(asked.ready)
                [first, *_] = [name for name in asked.workers() if "-all-" in name]
                [leader, rank] = [name for name in asked.workers() if "-wide-" in name]
                began = asked.children("pods", "v1")[rank]["metadata"]["uid"]
                nodes.warm, nodes.restarted = {first: 12}, {leader: "2026-01-01T00:00:00Z"}
                lease = asked.path("leases", first, "coordination.k8s.io/v1")
                await until(lambda: api.get(lease).body["metadata"].get("annotations"))
                await until(
                    lambda: (
                        asked.children("pods", "v1").get(rank, {"metadata": {"uid": began}})["metadata"]["uid"] != began
                    )
                )
                nodes.restarted = {}
                api.patch(asked.path("rolescalers", "dd-all/scale"), "merge", {"spec": {"replicas": 1}}).expect(200)
                await until(lambda: asked.ready() and len(asked.workers()) == 3)
                static = roles[0] | {"scaling": {"mode": "Static"}}
                asked.apply(a_deployment(static, roles[1] | {"replicas": 0}, image="another:2")).expect(200)
                await until(asked.ready)
                asked.apply(a_deployment(static, image="another:2")).expect(200)
                await until(lambda: asked.ready() and "dd-wide" not in asked.children("services", "v1"))
                url = f"http://{endpoints['http']}"
                found = {path: httpx.get(f"{url}/{path}", trust_env=False) for path in ("healthz", "readyz", "metrics")}
            finally:
                process.send_signal(signal.SIGTERM)
                _, log = process.communicate(timeout=60)
            lease = api.get(asked.path("leases", "fleet-operator", "coordination.k8s.io/v1")).expect(200)
        used = {
            (each["group"], each["resource"], verb)
            for each in server.requests()
            if each["user"] == ACCOUNT
            # Server-side apply of a missing object has to be allowed as a creation, too.
            for verb in ([each["verb"], "create"] if (each["verb"], each["code"]) == ("patch", 201) else [each["verb"]])
        }
        refused = [each for each in server.requests() if each["user"] == ACCOUNT and each["code"] == 403]

    assert process.returncode == 0, log
    assert [each.status_code for each in found.values()] == [200, 200, 200]
    assert "fleet_operator_leads 1.0" in found["metrics"].text
    assert differences(found["metrics"].text, OPERATOR) == []
    assert 'fleet_operator_deployments{ready="True"} 1.0' in found["metrics"].text
    assert lease["spec"]["holderIdentity"] == ""
    assert refused == []
    granted = {(each.group, each.resource, verb) for each in ACCESS for verb in each.verbs}
    assert used <= granted
    absent = {"leaderworkerset.x-k8s.io", "monitoring.coreos.com", "inference.networking.k8s.io"}
    assert {each for each in granted - used if each[0] not in absent} == set()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kubeconfig": "/nowhere"}, "kubeconfig: /nowhere: No such file"),
        ({"lease": {"namespace": "default", "retry_seconds": 20}}, "retry_seconds: must be shorter"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(tmp_path, changes, words):
    settings = {
        "images": to_builtins(IMAGES),
        "identity": "a",
        "lease": {"namespace": "default"},
        "kubeconfig": "/nowhere",
    }
    process, _ = a_process(settings | changes, tmp_path)

    _, log = process.communicate(timeout=60)

    assert process.returncode == 3
    assert words in log
    assert log.count("\n") == 1


async def test_readyz_names_kinds_that_cannot_be_read(tmp_path):
    authority = Authority(tmp_path, "authority")
    with an_api_server(with_controllers=True, authority=authority) as server:
        install(server)
        with Api(server.url, authority=authority.file) as api:
            grant(api, "default", without="pods")
            settings = {
                "images": to_builtins(IMAGES),
                "identity": "operator-0",
                "namespaces": ["default"],
                "lease": {"namespace": "default", **QUICK},
                "listen": "127.0.0.1:0",
                "kubeconfig": str(server.kubeconfig(tmp_path, token=ACCOUNT)),
                "ask_routers": False,
                "probe": {"enabled": False},
            }
            process, endpoints = a_process(settings, tmp_path)
            try:
                readyz = f"http://{endpoints['http']}/readyz"
                await until(
                    lambda: httpx.get(readyz, trust_env=False).text == "not read from the API server yet: Pod\n"
                )
                assert httpx.get(readyz, trust_env=False).status_code == 503
            finally:
                process.send_signal(signal.SIGTERM)
                _, log = process.communicate(timeout=60)
    assert 'kind=Pod cause=User "system:serviceaccount:default:fleet-operator" cannot list resource "pods"' in log
