"""Worker group of two nodes in a cluster of real processes: it becomes ready, answers, ends and recovers as a whole."""

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
from tests.kube.end_to_end.test_end_to_end import CHART, CORE, FLEET, SECONDS, VALUES
from tests.support.kube.api.running import an_api_server
from tests.support.kube.kubelet.cluster import a_cluster
from tests.support.kube.kubelet.objects import condition
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)  # half a dozen processes are started, possibly on a slow machine

WIDE = {"name": "wide", "type": "aggregated", "parallelism": {"tensor": 2}, "nodesPerReplica": 2}


@pytest.fixture
def server(tmp_path):
    with an_api_server(with_controllers=True, authority=Authority(tmp_path, "authority")) as server:
        yield server


@pytest.fixture
def cluster(server, tmp_path, model_dir):
    with a_cluster(server, tmp_path / "cluster", claims={"models": model_dir.parent}) as cluster:
        yield cluster


def a_deployment(model_dir):
    return {
        "apiVersion": "fleet-serving.io/v1alpha1",
        "kind": "DisaggDeployment",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"name": "tiny", "claim": "models", "uri": model_dir.name},
            "engine": "simulated",
            "roles": [WIDE],
        },
    }


def test_two_node_replica_serves_and_recovers_as_a_whole(server, cluster, tmp_path, model_dir):
    config = server.kubeconfig(tmp_path, token="admin")
    helm = Command(helm_3(tools_folder()), config, tmp_path)
    kube = Command(kubectl(tools_folder()), config, tmp_path)
    values = tmp_path / "values.json"
    values.write_bytes(msgspec.json.encode(VALUES))
    with Api(server.url, authority=server.authority) as api:

        def pods():
            found = api.get(f"{CORE}/pods", labelSelector="fleet-serving.io/role=wide").expect(200)["items"]
            return {pod["metadata"]["name"]: pod for pod in found}

        def restarts():
            return [pod["status"]["containerStatuses"][0]["restartCount"] for _, pod in sorted(pods().items())]

        def is_ready():
            status = api.get(f"{FLEET}/disaggdeployments/tiny").expect(200).get("status", {})
            return {each["type"]: each["status"] for each in status.get("conditions", ())}.get("Ready") == "True"

        helm("install", "fleet", str(CHART), "--values", str(values))
        kube("apply", "-f", "-", stdin=yaml.safe_dump(a_deployment(model_dir)))
        eventually(is_ready, SECONDS)
        leader, rank = sorted(pods())
        assert all(condition(pod, "Ready") for pod in pods().values())

        with Client(cluster.way_to("tiny-router", 50051)) as client:
            assert client.complete("Hello", max_tokens=2).kv[0].worker_id == leader
            assert "registered" not in cluster.log(rank), "nobody sees the others"

            for number, victim in enumerate((rank, leader), 1):
                cluster.kill_pod(victim)
                eventually(lambda: not is_ready(), SECONDS)
                eventually(lambda number=number: restarts() == [number, number] and is_ready(), SECONDS)
                assert client.complete("Hello", max_tokens=2).usage.completion_tokens == 2
            assert "rank 1 of its group has ended" in cluster.log(leader)
            assert "the leader of its group has ended" in cluster.log(rank)

            before = pods()[rank]["metadata"]["uid"]
            stream = client.generate("Hello", max_tokens=300, ignore_eos=True)
            next(stream)
            api.delete(f"{CORE}/pods/{rank}").expect(200)
            assert sum(len(delta.token_ids) for delta in stream) > 250, "what runs is finished before the group ends"
            eventually(lambda: pods().get(rank, {}).get("metadata", {}).get("uid") not in {None, before}, SECONDS)
            eventually(lambda: is_ready() and all(condition(pod, "Ready") for pod in pods().values()), SECONDS)
            assert client.complete("Hello", max_tokens=2).usage.completion_tokens == 2

        api.delete(f"{FLEET}/disaggdeployments/tiny").expect(200)
        eventually(lambda: not pods(), SECONDS)
