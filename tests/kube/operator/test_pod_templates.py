"""Mistakes in pod templates, and pods that the server refuses: the status names the cause, old pods keep serving."""

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.net.kubernetes.ports import RequestDenied
from fleet.net.kubernetes.status_errors import BAD_QUANTITY, BAD_VALUE
from operators.controller.reconcile import Apply
from operators.controller.refusals import refusal
from tests.support.kube import published_schemas
from tests.support.kube.operator import a_deployment, an_operator
from tests.support.waiting import until

MAIN = 'spec.template.spec.containers[name="main"]'


def a_role(**main):
    template = {"spec": {"containers": [{"name": "main", **main}]}}
    return {"name": "all", "type": "aggregated", "podTemplate": template}


MISTAKES = {
    "unknown-field": ({"prot": 1}, f"{MAIN}.prot: field not declared in schema"),
    "number-in-env": (
        {"env": [{"name": "A", "value": 4711}]},
        f'{MAIN}.env[name="A"].value: expected string',
    ),
    "quoted-port": (
        {"ports": [{"containerPort": "4711"}]},
        f'{MAIN}.ports[containerPort=...,protocol="TCP"].containerPort: expected numeric',
    ),
    "duplicate-env": (
        {"env": [{"name": "A", "value": "4711"}, {"name": "A", "value": "4711"}]},
        f'{MAIN}.env: duplicate entries for key [name="A"]',
    ),
    "bad-quantity": (
        {"resources": {"requests": {"memory": "4711 GB"}}},
        f"{MAIN}.resources.requests.memory: a quantity must be a number",
    ),
    "fraction": (
        {"ports": [{"name": "more", "containerPort": 4711.5}]},
        f'{MAIN}.ports[name="more"].containerPort: must be a whole number',
    ),
    "truth-as-quantity": (
        {"resources": {"limits": {"memory": True}}},
        f"{MAIN}.resources.limits.memory: a quantity must be a number",
    ),
    "truth-as-port": (
        {"readinessProbe": {"grpc": None, "httpGet": {"port": True}}},
        f"{MAIN}.readinessProbe.httpGet.port: must be a whole number or the name of a port",
    ),
}


@pytest.mark.parametrize(("main", "words"), MISTAKES.values(), ids=MISTAKES)
async def test_template_mistake_is_reported_and_can_be_corrected(asked, main, words):
    async with an_operator(asked):
        asked.apply(a_deployment(a_role())).expect(201)
        await until(asked.ready)
        before = asked.workers()

        asked.apply(a_deployment(a_role(**main))).expect(200)
        said = await until(lambda: (each := asked.condition("Degraded")).get("status") == "True" and each)

        assert (said["reason"], said["observedGeneration"]) == ("Invalid", 2)
        assert words in said["message"]
        assert "4711" not in said["message"]
        assert asked.condition("Ready")["status"] == "False"
        assert asked.status()["observedGeneration"] == 2
        assert asked.workers() == before, "old pods serve on"

        asked.apply(a_deployment(a_role())).expect(200)
        await until(asked.ready)
        assert asked.workers() == before
    warnings = [
        each["note"]
        for each in asked.children("events", "events.k8s.io/v1").values()
        if each["type"] == "Warning" and each["reason"] == "Invalid"
    ]
    assert any(words in each for each in warnings)


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.37"])
def test_refusal_without_a_field_names_each_field_it_may_mean(version):
    fields = published_schemas.untyped_fields("io.k8s.api.core.v1.PodTemplateSpec", version)
    assert len(fields) > 40
    for field, kind in fields.items():
        for value in MISTYPED[kind]:
            spec = {"template": _with(field, value)}
            told = BAD_QUANTITY if kind == "Quantity" else BAD_VALUE
            manifest = {"kind": "Deployment", "metadata": {"name": "dd"}, "spec": spec}
            said = refusal(Apply(manifest), RequestDenied("Invalid", told))
            assert said.message.startswith(f"{_path(field)}: "), (field, value)


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.37"])
def test_refusal_blames_only_fields_that_are_times(version):
    fields = published_schemas.untyped_fields("io.k8s.api.core.v1.PodTemplateSpec", version)
    times = {"time": "day", "creationTimestamp": "night", "x.metadata.deletionTimestamp": "noon"}
    pod = {"nodeSelector": times, "terminationGracePeriodSeconds": 1.5}
    template = {"metadata": {"labels": times, "annotations": times}, "spec": pod}

    assert any(kind == "Time" for kind in fields.values())
    assert _said({"template": template}) == "spec.template.spec.terminationGracePeriodSeconds: must be a whole number"
    for field, kind in fields.items():
        for value in (*TAKEN_TIMES, *OTHER_TIMES) if kind == "Time" else ():
            told = f"{_path(field)}: must be a time such as 2026-01-31T12:00:00Z"
            assert _said({"template": _with(field, value)}) == (told if value in OTHER_TIMES else BAD_VALUE), value


def _said(spec):
    """Return the message about a Deployment of which the API server names no field."""
    manifest = {"kind": "Deployment", "metadata": {"name": "dd"}, "spec": spec}
    return refusal(Apply(manifest), RequestDenied("Invalid", BAD_VALUE)).message


TAKEN_TIMES = (
    None,
    "2026-01-31T12:00:00Z",
    "2026-01-31T12:00:00.123456789Z",
    "2026-01-31T12:00:00,5+01:00",
    "2026-01-31T12:00:00-23:59",
)
"""Times that Go parses as RFC 3339."""

OTHER_TIMES = (
    "20260131T120000Z",
    "2026-01-31 12:00:00+00:00",
    "2026-01-31T12:00:00",
    "2026-01-31T12:00:00+0100",
    "2026-01-31T12:00Z",
    "2026-02-30T12:00:00Z",
    "2026-01-31T24:00:00Z",
    "2026-W05-6T12:00:00Z",
)
"""Times that Go does not parse as RFC 3339; most are other forms of ISO 8601."""

MISTYPED = {"Quantity": (True, "4 GB", {}), "IntOrString": (True, [], {}), "Time": (True, "yesterday", 5)}


def _with(field, value):
    """Return an object with this value at the path of a field of `untyped_fields`."""
    for place, name in reversed(list(enumerate(field))):
        ends = place == len(field) - 1
        value = {"key" if name == "*" else name: value} if name != "*" or ends else [value]
    return value


def _path(field):
    *before, last = field
    inner = "".join("[0]" if name == "*" else f".{name}" for name in before)
    return f"spec.template{inner}.{'key' if last == '*' else last}"


async def test_mistake_in_the_routers_template_is_reported(asked):
    router = {"name": "router", "type": "router"}
    async with an_operator(asked):
        asked.apply(a_deployment({"name": "all", "type": "aggregated"}, router)).expect(201)
        await until(asked.ready)
        faulty = router | {"podTemplate": {"spec": {"containers": [{"name": "main", "imagePullPolcy": "Always"}]}}}
        asked.apply(a_deployment({"name": "all", "type": "aggregated"}, faulty)).expect(200)

        said = await until(lambda: (each := asked.condition("Degraded")).get("status") == "True" and each)

        assert f"Deployment dd-router: {MAIN}.imagePullPolcy: field not declared in schema" in said["message"]


async def test_limit_range_denial_is_in_the_condition(asked, nodes):
    nodes.denial = "[maximum cpu usage per Container is 2, but limit is 4]"
    async with an_operator(asked):
        asked.apply(a_deployment(a_role())).expect(201)

        said = await until(lambda: (each := asked.condition("Scheduled")).get("reason") == "PodsRefused" and each)

        assert "maximum cpu usage per Container is 2, but limit is 4" in said["message"]
        nodes.denial = ""
        await until(asked.ready)


async def test_policy_denial_is_in_the_condition(asked):
    words = "ValidatingAdmissionPolicy 'team' with binding 'all' denied request: a Deployment needs the label team"
    fault = asked.server.order_fault(
        "deny", verb="patch", resource="deployments", namespace=asked.namespace, message=words, times=-1
    )
    async with an_operator(asked):
        asked.apply(a_deployment(a_role())).expect(201)

        said = await until(lambda: (each := asked.condition("Degraded")).get("reason") == "Invalid" and each)

        assert words in said["message"]
        asked.server.remove_fault(fault)
        await until(asked.ready)


async def test_deployment_becomes_ready_under_a_quota_of_requests(asked, nodes):
    nodes.requires_requests = True
    side = {"name": "side", "image": "side:1"}
    greedy = {"name": "all", "type": "aggregated", "podTemplate": {"spec": {"containers": [side]}}}
    async with an_operator(asked):
        asked.apply(a_deployment(greedy)).expect(201)
        said = await until(lambda: (each := asked.condition("Scheduled")).get("reason") == "PodsRefused" and each)
        assert "failed quota: compute: must specify cpu for: side" in said["message"]

        asked.apply(a_deployment(a_role(), kvTransfer={"paths": ["store"], "storeMemory": "64Gi"})).expect(200)
        await until(asked.ready)

    pods = {name: each["spec"]["containers"][0] for name, each in asked.children("pods", "v1").items()}
    requests = {
        "router" if "router" in name else "worker": each["resources"]["requests"] for name, each in pods.items()
    }
    assert requests == {"router": {"cpu": "500m", "memory": "512Mi"}, "worker": {"cpu": "250m", "memory": "66048Mi"}}
