"""Drift: the operator restores child objects that others edit, orphan or delete, and records an event."""

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from tests.support.kube.operator import a_deployment, an_operator
from tests.support.waiting import until

ROLE = {"name": "all", "type": "aggregated"}
EXTERNAL = ROLE | {"replicas": 2, "scaling": {"mode": "External", "most": 9}}


def events(asked, reason):
    return [each["note"] for each in asked.children("events", "events.k8s.io/v1").values() if each["reason"] == reason]


def set_image(asked, name, image):
    """Change an image as `kubectl set image` does: by a strategic merge patch of another field manager."""
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": image}]}}}}
    path = asked.path("deployments", name, "apps/v1")
    return asked.api.patch(path, "strategic", patch, fieldManager="kubectl-set").expect(200)


def image(asked, name):
    [main] = asked.children()[name]["spec"]["template"]["spec"]["containers"]
    return main["image"]


def child_of(asked, role="all"):
    [name] = [name for name in asked.children() if f"-{role}-" in name]
    return name


@pytest.mark.parametrize("role", ["all", "router"])
async def test_edited_image_is_put_back_at_once_with_an_event(asked, role):
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(asked.ready)
        name = child_of(asked) if role == "all" else "dd-router"
        ours = image(asked, name)

        for theirs in ("theirs:1", "theirs:2"):
            set_image(asked, name, theirs)
            await until(lambda: image(asked, name) == ours)
        await until(lambda: asked.ready() and not operator.waiting())

    [told] = events(asked, "DriftReverted")
    assert told.startswith(f"Deployment {name} was edited by kubectl-set, and is set back")


async def test_edits_of_other_kinds_are_put_back(asked):
    async with an_operator(asked):
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(asked.ready)
        before = asked.children("services", "v1")["dd-router"]["spec"]["selector"]
        settings = asked.children("configmaps", "v1")["dd-router"]["data"]

        selector = {"spec": {"selector": {"fleet-serving.io/role": "theirs"}}}
        asked.api.patch(asked.path("services", "dd-router", "v1"), "merge", selector).expect(200)
        await until(lambda: asked.children("services", "v1")["dd-router"]["spec"]["selector"] == before)
        data = {"data": {"settings.json": "{}"}}
        asked.api.patch(asked.path("configmaps", "dd-router", "v1"), "merge", data).expect(200)
        await until(lambda: asked.children("configmaps", "v1")["dd-router"]["data"] == settings)


async def test_removed_field_is_put_back(asked):
    async with an_operator(asked):
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(asked.ready)
        name = child_of(asked)
        removal = [{"op": "remove", "path": "/spec/template/spec/containers/0/livenessProbe"}]

        asked.api.patch(asked.path("deployments", name, "apps/v1"), "json", removal).expect(200)

        def restored():
            return "livenessProbe" in asked.children()[name]["spec"]["template"]["spec"]["containers"][0]

        await until(restored)
        await until(lambda: events(asked, "DriftReverted"))


async def test_added_field_is_applied_against_once(asked):
    """A field that the operator does not set stays, and the operator does not write again and again because of it."""
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        asked.server.forget_requests()
        added = {"spec": {"template": {"metadata": {"annotations": {"restarted": "today"}}}}}
        asked.api.patch(asked.path("deployments", child_of(asked), "apps/v1"), "merge", added).expect(200)

        def applies():
            return [each for each in asked.writes() if each[1] == "deployments"]

        await until(applies)
        await until(lambda: asked.ready() and not operator.waiting())
        operator.enqueue_all()
        await until(lambda: asked.ready() and not operator.waiting())

    assert len(applies()) == 1
    assert events(asked, "DriftReverted") == []


async def test_edit_while_no_operator_runs_is_put_back(asked):
    async with an_operator(asked):
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(asked.ready)
        ours = image(asked, "dd-router")
    set_image(asked, "dd-router", "theirs:1")

    async with an_operator(asked, identity="second"):
        await until(lambda: image(asked, "dd-router") == ours)
        await until(asked.ready)


async def test_orphans_with_our_labels_are_adopted(asked):
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(ROLE | {"replicas": 2})).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        pods = asked.workers()
    path = asked.path("disaggdeployments", "dd")
    asked.api.delete(path, propagationPolicy="Orphan").expect(200)
    await until(lambda: asked.api.get(path).code == 404)
    assert not asked.children()["dd-router"]["metadata"].get("ownerReferences")

    async with an_operator(asked, identity="second"):
        made = asked.apply(a_deployment(ROLE | {"replicas": 2})).expect(201)
        await until(asked.ready)

        def owners():
            return {
                owner["uid"]
                for kind, group in (("deployments", "apps/v1"), ("services", "v1"), ("configmaps", "v1"))
                for each in asked.children(kind, group).values()
                for owner in each["metadata"].get("ownerReferences") or [{"uid": "nobody"}]
            }

        await until(lambda: owners() == {made["metadata"]["uid"]})
    assert asked.workers() == pods, "they serve on"


async def test_copies_of_our_objects_are_left_alone(asked):
    """A copy under another name has Fleet's labels and no owner, but the operator did not make it."""
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        copies = {}
        for kind, group, name in (("services", "v1", "dd-router"), ("deployments", "apps/v1", child_of(asked))):
            theirs = asked.children(kind, group)[name]
            metadata = {"name": "theirs", "labels": theirs["metadata"]["labels"]}
            spec = {key: value for key, value in theirs["spec"].items() if not key.startswith("clusterIP")}
            spec |= {"replicas": 0} if kind == "deployments" else {}
            made = asked.api.post(asked.path(kind, "", group), {"metadata": metadata, "spec": spec}).expect(201)
            copies[kind, group] = made["metadata"]["uid"]

        asked.apply(a_deployment(ROLE, image="another:2")).expect(200)
        await until(lambda: asked.ready() and not operator.waiting())

    for (kind, group), uid in copies.items():
        assert asked.children(kind, group)["theirs"]["metadata"]["uid"] == uid
    assert asked.children()["theirs"]["metadata"]["generation"] == 1


async def test_deleted_scaler_keeps_the_size_of_its_pool(asked):
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(EXTERNAL)).expect(201)
        await until(asked.ready)
        scale = {"spec": {"replicas": 4}}
        asked.api.patch(asked.path("rolescalers", "dd-all/scale"), "merge", scale).expect(200)
        await until(lambda: asked.ready() and asked.replicas() == {"all": 4})
        first = asked.api.get(asked.path("rolescalers", "dd-all")).expect(200)["metadata"]["uid"]
        asked.server.forget_requests()

        asked.api.delete(asked.path("rolescalers", "dd-all")).expect(200)

        def again():
            found = asked.api.get(asked.path("rolescalers", "dd-all"))
            return found.code == 200 and found.body["metadata"]["uid"] != first and found.body

        made = await until(again)
        assert made["spec"]["replicas"] == 4
        await until(lambda: asked.ready() and not operator.waiting())
        assert not [each for each in asked.writes() if each[1] == "deployments"], "no pod was added or removed"


async def test_editing_replicas_of_an_external_role_warns(asked):
    async with an_operator(asked):
        asked.apply(a_deployment(EXTERNAL)).expect(201)
        await until(asked.ready)

        asked.apply(a_deployment(EXTERNAL | {"replicas": 5})).expect(200)

        [note] = await until(lambda: events(asked, "ReplicasIgnored"))
        assert "use kubectl scale rolescaler dd-all --replicas=5" in note
        assert asked.replicas() == {"all": 2}
