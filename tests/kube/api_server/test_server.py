"""Documented behaviour of the API server that was not recorded from a real server.

The tests run only on the API server for tests.
"""

import threading

import msgspec
import pytest

from tests.support.kube.api.running import an_api_server
from tests.support.kube.clients import PATCHES, Api
from tests.support.kube.widgets import API, DEFINITION, a_deployment, a_widget
from tests.support.waiting import eventually

CORE = "/api/v1/namespaces/default"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
WIDGETS = f"/apis/{API}/namespaces/default/widgets"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEFINED = f"{DEFINITIONS}/{DEFINITION['metadata']['name']}"


@pytest.fixture
def server():
    with an_api_server(with_controllers=True) as server:
        yield server


@pytest.fixture
def api(server):
    with Api(server.url) as api:
        yield api


def owned_by(owner, **more):
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    } | more


def a_config(name: str, *owners):
    return {"metadata": {"name": name, "ownerReferences": list(owners)}}


def a_pod(name: str = "p", **spec):
    return {
        "metadata": {"name": name, "labels": {"app": "p"}},
        "spec": {"containers": [{"name": "main", "image": "example.invalid/p:1"}]} | spec,
    }


# Deletion and ownership.


def test_orphans_are_collected_through_generations(api):
    owner = api.post(DEPLOYMENTS, a_deployment()).expect(201)
    child = api.post(f"{CORE}/configmaps", a_config("child", owned_by(owner))).expect(201)
    api.post(f"{CORE}/configmaps", a_config("grandchild", owned_by(child))).expect(201)

    api.delete(f"{DEPLOYMENTS}/web").expect(200)

    eventually(lambda: api.get(f"{CORE}/configmaps").expect(200)["items"] == [])


def test_orphan_policy_keeps_dependents(api):
    owner = api.post(DEPLOYMENTS, a_deployment()).expect(201)
    api.post(f"{CORE}/configmaps", a_config("child", owned_by(owner))).expect(201)

    api.delete(f"{DEPLOYMENTS}/web", propagationPolicy="Orphan").expect(200)

    eventually(lambda: api.get(f"{DEPLOYMENTS}/web").code == 404)
    assert not api.get(f"{CORE}/configmaps/child").expect(200)["metadata"].get("ownerReferences")


def test_foreground_deletion_removes_the_owner_last(api):
    owner = api.post(DEPLOYMENTS, a_deployment()).expect(201)
    child = a_config("child", owned_by(owner, blockOwnerDeletion=True))
    child["metadata"]["finalizers"] = ["fleet.dev/hold"]
    api.post(f"{CORE}/configmaps", child).expect(201)

    api.delete(f"{DEPLOYMENTS}/web", propagationPolicy="Foreground").expect(200)
    eventually(lambda: api.get(f"{CORE}/configmaps/child").expect(200)["metadata"].get("deletionTimestamp"))
    assert api.get(f"{DEPLOYMENTS}/web").expect(200)["metadata"]["finalizers"] == ["foregroundDeletion"]

    api.patch(f"{CORE}/configmaps/child", "merge", {"metadata": {"finalizers": None}}).expect(200)
    eventually(lambda: api.get(f"{DEPLOYMENTS}/web").code == 404)


def test_a_deleted_namespace_is_emptied_and_takes_nothing_new(api):
    api.post("/api/v1/namespaces", {"metadata": {"name": "gone"}}).expect(201)
    held = {"metadata": {"name": "held", "finalizers": ["fleet.dev/hold"]}}
    api.post("/api/v1/namespaces/gone/configmaps", held).expect(201)

    api.delete("/api/v1/namespaces/gone").expect(200)

    api.post("/api/v1/namespaces/gone/configmaps", a_config("late")).refused(403, "Forbidden")
    api.patch("/api/v1/namespaces/gone/configmaps/held", "merge", {"metadata": {"finalizers": None}}).expect(200)
    eventually(lambda: api.get("/api/v1/namespaces/gone").code == 404)


def test_deleted_pod_on_a_node_gets_its_grace_period(api):
    api.post(f"{CORE}/pods", a_pod(nodeName="node")).expect(201)

    marked = api.delete(f"{CORE}/pods/p", gracePeriodSeconds=7).expect(200)

    assert marked["metadata"]["deletionGracePeriodSeconds"] == 7
    api.patch(f"{CORE}/pods/p/status", "merge", {"status": {"phase": "Running"}}).expect(200)
    api.delete(f"{CORE}/pods/p", gracePeriodSeconds=0).expect(200)
    assert api.get(f"{CORE}/pods/p").code == 404


def test_a_delete_with_another_uid_is_409(api):
    api.post(f"{CORE}/configmaps", a_config("a")).expect(201)

    api.delete(f"{CORE}/configmaps/a", preconditions={"uid": "another"}).refused(409, "Conflict")


def test_an_eviction_waits_for_the_budget(api):
    ready = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
    for name in ("p", "q"):
        api.post(f"{CORE}/pods", a_pod(name)).expect(201)
        api.patch(f"{CORE}/pods/{name}/status", "merge", ready).expect(200)
    budget = {"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "p"}}}}
    api.post("/apis/policy/v1/namespaces/default/poddisruptionbudgets", budget).expect(201)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}

    api.post(f"{CORE}/pods/p/eviction", eviction).expect(201)

    api.post(f"{CORE}/pods/q/eviction", eviction).refused(429, "TooManyRequests")


# Custom kinds.


def test_kind_is_served_while_defined_and_goes_with_objects(api):
    assert api.get(WIDGETS).code == 404
    api.post(DEFINITIONS, DEFINITION).expect(201)
    conditions = {each["type"]: each["status"] for each in api.get(DEFINED).expect(200)["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    api.post(WIDGETS, a_widget(metadata={"finalizers": ["fleet.dev/hold"]})).expect(201)

    api.delete(DEFINED).expect(200)

    assert api.get(f"{WIDGETS}/a").expect(200)["metadata"]["deletionTimestamp"]
    api.patch(f"{WIDGETS}/a", "merge", {"metadata": {"finalizers": None}}).expect(200)
    assert (api.get(WIDGETS).code, api.get(DEFINED).code) == (404, 404)


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda version: version["schema"]["openAPIV3Schema"].pop("type"), "openAPIV3Schema.type"),
        (
            lambda version: spec_of(version)["x-kubernetes-validations"][0].update(rule="self.replicas <"),
            "x-kubernetes-validations[0].rule",
        ),
        (lambda version: spec_of(version)["properties"].update({"n": {"type": "integer"}}), "properties[n]"),
        (lambda version: spec_of(version)["properties"]["roles"]["items"].pop("required"), "properties[name].default"),
        (
            lambda version: version["additionalPrinterColumns"][0].update(jsonPath=".a..b"),
            "additionalPrinterColumns[0].jsonPath",
        ),
        (lambda version: version.update(storage=False), "spec.versions"),
    ],
    ids=[
        "no root type",
        "rule that does not compile",
        "field that YAML reads as a boolean",
        "key without default",
        "bad column",
        "no storage version",
    ],
)
def test_a_bad_definition_is_refused_with_its_field(api, damage, field):
    definition = msgspec.json.decode(msgspec.json.encode(DEFINITION))
    damage(definition["spec"]["versions"][0])

    status = api.post(DEFINITIONS, definition).refused(422, "Invalid")

    assert any(cause["field"].endswith(field) for cause in status["details"]["causes"]), status["message"]


def spec_of(version):
    return version["schema"]["openAPIV3Schema"]["properties"]["spec"]


def test_a_duplicate_key_of_a_list_map_is_refused(api):
    api.post(DEFINITIONS, DEFINITION).expect(201)

    status = api.post(WIDGETS, a_widget(roles=[{"name": "decode"}, {"name": "decode"}])).refused(422, "Invalid")

    assert status["details"]["causes"][0]["field"] == "spec.roles[1]"


# Server-side apply.


def test_apply_without_change_keeps_the_resource_version(api):
    made = api.apply(f"{DEPLOYMENTS}/web", a_deployment(replicas=2), "one").expect(201)

    again = api.apply(f"{DEPLOYMENTS}/web", a_deployment(replicas=2), "one").expect(200)

    assert again["metadata"] == made["metadata"]


def test_update_takes_the_field_from_an_applier(api):
    api.apply(f"{DEPLOYMENTS}/web", a_deployment(replicas=2), "one").expect(201)
    api.patch(f"{DEPLOYMENTS}/web/scale", "merge", {"spec": {"replicas": 5}}, fieldManager="scaler").expect(200)

    owners = {
        each["manager"]: each["fieldsV1"]
        for each in api.get(f"{DEPLOYMENTS}/web").expect(200)["metadata"]["managedFields"]
    }
    assert "f:replicas" not in owners["one"]["f:spec"]
    status = api.apply(f"{DEPLOYMENTS}/web", a_deployment(replicas=2), "one").refused(409, "Conflict")

    assert status["details"]["causes"][0]["message"] == 'conflict with "scaler" with subresource "scale" using apps/v1'
    left_out = api.apply(f"{DEPLOYMENTS}/web", a_deployment(), "one").expect(200)
    assert left_out["spec"]["replicas"] == 5


def test_two_appliers_of_the_same_value_share_it(api):
    api.apply(f"{DEPLOYMENTS}/web", a_deployment(replicas=2), "one").expect(201)
    api.apply(f"{DEPLOYMENTS}/web", a_deployment(replicas=2), "two").expect(200)

    kept = api.apply(f"{DEPLOYMENTS}/web", a_deployment(), "two").expect(200)

    assert kept["spec"]["replicas"] == 2


def test_unlisted_item_is_removed_and_its_default_returns(api):
    deployment = a_deployment(replicas=4)
    deployment["spec"]["template"]["spec"]["containers"].append({"name": "side", "image": "example.invalid/side:1"})
    api.apply(f"{DEPLOYMENTS}/web", deployment, "one").expect(201)

    changed = api.apply(f"{DEPLOYMENTS}/web", a_deployment(), "one").expect(200)

    assert [each["name"] for each in changed["spec"]["template"]["spec"]["containers"]] == ["main"]
    assert changed["spec"]["replicas"] == 1


def test_apply_of_status_has_an_owner_of_its_own(api):
    api.post(DEFINITIONS, DEFINITION).expect(201)
    api.apply(f"{WIDGETS}/a", a_widget(), "one").expect(201)
    status = {"apiVersion": API, "kind": "Widget", "metadata": {"name": "a"}, "status": {"phase": "Ready"}}

    changed = api.apply(f"{WIDGETS}/a/status", status, "one").expect(200)

    assert changed["status"] == {"phase": "Ready"}
    assert changed["metadata"]["generation"] == 1
    assert {(each["manager"], each.get("subresource", "")) for each in changed["metadata"]["managedFields"]} == {
        ("one", ""),
        ("one", "status"),
    }
    assert api.apply(f"{WIDGETS}/a", a_widget(), "one").expect(200)["status"] == {"phase": "Ready"}


# Reading and watching.


def test_watch_can_begin_with_initial_events(api):
    api.post(f"{CORE}/configmaps", a_config("a")).expect(201)

    query = {
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": 1,
    }
    events = list(api.watch(f"{CORE}/configmaps", **query))

    assert [kind for kind, _ in events[:2]] == ["ADDED", "BOOKMARK"]
    assert events[1][1]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_labelled_watch_reports_objects_that_enter_and_leave(api):
    start = api.get(f"{CORE}/configmaps").expect(200)["metadata"]["resourceVersion"]
    api.post(f"{CORE}/configmaps", a_config("a")).expect(201)
    for value in ("gpu", "cpu"):
        api.patch(f"{CORE}/configmaps/a", "merge", {"metadata": {"labels": {"tier": value}}}).expect(200)

    events = list(api.watch(f"{CORE}/configmaps", resourceVersion=start, labelSelector="tier=gpu", timeoutSeconds=1))

    assert [kind for kind, _ in events] == ["ADDED", "DELETED"]


def test_a_dry_run_leaves_no_trace(api):
    api.post(DEPLOYMENTS, a_deployment(), dryRun="All").expect(201)

    assert api.get(f"{DEPLOYMENTS}/web").code == 404


def test_chunked_list_shows_a_single_revision(api):
    for name in "abc":
        api.post(f"{CORE}/configmaps", a_config(name)).expect(201)
    first = api.get(f"{CORE}/configmaps", limit=1).expect(200)
    api.delete(f"{CORE}/configmaps/c").expect(200)

    rest = api.get(f"{CORE}/configmaps", **{"continue": first["metadata"]["continue"]}).expect(200)

    assert [each["metadata"]["name"] for each in rest["items"]] == ["b", "c"]
    assert rest["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_discovery_is_the_same_in_parts_and_in_one_document(api):
    api.post(DEFINITIONS, DEFINITION).expect(201)
    versions = [each["versions"] for each in api.get("/apis").expect(200)["groups"]]
    paths = ["/api/v1", *(f"/apis/{each['groupVersion']}" for group in versions for each in group)]
    parts = {
        f"{path}/{each['name']}"
        for path in paths
        for each in api.get(path).expect(200)["resources"]
        if "/" not in each["name"]
    }

    form = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    groups = [each for root in ("/api", "/apis") for each in api.get(root, accept=form).expect(200)["items"]]

    assert f"/apis/{API}/widgets" in parts
    assert "/api/v1/namespaces" in parts
    assert parts == {
        f"{f'/apis/{name}' if (name := group['metadata'].get('name')) else '/api'}/{version['version']}/{each['resource']}"
        for group in groups
        for version in group["versions"]
        for each in version["resources"]
    }


# Roles.


def test_an_account_may_do_what_its_roles_say(server, api):
    group = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}]
    api.post(f"{group}/roles", {"metadata": {"name": "reader"}, "rules": rules}).expect(201)
    subject = {"kind": "ServiceAccount", "namespace": "default", "name": "reader"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    api.post(
        f"{group}/rolebindings", {"metadata": {"name": "reader"}, "subjects": [subject], "roleRef": reference}
    ).expect(201)

    with Api(server.url, token="system:serviceaccount:default:reader") as reader:
        reader.get(f"{CORE}/configmaps").expect(200)
        status = reader.post(f"{CORE}/configmaps", a_config("a")).refused(403, "Forbidden")
        reader.get("/api/v1/namespaces/kube-system/configmaps").refused(403, "Forbidden")

    assert 'cannot create resource "configmaps"' in status["message"]


# Bad input.


@pytest.mark.parametrize(
    ("item", "code", "words"),
    [
        ({"metadata": {"name": "a", "labels": {"x": "not ok"}}}, 422, "metadata.labels"),
        ({"metadata": {"name": "a" * 300}}, 422, "metadata.name"),
        ({"metadata": {}}, 422, "name or generateName is required"),
        ({"kind": "Secret", "metadata": {"name": "a"}}, 400, "does not match the expected kind"),
        ({"metadata": {"name": "a", "namespace": "other"}}, 400, "namespace"),
        ({"metadata": {"name": "a"}, "data": {"x": 1}}, 400, "data.x"),
        ([1, 2], 400, "no ConfigMap"),
    ],
)
def test_bad_objects_are_refused_with_the_cause(api, item, code, words):
    answer = api.post(f"{CORE}/configmaps", item)

    assert words in answer.expect(code)["message"]


def test_an_endpoint_on_the_loopback_is_refused(api):
    item = {"metadata": {"name": "e"}, "addressType": "IPv4", "endpoints": [{"addresses": ["127.0.0.1"]}]}

    status = api.post("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", item).refused(422, "Invalid")

    assert status["details"]["causes"][0]["field"] == "endpoints[0].addresses[0]"


def test_patch_of_unknown_type_is_415(api):
    api.post(f"{CORE}/configmaps", a_config("a")).expect(201)
    answer = api.client.patch(f"{CORE}/configmaps/a", content="{}", headers={"Content-Type": "application/json"})

    assert answer.status_code == 415
    assert PATCHES["merge"] in answer.json()["message"]


def test_racing_writers_lose_no_update(server):
    with Api(server.url) as api:
        api.post(f"{CORE}/configmaps", {"metadata": {"name": "count"}, "data": {"value": "0"}}).expect(201)

    def count() -> None:
        with Api(server.url) as mine:
            for _ in range(5):
                while True:
                    item = mine.get(f"{CORE}/configmaps/count").expect(200)
                    item["data"]["value"] = str(int(item["data"]["value"]) + 1)
                    if mine.put(f"{CORE}/configmaps/count", item).code == 200:
                        break

    writers = [threading.Thread(target=count, daemon=True) for _ in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(30)

    with Api(server.url) as api:
        assert api.get(f"{CORE}/configmaps/count").expect(200)["data"]["value"] == "20"


def test_protobuf_is_accepted_only_for_helms_kinds(api):
    def message(number: int, body: bytes) -> bytes:
        return bytes([number << 3 | 2, len(body)]) + body

    def post(kind: bytes, body: bytes):
        envelope = b"k8s\0" + message(1, message(1, b"v1") + message(2, kind)) + message(2, body)
        headers = {"Content-Type": "application/vnd.kubernetes.protobuf"}
        return api.client.post(f"{CORE}/secrets", content=envelope, headers=headers)

    metadata = message(1, b"s") + message(11, message(1, b"owner") + message(2, b"helm"))
    secret = message(1, metadata) + message(2, message(1, b"key") + message(2, b"\x00\xff"))

    assert post(b"Secret", secret).status_code == 201
    kept = api.get(f"{CORE}/secrets/s").expect(200)
    assert (kept["data"], kept["metadata"]["labels"]) == ({"key": "AP8="}, {"owner": "helm"})
    assert post(b"Secret", secret[:-1]).status_code == 400
    assert post(b"Pod", b"").status_code == 415


# The server's thread.


def test_server_thread_ends_when_a_controller_has_failed():
    async def fail(_objects):
        raise RuntimeError("the nodes failed")

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="the nodes failed"), an_api_server(beside=fail):
        assert len(set(threading.enumerate()) - before) == 1

    assert set(threading.enumerate()) <= before
