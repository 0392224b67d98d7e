"""Fleet's custom kinds on an API server: accepted objects, defaults, and for each rule a sample that it refuses."""

import msgspec
import pytest
import yaml

from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.chart.crds import KINDS, definition
from tests.support.kube.api.running import RunningApiServer
from tests.support.kube.documentation import is_ours, shown_manifests
from tests.support.kube.tools import Command, kubectl, tools_folder
from tests.support.waiting import eventually

API = f"{GROUP}/{VERSION}"
MOST_BYTES = 100_000  # size limit of a definition; clients cannot apply an object of 262,144 bytes
LEAST_FIELDS = {"DisaggDeployment": 86, "RoleScaler": 21, "ServingPlan": 46, "ServingRequest": 53}
YAML_BOOLEANS = {"y", "n", "yes", "no", "on", "off"}


@pytest.fixture(scope="session")
def kinds(api):
    """Serve all custom kinds."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    names = [definition(kind)["metadata"]["name"] for kind in KINDS]
    for name in names:
        api.delete(f"{path}/{name}")
        eventually(lambda gone=f"{path}/{name}": api.get(gone).code == 404)
    for kind in KINDS:
        api.post(path, definition(kind), fieldValidation="Strict").expect(201)
        eventually(lambda plural=kind.plural: api.get(f"/apis/{API}/{plural}").code == 200)
    yield
    for name in names:
        api.delete(f"{path}/{name}")


@pytest.fixture
def path(kinds, namespace):
    """Return the path of this test's objects of a kind."""
    return lambda plural: f"/apis/{API}/namespaces/{namespace}/{plural}"


def a_role(name, **fields):
    return {"name": name, "type": name} | fields


def a_deployment(*roles, **spec):
    roles = roles or (a_role("prefill"), a_role("decode", replicas=2))
    return {
        "apiVersion": API,
        "kind": "DisaggDeployment",
        "metadata": {"name": "llama"},
        "spec": {"model": {"name": "llama"}, "roles": list(roles)} | spec,
    }


def an_object(kind, **spec):
    return {"apiVersion": API, "kind": kind, "metadata": {"name": "it"}, "spec": spec}


def refusal(answer):
    """Return the reasons of a refusal as one text with the paths of fields."""
    causes = answer.refused(422, "Invalid")["details"]["causes"]
    return "; ".join(f"{cause['field']}: {cause['message']}" for cause in causes)


def test_a_deployment_with_a_model_and_two_roles_is_enough(api, path):
    made = api.post(path("disaggdeployments"), a_deployment(), fieldValidation="Strict").expect(201)

    prefill, decode = made["spec"]["roles"]
    assert (prefill["replicas"], decode["replicas"]) == (1, 2)
    assert prefill["parallelism"] == {"tensor": 1, "pipeline": 1, "data": 1, "expert": 1}
    assert prefill["rollout"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert made["spec"]["routing"]["disaggregateAboveTokens"] == 512


@pytest.mark.parametrize(
    "shown", [each for each in shown_manifests() if is_ours(each)], ids=lambda each: each["metadata"]["name"]
)
def test_documented_and_sample_deployments_are_accepted(api, path, shown):
    plural = {kind.name: kind.plural for kind in KINDS}[shown["kind"]]

    api.post(path(plural), shown, fieldValidation="Strict").expect(201)


def test_a_pod_template_is_kept_as_it_is(api, path):
    template = {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "b"}]}]}}

    made = api.post(path("disaggdeployments"), a_deployment(a_role("aggregated", podTemplate=template))).expect(201)

    assert made["spec"]["roles"][0]["podTemplate"] == template


def test_misspelt_field_is_refused_in_strict_mode(api, path):
    answer = api.post(
        path("disaggdeployments"), a_deployment(a_role("aggregated", replica=2)), fieldValidation="Strict"
    )

    assert "replica" in answer.expect(400)["message"]


@pytest.mark.parametrize(
    ("roles", "spec", "said"),
    [
        ([a_role("prefill")], {}, "prefill and decode need each other"),
        ([a_role("decode")], {}, "prefill and decode need each other"),
        ([a_role("router")], {}, "at least one role of workers is needed"),
        (
            [a_role("aggregated"), a_role("router"), a_role("router") | {"name": "other"}],
            {},
            "one role of routers at most",
        ),
        ([a_role("aggregated", scaling={"least": 3, "most": 2})], {}, "least is more than most"),
        (
            [a_role("aggregated", gpus={"perReplica": 4}, parallelism={"tensor": 2})],
            {},
            "tensor x pipeline x data must be gpus.perReplica",
        ),
        (
            [a_role("aggregated", gpus={"perReplica": 4}, parallelism={"tensor": 4}, nodesPerReplica=3)],
            {},
            "must divide gpus.perReplica",
        ),
        (
            [a_role("aggregated", parallelism={"tensor": 2, "data": 6}, nodesPerReplica=4)],
            {},
            "each node takes whole data parallel engines, or each such engine whole nodes",
        ),
        ([a_role("aggregated", nodesPerReplica=2)], {}, "each node takes whole data parallel engines"),
        ([a_role("aggregated", rollout={"maxSurge": 0})], {}, "nothing could ever be updated"),
        ([a_role("aggregated"), a_role("router", gpus={"perReplica": 1})], {}, "a router needs none"),
        (
            [a_role("aggregated"), a_role("router", scaling={"mode": "Planner"})],
            {},
            "a ServingPlan scales workers, not routers",
        ),
        (
            [a_role("aggregated", replicas=3, gpus={"perReplica": 4}, parallelism={"tensor": 4})],
            {"balance": {"gpuBudget": 8}},
            "gpuBudget: a role alone needs more",
        ),
        (
            [a_role("aggregated", gpus={"perReplica": 2}, parallelism={"pipeline": 2})],
            {"kvTransfer": {"paths": ["direct", "store"]}},
            "a store takes blocks of engines on one node",
        ),
        (
            [a_role("aggregated", gpus={"perReplica": 2}, parallelism={"data": 2})],
            {"kvTransfer": {"paths": ["store"]}},
            "a store takes blocks of engines on one node",
        ),
        (
            [a_role("aggregated", gpus={"perReplica": 2}, parallelism={"tensor": 2}, nodesPerReplica=2)],
            {"kvTransfer": {"paths": ["store"]}},
            "a store takes blocks of engines on one node",
        ),
        (
            [a_role("aggregated")],
            {"kvTransfer": {"redis": "redis://cache:6379"}},
            "kvTransfer.redis: takes blocks of stores",
        ),
        (
            [a_role("aggregated")],
            {"kvTransfer": {"paths": ["store"], "redisSecret": "cache"}},
            "redisSecret is for redis only",
        ),
        (
            [a_role("aggregated")],
            {"kvTransfer": {"paths": ["store"], "redis": "redis://user:word@cache:6379"}},
            "spec.kvTransfer.redis",
        ),
        (
            [a_role("aggregated")],
            {"tracing": {"endpoint": "http://collector:4318/v1/traces"}},
            "tracing.endpoint: has a path, which gRPC does not use",
        ),
        ([a_role("aggregated")], {"tracing": {"endpoint": "collector:4317"}}, "spec.tracing.endpoint"),
        ([a_role("aggregated")], {"tracing": {"endpoint": "http://collector:0"}}, "spec.tracing.endpoint"),
        ([a_role("aggregated")], {"tracing": {"endpoint": "http://collector:65536"}}, "spec.tracing.endpoint"),
        (
            [a_role("aggregated")],
            {"tracing": {"endpoint": "http://collector:4317", "headersSecret": "key"}},
            "tracing.endpoint: headersSecret and authoritySecret are for a collector with https",
        ),
        (
            [a_role("aggregated")],
            {"tracing": {"authoritySecret": "ca"}},
            "tracing.endpoint: headersSecret and authoritySecret are for a collector with https",
        ),
        ([a_role("aggregated")], {"tracing": {"samplePercent": 101}}, "spec.tracing.samplePercent"),
        ([a_role("aggregated")], {"workerMetrics": {"keySha256": ["no digest"]}}, "spec.workerMetrics.keySha256[0]"),
        (
            [a_role("aggregated")],
            {"routing": {"tlsSecret": "tls", "inferencePool": {"create": True}}},
            "routing.tlsSecret: gateways speak plain HTTP",
        ),
        ([a_role("aggregated")], {"workerMetrics": {"tlsSecret": "tls"}}, "workerMetrics.tlsSecret: without keySha256"),
        (
            [a_role("aggregated")],
            {"watchdog": {"floorSeconds": 60, "ceilingSeconds": 30}},
            "watchdog.ceilingSeconds: is below watchdog.floorSeconds",
        ),
        ([a_role("prefill"), a_role("decode")], {"task": "embed"}, "task: workers of a model that does not generate"),
        (
            [a_role("aggregated")],
            {"task": "classify", "kvTransfer": {"paths": ["store"]}},
            "kvTransfer.paths: a model that does not generate has no blocks to store",
        ),
        (
            [a_role("aggregated", scaling={"mode": "Planner"})],
            {"task": "embed"},
            "scaling: a ServingPlan scales workers that generate",
        ),
        ([a_role("aggregated")], {"task": "speak"}, "spec.task"),
        ([a_role("aggregated"), a_role("aggregated")], {}, "Duplicate"),
        ([a_role("aggregated") | {"name": "Upper"}], {}, "spec.roles[0].name"),
        ([a_role("aggregated") | {"type": "encode"}], {}, "spec.roles[0].type"),
        ([a_role("aggregated", replicas=-1)], {}, "spec.roles[0].replicas"),
        ([a_role("aggregated")], {"balance": {"ratio": {"most": "1/4"}}}, "spec.balance.ratio.most"),
        ([a_role("aggregated")], {"model": {}}, "spec.model.name"),
        (
            [a_role("aggregated")],
            {"model": {"name": "a/b", "claim": "weights", "cacheClaim": "models"}},
            "cacheClaim: keeps what is fetched",
        ),
        (
            [a_role("aggregated")],
            {"model": {"name": "a/b", "endpoint": "http://mirror", "tokenSecret": "hub"}},
            "endpoint: the token of tokenSecret would cross the network in the clear",
        ),
        ([a_role("aggregated")], {"model": {"name": "a/b", "endpoint": "mirror:80"}}, "spec.model.endpoint"),
    ],
)
def test_impossible_deployment_is_refused_with_the_field(api, path, roles, spec, said):
    assert said in refusal(api.post(path("disaggdeployments"), a_deployment(*roles, **spec)))


@pytest.mark.parametrize(("wide", "most"), [(False, 54), (True, 38)])
def test_name_too_long_for_children_is_refused(api, path, wide, most):
    nodes = {"gpus": {"perReplica": 2}, "parallelism": {"tensor": 2}, "nodesPerReplica": 2} if wide else {}
    made = a_deployment(a_role("aggregated", **nodes))
    made["metadata"]["name"] = "d" * (most - len("aggregated"))
    api.post(path("disaggdeployments"), made).expect(201)
    made["metadata"]["name"] += "d"
    assert "metadata.name: too long beside the name of a role" in refusal(api.post(path("disaggdeployments"), made))


@pytest.mark.parametrize(
    ("name", "proposed"),
    [("llama-3.3-70b", "llama-3-3-70b"), ("7b", "m-7b"), ("3.1-8b", "m-3-1-8b")],
)
def test_name_that_services_cannot_have_is_refused(api, path, name, proposed):
    made = a_deployment()
    made["metadata"]["name"] = name

    said = refusal(api.post(path("disaggdeployments"), made))

    assert f"no dots and begins with a letter; use {proposed}" in said
    made["metadata"]["name"] = proposed
    api.post(path("disaggdeployments"), made).expect(201)


def test_refusal_of_a_long_name_proposes_an_accepted_one(api, path):
    made = a_deployment(a_role("prefill"), a_role("decode"))
    made["metadata"]["name"] = "a" * 45 + "-b-and-more"

    said = refusal(api.post(path("disaggdeployments"), made))

    assert "use at most 47 characters, such as " + "a" * 45 in said
    made["metadata"]["name"] = said.partition("such as ")[2].split(";")[0]
    made["spec"]["roles"].append(a_role("router"))
    api.post(path("disaggdeployments"), made).expect(201)


def test_name_too_long_beside_the_routers_is_refused(api, path):
    made = a_deployment(a_role("aggregated") | {"name": "a"})
    made["metadata"]["name"] = "d" * 49

    assert "beside the name of the routers' role" in refusal(api.post(path("disaggdeployments"), made))

    made["spec"]["roles"].append(a_role("router") | {"name": "r"})
    api.post(path("disaggdeployments"), made).expect(201)


def test_request_with_dots_in_its_name_is_refused(api, path):
    spec = {"model": {"name": "a"}, "hardware": {"gpu": "h100", "count": 8}}
    made = an_object("ServingRequest", **spec, workload={"promptTokens": 1, "answerTokens": 1, "concurrency": 1})
    made["metadata"]["name"] = "llama-3.3"

    assert "use llama-3-3" in refusal(api.post(path("servingrequests"), made))


def test_the_type_of_a_role_cannot_be_changed(api, path):
    made = api.post(path("disaggdeployments"), a_deployment()).expect(201)
    made["spec"]["roles"][0]["type"] = "aggregated"

    assert "add another role and remove this one" in refusal(api.put(f"{path('disaggdeployments')}/llama", made))


def test_the_task_of_a_model_cannot_be_changed(api, path):
    made = api.post(path("disaggdeployments"), a_deployment(a_role("aggregated"), a_role("router"))).expect(201)
    assert made["spec"]["task"] == "generate"
    made["spec"]["task"] = "embed"

    assert "create another deployment" in refusal(api.put(f"{path('disaggdeployments')}/llama", made))


def test_a_role_is_scaled_to_0_before_it_is_removed(api, path):
    aside = a_role("aggregated") | {"name": "aside"}
    made = api.post(path("disaggdeployments"), a_deployment(a_role("prefill"), a_role("decode"), aside)).expect(201)
    without = made | {"spec": made["spec"] | {"roles": made["spec"]["roles"][:2]}}

    assert "scale a role to 0" in refusal(api.put(f"{path('disaggdeployments')}/llama", without))

    made["spec"]["roles"][2]["replicas"] = 0
    emptied = api.put(f"{path('disaggdeployments')}/llama", made).expect(200)
    without["metadata"] = emptied["metadata"]
    api.put(f"{path('disaggdeployments')}/llama", without).expect(200)


@pytest.mark.parametrize(
    ("kind", "plural", "spec", "said"),
    [
        ("RoleScaler", "rolescalers", {"target": {"deployment": "a", "role": "b"}, "replicas": -1}, "spec.replicas"),
        (
            "ServingPlan",
            "servingplans",
            {"deployment": "a", "roles": [{"role": "decode", "least": 4, "most": 3}]},
            "least is more than most",
        ),
        ("ServingPlan", "servingplans", {"deployment": "a", "objective": {"ttftMs": 0}}, "spec.objective.ttftMs"),
        (
            "ServingRequest",
            "servingrequests",
            {
                "model": {"name": "a"},
                "hardware": {"gpu": "h100", "count": 8},
                "workload": {"promptTokens": 1, "answerTokens": 1},
            },
            "one of requestsPerMinute and concurrency",
        ),
    ],
)
def test_impossible_field_of_other_kinds_is_refused(api, path, kind, plural, spec, said):
    assert said in refusal(api.post(path(plural), an_object(kind, **spec)))


@pytest.mark.parametrize(
    ("kind", "plural", "spec", "change"),
    [
        (
            "RoleScaler",
            "rolescalers",
            {"target": {"deployment": "a", "role": "b"}},
            {"target": {"deployment": "other"}},
        ),
        ("ServingPlan", "servingplans", {"deployment": "a"}, {"deployment": "other"}),
    ],
)
def test_target_of_an_object_cannot_be_changed(api, path, kind, plural, spec, change):
    api.post(path(plural), an_object(kind, **spec)).expect(201)

    said = refusal(api.patch(f"{path(plural)}/it", "merge", {"spec": change}))

    assert "cannot be changed; delete the object and make another one" in said


def test_a_role_scaler_is_scaled_like_a_deployment(api, path):
    api.post(path("rolescalers"), an_object("RoleScaler", target={"deployment": "a", "role": "b"}, replicas=2)).expect(
        201
    )

    scaled = api.patch(f"{path('rolescalers')}/it/scale", "merge", {"spec": {"replicas": 5}}).expect(200)

    assert scaled["spec"]["replicas"] == 5
    assert api.get(f"{path('rolescalers')}/it").expect(200)["spec"]["replicas"] == 5


def fields_of(schema, path):
    """Yield the path and the description of a schema and of everything in it."""
    yield path, schema.get("description", "")
    for name, inner in schema.get("properties", {}).items():
        yield from fields_of(inner, f"{path}.{name}")
    for name, inner in schema.get("items", {}).get("properties", {}).items():
        yield from fields_of(inner, f"{path}.{name}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_and_field_has_a_description(kind):
    (version,) = definition(kind)["spec"]["versions"]

    found = list(fields_of(version["schema"]["openAPIV3Schema"], kind.name))

    assert [path for path, description in found if not description] == []
    assert len(found) >= LEAST_FIELDS[kind.name]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("disaggdeployments", "The roles of one served model, and how they work together."),
        ("disaggdeployments.spec", "The desired state of the deployment."),
        ("disaggdeployments.spec.roles", "Pools of pods: prefill and decode workers"),
        ("disaggdeployments.spec.roles.scaling.mode", "`Planner`: A ServingPlan scales the role's RoleScaler."),
        ("disaggdeployments.status.conditions.reason", "Reason of the status, as one word for programs."),
        ("rolescalers.spec.replicas", "Requested number of replicas of the role."),
        ("servingplans.status", "Results of the planner for one ServingPlan"),
        ("servingrequests.spec.workload", "The expected requests."),
    ],
)
def test_kubectl_explains_kinds_and_fields(kinds, address, tmp_path, field, said):
    kube = Command(kubectl(tools_folder()), RunningApiServer(address).kubeconfig(tmp_path), tmp_path)

    def explained():
        return " ".join(kube("explain", field).split())

    # The OpenAPI document follows a new kind after a moment.
    eventually(lambda: said in explained())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_crds_are_small_and_safe_for_yaml(kind):
    text = yaml.safe_dump(definition(kind))

    def names(node):
        if isinstance(node, dict):
            yield from node
            for inner in node.values():
                yield from names(inner)
        elif isinstance(node, list):
            for inner in node:
                yield from names(inner)

    assert len(text) < MOST_BYTES
    assert not YAML_BOOLEANS & {str(name).lower() for name in names(definition(kind))}
    assert msgspec.json.encode(yaml.safe_load(text), order="sorted") == msgspec.json.encode(
        definition(kind), order="sorted"
    )
