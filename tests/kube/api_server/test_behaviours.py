"""Recorded behaviour of the API server: one test for each of 44 behaviours of kube-apiserver 1.36.2.

An operator depends on these behaviours. They were recorded from a real server. The same tests run against another
server if FLEET_TEST_KUBE_API names its address.
"""

import os
import re
import threading
import uuid

import pytest

from tests.support.kube.api.running import OTHER_SERVER
from tests.support.kube.clients import Api
from tests.support.kube.widgets import API, DEFINITION, GROUP, a_deployment, a_widget
from tests.support.waiting import eventually

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
WATCH_SECONDS = 3


@pytest.fixture(scope="session")
def defined(api):
    """Serve the custom kind `Widget`."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    api.delete(f"{path}/{DEFINITION['metadata']['name']}")
    eventually(lambda: api.post(path, DEFINITION).code == 201)
    eventually(lambda: api.get(f"/apis/{API}/widgets").code == 200)
    yield
    api.delete(f"{path}/{DEFINITION['metadata']['name']}")


@pytest.fixture
def widgets(defined, namespace):
    """Return the path of this test's widgets."""
    return f"/apis/{API}/namespaces/{namespace}/widgets"


@pytest.fixture
def deployments(namespace):
    return f"/apis/apps/v1/namespaces/{namespace}/deployments"


@pytest.fixture
def configmaps(namespace):
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture
def leases(namespace):
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def fields_at_fault(status) -> list[str]:
    return [cause["field"] for cause in status["details"]["causes"]]


# Creation.


def test_create_answers_201(api, widgets):
    made = api.post(widgets, a_widget()).expect(201)

    assert made["spec"]["model"] == "tiny"


def test_create_applies_defaults(api, widgets):
    made = api.post(widgets, a_widget(roles=[{"name": "decode"}])).expect(201)

    assert made["spec"] == {"model": "tiny", "replicas": 1, "mode": "Static", "roles": [{"name": "decode", "size": 1}]}


def test_create_prunes_unknown_fields(api, widgets):
    made = api.post(widgets, a_widget(colour="red", roles=[{"name": "decode", "shape": "round"}])).expect(201)

    assert "colour" not in made["spec"]
    assert made["spec"]["roles"] == [{"name": "decode", "size": 1}]


def test_create_drops_status(api, widgets):
    made = api.post(widgets, a_widget() | {"status": {"phase": "Ready"}}).expect(201)

    assert "status" not in made


def test_create_sets_uid_time_generation_and_numeric_version(api, widgets):
    metadata = api.post(widgets, a_widget(metadata={"generation": 7, "uid": "mine"})).expect(201)["metadata"]

    assert metadata["generation"] == 1
    assert uuid.UUID(metadata["uid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", metadata["creationTimestamp"])
    assert int(metadata["resourceVersion"]) > 0


def test_a_duplicate_is_409_already_exists(api, widgets):
    api.post(widgets, a_widget()).expect(201)

    status = api.post(widgets, a_widget()).refused(409, "AlreadyExists")

    assert status["details"] == {"name": "a", "group": GROUP, "kind": "widgets"}


def test_a_schema_violation_is_422_with_the_field_path(api, widgets):
    status = api.post(widgets, a_widget(replicas=-1, mode="Sometimes")).refused(422, "Invalid")

    assert sorted(fields_at_fault(status)) == ["spec.mode", "spec.replicas"]
    assert "spec.replicas" in status["message"]


def test_a_broken_cel_rule_is_422_with_its_message(api, widgets):
    status = api.post(widgets, a_widget(replicas=11)).refused(422, "Invalid")

    assert fields_at_fault(status) == ["spec"]
    assert "more than 10 replicas need mode External" in status["message"]


def test_a_broken_transition_rule_is_422(api, widgets):
    api.post(widgets, a_widget()).expect(201)

    status = api.patch(f"{widgets}/a", "merge", {"spec": {"model": "large"}}).refused(422, "Invalid")

    assert "model is immutable" in status["message"]


def test_an_unknown_field_under_strict_validation_is_400(api, widgets):
    status = api.post(widgets, a_widget(colour="red"), fieldValidation="Strict").refused(400, "BadRequest")

    assert 'unknown field "spec.colour"' in status["message"]


def test_a_bad_name_is_422(api, widgets):
    status = api.post(widgets, a_widget("Not_A_Name")).refused(422, "Invalid")

    assert fields_at_fault(status) == ["metadata.name"]


def test_generate_name_makes_names(api, widgets):
    names = {
        api.post(widgets, a_widget("", metadata={"name": None, "generateName": "w-"})).expect(201)["metadata"]["name"]
        for _ in range(3)
    }

    assert len(names) == 3
    assert all(re.fullmatch(r"w-[a-z0-9]{5}", name) for name in names)


def test_a_missing_namespace_is_404(api, defined):
    status = api.post(f"/apis/{API}/namespaces/nowhere/widgets", a_widget()).refused(404, "NotFound")

    assert status["details"]["kind"] == "namespaces"
    assert 'namespaces "nowhere" not found' in status["message"]


# Changes.


def test_a_merge_patch_bumps_the_generation(api, widgets):
    made = api.post(widgets, a_widget()).expect(201)

    changed = api.patch(f"{widgets}/a", "merge", {"spec": {"replicas": 3}}).expect(200)

    assert changed["spec"] == {"model": "tiny", "replicas": 3, "mode": "Static"}
    assert changed["metadata"]["generation"] == 2
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])


def test_patch_without_change_keeps_version_and_generation(api, widgets):
    made = api.post(widgets, a_widget(replicas=3)).expect(201)

    again = api.patch(f"{widgets}/a", "merge", {"spec": {"replicas": 3}}).expect(200)

    assert again["metadata"] == made["metadata"]


def test_status_patch_changes_only_status_not_the_generation(api, widgets):
    api.post(widgets, a_widget()).expect(201)

    patch = {"metadata": {"labels": {"a": "b"}}, "spec": {"replicas": 5}, "status": {"phase": "Ready"}}
    changed = api.patch(f"{widgets}/a/status", "merge", patch).expect(200)

    assert changed["status"] == {"phase": "Ready"}
    assert changed["spec"]["replicas"] == 1
    assert "labels" not in changed["metadata"]
    assert changed["metadata"]["generation"] == 1


def test_a_patch_of_the_main_resource_ignores_status(api, widgets):
    api.post(widgets, a_widget()).expect(201)

    changed = api.patch(f"{widgets}/a", "merge", {"spec": {"replicas": 2}, "status": {"phase": "Ready"}}).expect(200)

    assert "status" not in changed
    assert changed["spec"]["replicas"] == 2


def test_a_stale_put_is_409_conflict(api, widgets):
    made = api.post(widgets, a_widget()).expect(201)
    api.patch(f"{widgets}/a", "merge", {"spec": {"replicas": 2}}).expect(200)

    status = api.put(f"{widgets}/a", made).refused(409, "Conflict")

    assert "the object has been modified" in status["message"]


def test_custom_resource_put_without_resource_version_is_422(api, widgets):
    api.post(widgets, a_widget()).expect(201)

    status = api.put(f"{widgets}/a", a_widget(replicas=2)).refused(422, "Invalid")

    assert fields_at_fault(status) == ["metadata.resourceVersion"]


def test_merge_patch_with_stale_resource_version_is_409(api, widgets):
    made = api.post(widgets, a_widget()).expect(201)
    api.patch(f"{widgets}/a", "merge", {"spec": {"replicas": 2}}).expect(200)

    patch = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "spec": {"replicas": 3}}
    api.patch(f"{widgets}/a", "merge", patch).refused(409, "Conflict")


def test_a_failed_test_of_a_json_patch_is_422(api, widgets):
    api.post(widgets, a_widget()).expect(201)

    patch = [
        {"op": "test", "path": "/spec/replicas", "value": 9},
        {"op": "replace", "path": "/spec/replicas", "value": 2},
    ]
    api.patch(f"{widgets}/a", "json", patch).refused(422, "Invalid")

    assert api.get(f"{widgets}/a").expect(200)["spec"]["replicas"] == 1


def test_a_strategic_merge_of_a_custom_resource_is_415(api, widgets):
    api.post(widgets, a_widget()).expect(201)

    api.patch(f"{widgets}/a", "strategic", {"spec": {"replicas": 2}}).refused(415, "UnsupportedMediaType")


def test_a_strategic_merge_of_a_deployment_appends_a_container(api, deployments):
    api.post(deployments, a_deployment()).expect(201)

    patch = {"spec": {"template": {"spec": {"containers": [{"name": "side", "image": "example.invalid/side:1"}]}}}}
    changed = api.patch(f"{deployments}/web", "strategic", patch).expect(200)

    assert sorted(each["name"] for each in changed["spec"]["template"]["spec"]["containers"]) == ["main", "side"]


def test_a_change_of_a_deployments_selector_is_422(api, deployments):
    api.post(deployments, a_deployment()).expect(201)

    patch = {
        "spec": {"selector": {"matchLabels": {"app": "other"}}, "template": {"metadata": {"labels": {"app": "other"}}}}
    }
    status = api.patch(f"{deployments}/web", "merge", patch).refused(422, "Invalid")

    assert fields_at_fault(status) == ["spec.selector"]
    assert "field is immutable" in status["message"]


def test_a_deployment_gets_its_defaults(api, deployments):
    spec = api.post(deployments, a_deployment()).expect(201)["spec"]

    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}


# Scale.


def test_scale_shows_desired_and_current_replicas_and_selector(api, widgets):
    api.post(widgets, a_widget(replicas=3)).expect(201)
    api.patch(f"{widgets}/a/status", "merge", {"status": {"replicas": 2, "selector": "app=a"}}).expect(200)

    scale = api.get(f"{widgets}/a/scale").expect(200)

    assert (scale["kind"], scale["apiVersion"]) == ("Scale", "autoscaling/v1")
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 2, "selector": "app=a"}


def test_a_patch_of_scale_writes_replicas(api, widgets):
    api.post(widgets, a_widget()).expect(201)

    api.patch(f"{widgets}/a/scale", "merge", {"spec": {"replicas": 4}}).expect(200)

    changed = api.get(f"{widgets}/a").expect(200)
    assert changed["spec"]["replicas"] == 4
    assert changed["metadata"]["generation"] == 2


# Server-side apply.


def test_apply_creates_with_managed_fields(api, widgets):
    made = api.apply(f"{widgets}/a", a_widget(replicas=2), "one").expect(201)

    [entry] = made["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"], entry["apiVersion"], entry["fieldsType"]) == (
        "one",
        "Apply",
        API,
        "FieldsV1",
    )
    assert entry["fieldsV1"] == {"f:spec": {"f:model": {}, "f:replicas": {}}}


def test_a_second_manager_merges_items_of_a_list_by_key(api, widgets):
    api.apply(f"{widgets}/a", a_widget(roles=[{"name": "prefill", "size": 2}]), "one").expect(201)

    applied = {
        "apiVersion": API,
        "kind": "Widget",
        "metadata": {"name": "a"},
        "spec": {"roles": [{"name": "decode", "size": 3}]},
    }
    changed = api.apply(f"{widgets}/a", applied, "two").expect(200)

    assert {each["name"]: each["size"] for each in changed["spec"]["roles"]} == {"prefill": 2, "decode": 3}


def test_apply_of_a_foreign_field_is_409_with_manager_and_path(api, widgets):
    api.apply(f"{widgets}/a", a_widget(replicas=2), "one").expect(201)

    status = api.apply(f"{widgets}/a", a_widget(replicas=5), "two").refused(409, "Conflict")

    [cause] = status["details"]["causes"]
    assert cause == {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".spec.replicas"}


def test_forced_apply_takes_fields_and_removes_unlisted_ones(api, widgets):
    api.apply(f"{widgets}/a", a_widget(replicas=2), "one").expect(201)
    applied = {"apiVersion": API, "kind": "Widget", "metadata": {"name": "a"}, "spec": {"roles": [{"name": "decode"}]}}
    api.apply(f"{widgets}/a", applied, "two").expect(200)

    applied["spec"] = {"replicas": 5}
    changed = api.apply(f"{widgets}/a", applied, "two", force="true").expect(200)

    assert changed["spec"]["replicas"] == 5
    assert not changed["spec"].get("roles")
    owners = {each["manager"]: each["fieldsV1"] for each in changed["metadata"]["managedFields"]}
    assert owners == {"one": {"f:spec": {"f:model": {}}}, "two": {"f:spec": {"f:replicas": {}}}}


# Reading.


def test_a_list_comes_in_chunks(api, widgets):
    for name in "abcde":
        api.post(widgets, a_widget(name)).expect(201)

    names, query = [], {}
    while True:
        chunk = api.get(widgets, limit=2, **query).expect(200)
        names.append([each["metadata"]["name"] for each in chunk["items"]])
        if not (following := chunk["metadata"].get("continue")):
            break
        query = {"continue": following}

    assert names == [["a", "b"], ["c", "d"], ["e"]]


def test_lists_are_narrowed_by_label_and_field_selectors(api, widgets):
    for name, tier in (("a", "gpu"), ("b", "cpu"), ("c", None)):
        api.post(widgets, a_widget(name, metadata={"labels": {"tier": tier}} if tier else {})).expect(201)

    def names(**selectors):
        return [each["metadata"]["name"] for each in api.get(widgets, **selectors).expect(200)["items"]]

    assert names(labelSelector="tier=gpu") == ["a"]
    assert names(labelSelector="tier in (gpu,cpu),tier!=cpu") == ["a"]
    assert names(labelSelector="tier notin (gpu)") == ["b", "c"]
    assert names(labelSelector="!tier") == ["c"]
    assert names(fieldSelector="metadata.name=b") == ["b"]


def test_a_table_has_the_printer_columns(api, widgets):
    api.post(widgets, a_widget(replicas=3)).expect(201)

    table = api.get(widgets, accept=TABLE).expect(200)

    assert table["kind"] == "Table"
    assert [each["name"] for each in table["columnDefinitions"]] == ["Name", "Model", "Replicas", "Phase", "Age"]
    [row] = table["rows"]
    assert row["cells"][:3] == ["a", "tiny", 3]
    assert row["object"]["kind"] == "PartialObjectMetadata"


def test_a_missing_object_is_404_with_details(api, widgets):
    status = api.get(f"{widgets}/missing").refused(404, "NotFound")

    assert status["details"] == {"name": "missing", "group": GROUP, "kind": "widgets"}
    assert status["message"] == f'widgets.{GROUP} "missing" not found'


def test_an_unknown_resource_is_404(api, namespace):
    assert api.get(f"/apis/{GROUP}/v1/namespaces/{namespace}/gadgets").code == 404


# Watching.


def test_watch_sends_events_since_a_version(api, widgets):
    """The test expects no bookmark, because a watch as short as this one may end without it."""
    start = api.get(widgets).expect(200)["metadata"]["resourceVersion"]
    api.post(widgets, a_widget()).expect(201)
    api.patch(f"{widgets}/a", "merge", {"spec": {"replicas": 2}}).expect(200)
    api.delete(f"{widgets}/a").expect(200)

    events = list(api.watch(widgets, resourceVersion=start, allowWatchBookmarks="true", timeoutSeconds=WATCH_SECONDS))

    assert [kind for kind, _ in events][:3] == ["ADDED", "MODIFIED", "DELETED"]
    assert {kind for kind, _ in events[3:]} <= {"BOOKMARK"}
    assert [each["spec"]["replicas"] for _, each in events[:3]] == [1, 2, 2]
    versions = [int(each["metadata"]["resourceVersion"]) for _, each in events]
    assert versions == sorted(versions)


def test_watch_from_a_too_old_version_is_200_with_event_410(api, configmaps):
    events = list(api.watch(configmaps, resourceVersion="1", timeoutSeconds=WATCH_SECONDS))

    [(kind, status)] = events
    assert kind == "ERROR"
    assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")


# Deletion.


def test_deleting_an_object_with_a_finalizer_marks_it(api, widgets):
    api.post(widgets, a_widget(metadata={"finalizers": ["fleet.dev/hold"]})).expect(201)

    marked = api.delete(f"{widgets}/a").expect(200)

    assert marked["metadata"]["deletionTimestamp"]
    assert api.get(f"{widgets}/a").expect(200)["metadata"]["finalizers"] == ["fleet.dev/hold"]
    api.patch(f"{widgets}/a", "merge", {"metadata": {"finalizers": None}}).expect(200)


def test_a_finalizer_added_during_deletion_is_422_forbidden(api, widgets):
    api.post(widgets, a_widget(metadata={"finalizers": ["fleet.dev/hold"]})).expect(201)
    api.delete(f"{widgets}/a").expect(200)

    patch = {"metadata": {"finalizers": ["fleet.dev/hold", "fleet.dev/more"]}}
    status = api.patch(f"{widgets}/a", "merge", patch).refused(422, "Invalid")

    assert fields_at_fault(status) == ["metadata.finalizers"]
    assert "Forbidden: no new finalizers can be added if the object is being deleted" in status["message"]
    api.patch(f"{widgets}/a", "merge", {"metadata": {"finalizers": None}}).expect(200)


def test_an_object_is_gone_once_its_finalizers_are_empty(api, widgets):
    api.post(widgets, a_widget(metadata={"finalizers": ["fleet.dev/hold"]})).expect(201)
    api.delete(f"{widgets}/a").expect(200)

    api.patch(f"{widgets}/a", "merge", {"metadata": {"finalizers": []}}).expect(200)

    api.get(f"{widgets}/a").refused(404, "NotFound")


# Leases and owners.


def a_lease(holder: str) -> dict:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "leader"}, "spec": spec}


def test_a_lease_can_be_created(api, leases):
    made = api.post(leases, a_lease("one")).expect(201)

    assert made["spec"]["holderIdentity"] == "one"
    api.post(leases, a_lease("two")).refused(409, "AlreadyExists")


def test_of_two_racing_puts_of_a_lease_one_wins(api, leases, address):
    made = api.post(leases, a_lease("nobody")).expect(201)
    start, codes = threading.Barrier(2), []

    def take(holder: str) -> None:
        with Api(address) as mine:
            start.wait()
            codes.append(mine.put(f"{leases}/leader", made | {"spec": made["spec"] | {"holderIdentity": holder}}).code)

    racers = [threading.Thread(target=take, args=(holder,), daemon=True) for holder in ("one", "two")]
    for each in racers:
        each.start()
    for each in racers:
        each.join()

    assert sorted(codes) == [200, 409]


def test_without_controller_manager_nothing_is_collected(api, configmaps):
    owner = api.post(configmaps, {"metadata": {"name": "owner"}}).expect(201)
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    owned = api.post(configmaps, {"metadata": {"name": "owned", "ownerReferences": [reference]}}).expect(201)

    api.delete(f"{configmaps}/owner").expect(200)

    since = owned["metadata"]["resourceVersion"]
    told = [
        (kind, each["metadata"]["name"])
        for kind, each in api.watch(configmaps, resourceVersion=since, timeoutSeconds=1)
    ]
    if OTHER_SERVER in os.environ and ("DELETED", "owned") in told:
        pytest.skip("a controller-manager runs beside this server, and collects")
    assert told == [("DELETED", "owner")]
    api.get(f"{configmaps}/owned").expect(200)
