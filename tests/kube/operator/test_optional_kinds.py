"""Optional kinds that a cluster may lack, and replicas of several nodes on clusters without LeaderWorkerSets."""

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from operators import server
from tests.support.kube.operator import a_deployment, an_operator
from tests.support.waiting import until

GROUPS = {
    "leaderworkersets": ("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet"),
    "podmonitors": ("monitoring.coreos.com", "v1", "PodMonitor"),
    "inferencepools": ("inference.networking.k8s.io", "v1", "InferencePool"),
}
WIDE = {
    "name": "wide",
    "type": "aggregated",
    "nodesPerReplica": 2,
    "gpus": {"perReplica": 4},
    "parallelism": {"tensor": 4},
}


def a_definition(plural):
    group, version, kind = GROUPS[plural]
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    schema = {
        "type": "object",
        "properties": {
            key: {"type": "object", "x-kubernetes-preserve-unknown-fields": True} for key in ("spec", "status")
        },
    }
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [served]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": spec,
    }


@pytest.fixture
def optional_kinds(asked):
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for plural in GROUPS:
        asked.api.post(path, a_definition(plural)).expect(201)
    yield
    for plural in GROUPS:
        asked.api.delete(f"{path}/{plural}.{GROUPS[plural][0]}")


def define(asked, plural):
    asked.api.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", a_definition(plural)).expect(201)


def remove(asked, plural):
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.{GROUPS[plural][0]}"
    asked.api.delete(path).expect(200)


async def test_lws_coming_and_going_replaces_no_single_node_role(asked, monkeypatch):
    """Another team installs LeaderWorkerSet and removes it; only worker groups that were made by it are made again."""
    monkeypatch.setattr(server, "DISCOVER_SECONDS", 0.1)
    single = {"name": "single", "type": "aggregated"}
    spec = {"routing": {"policy": "fleet"}}

    def pods(role):
        return [name for name in asked.workers() if f"-{role}-" in name]

    def sets(kind, group="apps/v1"):
        found = asked.api.get(asked.path(kind, "", group))
        return [each["metadata"]["name"] for each in found.body["items"]] if found.code == 200 else []

    def groups():
        return sets("leaderworkersets", "leaderworkerset.x-k8s.io/v1")

    async with an_operator(asked) as operator:
        asked.apply(a_deployment(single, WIDE, **spec)).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        before = asked.workers()
        asked.server.forget_requests()

        define(asked, "leaderworkersets")
        try:
            await until(lambda: operator.served().leader_worker_sets)
            await until(lambda: asked.ready() and not operator.waiting())
            assert asked.workers() == before, "groups of StatefulSets stay as well"
            assert [each for each in asked.writes() if "/status" not in each[1]] == []

            asked.apply(a_deployment(single, WIDE, image="another:2", **spec)).expect(200)
            await until(lambda: asked.ready() and groups() and not sets("statefulsets"))
            singles = pods("single")
        finally:
            remove(asked, "leaderworkersets")
        await until(lambda: not operator.served().leader_worker_sets)
        await until(lambda: asked.ready() and len(sets("statefulsets")) == 1)
        assert pods("single") == singles
        assert len(pods("wide")) == 2


async def test_served_optional_kinds_are_used(asked, optional_kinds):
    async with an_operator(asked):
        asked.apply(a_deployment(WIDE | {"replicas": 2}, routing={"inferencePool": {"create": True}})).expect(201)
        await until(asked.ready)
        [group] = asked.children("leaderworkersets", "leaderworkerset.x-k8s.io/v1").values()
        assert (group["spec"]["replicas"], group["spec"]["leaderWorkerTemplate"]["size"]) == (2, 2)
        assert len(asked.workers()) == 4
        [monitor] = asked.children("podmonitors", "monitoring.coreos.com/v1").values()
        assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "health", "path": "/metrics"}]
        pools = asked.children("inferencepools", "inference.networking.k8s.io/v1")
        assert pools["dd"]["spec"]["endpointPickerRef"]["port"] == {"number": 9002}
        router = asked.children("services", "v1")["dd-router"]
        assert 9002 in [port["port"] for port in router["spec"]["ports"]]

        asked.apply(a_deployment(WIDE | {"replicas": 2})).expect(200)

        await until(lambda: not asked.children("inferencepools", "inference.networking.k8s.io/v1"))


async def test_multi_node_replica_is_a_stateful_set_without_lws(asked, nodes):
    async with an_operator(asked):
        asked.apply(a_deployment(WIDE | {"replicas": 2}, routing={"inferencePool": {"create": True}})).expect(201)
        await until(asked.ready)
        sets = asked.children("statefulsets")
        status = next(each for each in asked.status()["roles"] if each["name"] == "wide")
        assert [each["spec"]["replicas"] for each in sets.values()] == [2, 2]
        assert (status["replicas"], status["ready"], status["registered"]) == (2, 2, 2)
        assert asked.status()["gpus"] == 8
        pod = asked.children("pods", "v1")[f"{min(sets)}-1"]
        [main] = pod["spec"]["containers"]
        found = {each["name"]: each.get("value") for each in main["env"]}
        assert found["LWS_LEADER_ADDRESS"] == f"{min(sets)}-0.dd-wide.{asked.namespace}.svc"
        assert {"group.rank=$(LWS_WORKER_INDEX)", "group.leader=$(LWS_LEADER_ADDRESS):50063"} <= set(main["command"])
        assert main["resources"]["limits"] == {"nvidia.com/gpu": 2}

        asked.apply(a_deployment(WIDE | {"replicas": 1})).expect(200)
        await until(lambda: asked.ready() and len(asked.workers()) == 2)
        assert list(asked.children("statefulsets")) == [min(sets)]

        asked.apply(a_deployment(WIDE | {"replicas": 1}, image="another:2")).expect(200)
        await until(asked.ready)
        [new] = asked.children("statefulsets")
        assert new not in sets
