"""Faults of the operator's API calls: it reaches the same end state if calls fail or come late, or if it is killed."""

import asyncio
import contextlib
import json
import tracemalloc

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.net.kubernetes import client as cluster
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import ObjectList, RequestDenied
from fleet.net.kubernetes.views import Pod
from operators.manifests.objects import DIGEST
from tests.support.kube.operator import a_deployment, an_operator
from tests.support.waiting import until

KINDS = (
    ("deployments", "apps/v1"),
    ("services", "v1"),
    ("configmaps", "v1"),
    ("poddisruptionbudgets", "policy/v1"),
    ("networkpolicies", "networking.k8s.io/v1"),
    ("rolescalers", "fleet-serving.io/v1alpha1"),
)


class Killed(BaseException):
    """Raised to end an operator like a kill. It is no `Exception`, so no supervisor catches it."""


class Mortal:
    """Wraps a cluster so that the operator is killed at its second write.

    Unless `answered`, it is killed at its first write instead, after the write was done and before its answer.
    """

    def __init__(self, connected, answered):
        self._cluster = connected
        self._answered = answered
        self.writes = []

    def __getattr__(self, name):
        call = getattr(self._cluster, name)
        if name not in ("apply", "make", "patch", "delete", "create"):
            return call

        async def write(kind, *arguments):
            # A new leader always renews its Lease and records an event about it, so these writes do not count.
            if kind == kinds.LEASE or (kind == kinds.EVENT and arguments[-1]["regarding"]["kind"] == kinds.LEASE.name):
                return await call(kind, *arguments)
            if self.writes:
                raise Killed
            self.writes.append((name, kind.name))
            answer = await call(kind, *arguments)
            if not self._answered:
                raise Killed
            return answer

        return write


def end_state(asked):
    """Return the digest and the replicas of every child object."""
    return {
        (kind, name): (
            each["metadata"]["annotations"][DIGEST],
            each["spec"].get("replicas") if "spec" in each else None,
        )
        for kind, group in KINDS
        for name, each in asked.children(kind, group).items()
        if DIGEST in each["metadata"].get("annotations", {})
    }


async def test_operator_killed_at_each_write_reaches_same_state(asked):
    role = {"name": "chat", "type": "aggregated", "scaling": {"mode": "External"}}
    other = {"image": "another:2", "routing": {"policy": "round_robin"}}
    async with an_operator(asked):
        asked.apply(a_deployment(role)).expect(201)
        await until(asked.ready)
        asked.apply(a_deployment(role, **other)).expect(200)
        await until(asked.ready)
    expected, revision = end_state(asked), asked.status()["currentRevision"]
    asked.api.delete(asked.path("disaggdeployments", "dd")).expect(200)
    await until(lambda: not end_state(asked) and not asked.children("pods", "v1"))

    deaths = []
    for spec in ({}, other):
        asked.apply(a_deployment(role, **spec))
        while not await lives(asked, deaths):
            assert len(deaths) < 200

    # Owners differ in their uid, so digests differ, too.
    assert {key: replicas for key, (_, replicas) in end_state(asked).items()} == {
        key: replicas for key, (_, replicas) in expected.items()
    }
    assert asked.status()["currentRevision"] == revision
    ways = {(how, kind) for how in ("make", "apply") for kind in ("Deployment", "ConfigMap")}
    assert ways | {("create", "RoleScaler"), ("patch", "Deployment"), ("delete", "Deployment")} <= set(deaths)
    assert len(deaths) > 15


async def lives(asked, deaths):
    """Run an operator until nothing is left to do; return True if it had nothing to write.

    Otherwise the operator writes once and is killed; in every second call, before it gets the answer to its write.
    """
    mortal = []

    def wrap(connected):
        mortal.append(Mortal(connected, answered=len(deaths) % 2 == 0))
        return mortal[0]

    try:
        async with an_operator(asked, wrap=wrap) as operator:
            await until(lambda: operator.leader.leads() and operator.ready() and not operator.waiting())
            await until(lambda: asked.ready() and not operator.waiting())
    except* Killed:
        deaths += mortal[0].writes
    return not mortal[0].writes


@pytest.mark.parametrize(
    "faults",
    [
        [("status", {"verb": "patch", "code": 500, "times": 5})],
        [("status", {"verb": "patch", "code": 429, "retry_after_seconds": 1, "times": 2})],
        [("status", {"verb": "patch", "code": 409, "times": 12})],
        [("drop", {"verb": "patch", "times": 4})],
        [("cut", {"verb": "patch", "times": 4})],
        [("expire", {"verb": "watch", "times": 8, "events": 1})],
        [("cut", {"verb": "watch", "times": 8, "events": 1})],
        [("status", {"verb": "list", "code": 500, "times": 4}), ("status", {"verb": "watch", "code": 429, "times": 4})],
    ],
    ids=["500", "429", "conflicts", "lost-answers", "half-answers", "410", "cut-watches", "lists-and-watches-refused"],
)
async def test_faults_do_not_change_the_end_state(asked, faults):
    for kind, conditions in faults:
        asked.server.order_fault(kind, user="fleet-operator/first", **conditions)
    async with an_operator(asked):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        asked.apply(a_deployment(image="another:2")).expect(200)
        await until(asked.ready)

    assert asked.replicas() == {"prefill": 1, "decode": 2}
    assert all(each["struck"] for each in asked.server.faults().values())


async def test_missing_right_for_secrets_is_in_each_status(asked):
    """An operator that is upgraded without its Role changes no running pods. It goes on once it may read its Secret."""
    lacking = [True]

    class WithoutSecrets:
        def __init__(self, connected):
            self._cluster = connected

        def __getattr__(self, name):
            return getattr(self._cluster, name)

        async def get(self, kind, *arguments):
            if kind == kinds.SECRET and lacking:
                raise RequestDenied("Forbidden", 'User "operator" cannot get resource "secrets"')
            return await self._cluster.get(kind, *arguments)

    names = ("dd", "other")
    async with an_operator(asked, wrap=WithoutSecrets):
        for name in names:
            asked.apply(a_deployment({"name": "all", "type": "aggregated"}, name=name)).expect(201)
        for name in names:
            said = await until(lambda name=name: asked.condition("Degraded", name))
            assert (said["status"], said["reason"]) == ("True", "ControlSecretUnusable")
            assert f"Secret {asked.namespace}/" in said["message"]
            assert "cannot get resource" in said["message"]
            assert asked.condition("Ready", name)["status"] == "False"
        assert not asked.children(), "no pods that would trust everybody"

        lacking.clear()
        await until(lambda: all(asked.ready(name) for name in names))
    assert asked.condition("Degraded")["status"] == "False"


async def test_expired_watch_version_causes_a_new_list(asked, monkeypatch):
    monkeypatch.setattr(cluster, "WATCH_SECONDS", 1)  # then the server ends it
    async with an_operator(asked):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        asked.server.forget_requests()
        late = asked.server.order_fault("delay", verb="watch", user="fleet-operator/first", seconds=0.5, times=-1)
        await until(lambda: asked.server.faults()[str(late)]["struck"] >= 12)  # by now all watches have ended

        asked.apply(a_deployment(image="another:2")).expect(200)
        asked.server.compact()

        await until(asked.ready)
    assert [
        each for each in asked.server.requests() if each["verb"] == "list" and each["agent"] == "fleet-operator/first"
    ]


async def test_late_writes_of_a_former_leader_change_nothing(asked):
    """The server holds the write of the former leader until the next leader has written another number of replicas."""
    role = {"name": "all", "type": "aggregated", "replicas": 2}
    async with an_operator(asked, identity="second") as second:
        asked.apply(a_deployment(role)).expect(201)
        await until(asked.ready)
        name = f"dd-all-{asked.status()['currentRevision']}"
        late = asked.server.order_fault(
            "hold", user="fleet-operator/second", times=-1, resource="deployments", verb="patch", name=name
        )
        asked.apply(a_deployment(role | {"replicas": 3})).expect(200)
        await until(lambda: asked.server.faults()[str(late)]["struck"] == 1)
        held = asked.server.order_fault("hold", user="fleet-operator/second", times=-1, resource="leases")
        async with an_operator(asked, identity="first") as first:
            await until(first.leader.leads)
            asked.apply(a_deployment(role | {"replicas": 1})).expect(200)
            await until(lambda: asked.replicas() == {"all": 1})
            assert not second.leader.leads()
            asked.server.remove_fault(late)

            def code():
                """Return the status code of the former leader's last write; 0 while it has no answer."""
                sent = [
                    each
                    for each in asked.server.requests()
                    if each["agent"].endswith("second") and each["name"] == name and each["verb"] == "patch"
                ]
                return sent[-1]["code"]

            await until(code)
            assert code() == 422
            assert asked.replicas() == {"all": 1}
            asked.server.remove_fault(held)
            await until(asked.ready)


class Deaf:
    """Wraps a cluster whose lists and watches of some kinds are empty, so the operator has to read single objects."""

    def __init__(self, connected, of):
        self._cluster = connected
        self._of = of

    def __getattr__(self, name):
        return getattr(self._cluster, name)

    async def list(self, kind, *arguments):
        return ObjectList((), "1") if kind in self._of else await self._cluster.list(kind, *arguments)

    async def watch(self, kind, *arguments):
        if kind in self._of:
            await asyncio.Event().wait()
        async with contextlib.aclosing(self._cluster.watch(kind, *arguments)) as events:
            async for each in events:
                yield each


def deaf_to(*of):
    return lambda connected: Deaf(connected, of)


async def test_unknown_scaler_keeps_its_value_and_counts(asked):
    role = {"name": "all", "type": "aggregated", "replicas": 2, "scaling": {"mode": "External"}}
    theirs = {"metadata": {"name": "dd-all"}, "spec": {"target": {"deployment": "dd", "role": "all"}, "replicas": 5}}
    made = asked.api.post(asked.path("rolescalers"), theirs).expect(201)
    async with an_operator(asked, wrap=deaf_to(kinds.ROLE_SCALER)):
        asked.apply(a_deployment(role)).expect(201)
        await until(lambda: asked.replicas() == {"all": 5})

    found = asked.api.get(asked.path("rolescalers", "dd-all")).expect(200)
    assert (found["spec"], found["metadata"]["generation"]) == (made["spec"], made["metadata"]["generation"])
    assert "ownerReferences" not in found["metadata"]


THEIRS = {
    ("services", "v1"): {"ports": [{"port": 1}], "selector": {"theirs": "yes"}},
    ("configmaps", "v1"): {},
    ("deployments", "apps/v1"): {
        "replicas": 0,
        "selector": {"matchLabels": {"theirs": "yes"}},
        "template": {
            "metadata": {"labels": {"theirs": "yes"}},
            "spec": {"containers": [{"name": "main", "image": "theirs:1"}]},
        },
    },
    ("poddisruptionbudgets", "policy/v1"): {"maxUnavailable": 1, "selector": {"matchLabels": {"theirs": "yes"}}},
    ("networkpolicies", "networking.k8s.io/v1"): {"podSelector": {"matchLabels": {"theirs": "yes"}}},
}


async def test_unknown_foreign_objects_are_left_and_reported(asked):
    def versions():
        return {kind: asked.children(kind, group)["dd-router"]["metadata"] for kind, group in THEIRS}

    for (kind, group), spec in THEIRS.items():
        item = {"metadata": {"name": "dd-router"}} | ({"spec": spec} if spec else {"data": {"theirs": "yes"}})
        asked.api.post(asked.path(kind, "", group), item).expect(201)
    before = versions()
    async with an_operator(asked, wrap=deaf_to(*kinds.SUPPORTING_KINDS, kinds.DEPLOYMENT)) as operator:
        asked.apply(a_deployment({"name": "all", "type": "aggregated"})).expect(201)
        named = await until(
            lambda: (said := asked.condition("Degraded").get("message", "")).count("dd-router") == len(THEIRS) and said
        )
        await until(lambda: not operator.waiting())

    kinds_named = "ConfigMap dd-router, Deployment dd-router, NetworkPolicy dd-router, PodDisruptionBudget dd-router"
    assert named == f"not made by this deployment: {kinds_named}, Service dd-router"
    assert (asked.condition("Ready")["status"], asked.condition("Ready")["reason"]) == ("False", "NameTaken")
    assert versions() == before
    assert "dd-all" in asked.children("services", "v1"), "what has a free name is made all the same"


async def test_created_but_unseen_object_is_not_written_twice(asked):
    """The previous operator has created the object, or the answer to the creation was lost."""

    def versions():
        return {
            (kind, name): each["metadata"]["resourceVersion"]
            for kind, group in THEIRS
            if kind != "deployments"  # these kinds have a status, too
            for name, each in asked.children(kind, group).items()
        }

    role = {"name": "all", "type": "aggregated"}
    async with an_operator(asked):
        asked.apply(a_deployment(role)).expect(201)
        await until(asked.ready)
    before = versions()
    async with an_operator(asked, wrap=deaf_to(*kinds.SUPPORTING_KINDS)) as operator:
        await until(lambda: operator.leader.leads() and operator.ready() and not operator.waiting())
        await until(lambda: asked.ready() and not operator.waiting())

    assert versions() == before


async def test_field_missing_in_a_later_manifest_is_removed(asked):
    def router(*env):
        main = {"name": "main", "env": [{"name": name, "value": "yes"} for name in env]}
        return {"name": "router", "type": "router", "podTemplate": {"spec": {"containers": [main]}}}

    def names():
        [main] = asked.children()["dd-router"]["spec"]["template"]["spec"]["containers"]
        return {each["name"] for each in main["env"]} - {"POD_NAME", "POD_IP"}

    role = {"name": "all", "type": "aggregated"}
    async with an_operator(asked):
        asked.apply(a_deployment(role, router("ONE", "TWO"))).expect(201)
        await until(asked.ready)
        assert names() == {"ONE", "TWO"}

        asked.apply(a_deployment(role, router("TWO"))).expect(200)
        await until(lambda: names() == {"TWO"})

    for kind, group in THEIRS:
        managers = {
            (each["manager"], each["operation"])
            for each in asked.children(kind, group)["dd-router"]["metadata"]["managedFields"]
            if each["manager"].startswith("fleet")
        }
        assert managers == {("fleet-operator", "Apply")}, kind


async def test_ten_megabytes_of_events_take_no_memory(asked, nodes):
    """Pods and Leases are written again without a change, as kubelets and workers do all the time."""
    async with an_operator(asked) as operator:
        asked.apply(a_deployment()).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        asked.server.forget_requests()
        await murmur(nodes, 5)
        tracemalloc.start()
        before = tracemalloc.take_snapshot()
        await murmur(nodes, 100)
        told = {
            each["metadata"]["name"]: each["metadata"]["resourceVersion"]
            for each in asked.children("pods", "v1").values()
        }
        await until(
            lambda: (
                told
                == {each.metadata.name: each.metadata.resource_version for each in operator.store.of(kinds.POD, Pod)}
            )
        )
        filters = [tracemalloc.Filter(True, "*/operators/*")]
        grown = tracemalloc.take_snapshot().filter_traces(filters).compare_to(before.filter_traces(filters), "filename")
        tracemalloc.stop()

        assert asked.writes() == []
    assert sum(each.size_diff for each in grown) < 1_000_000, json.dumps([str(each) for each in grown[:5]])


async def murmur(nodes, count):
    nodes.noise = count
    await until(lambda: nodes.noise == 0)


async def test_reconcile_continues_after_the_lease_is_renewed(asked, monkeypatch):
    leads = [True]

    class Lapsing:
        """Wraps a cluster in which the Lease expires at the third write, and is renewed 0.2 s later."""

        def __init__(self, connected):
            self._cluster = connected
            self.writes = 0

        def __getattr__(self, name):
            return getattr(self._cluster, name)

        async def make(self, *arguments):
            self.writes += 1
            if self.writes == 3:
                leads[0] = False
                asyncio.get_running_loop().call_later(0.2, leads.__setitem__, 0, True)
            return await self._cluster.make(*arguments)

    async with an_operator(asked, wrap=Lapsing) as operator:
        await until(operator.leader.leads)
        lasts = operator.leader.election.leads
        monkeypatch.setattr(operator.leader, "tell", lambda: None)
        monkeypatch.setattr(operator.leader.election, "leads", lambda now: leads[0] and lasts(now))
        asked.apply(a_deployment()).expect(201)
        await until(lambda: not leads[0])
        # The operator's own secret is older than this reconciliation.
        of_the_look = [write for write in asked.writes() if write[1] != "secrets"]
        assert len(of_the_look) <= 3

        await until(asked.ready)
