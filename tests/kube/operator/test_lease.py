"""Leader Lease of the operators: its owner, wrong clocks, and deployments that serve without an operator."""

import time
from datetime import timedelta

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.core.system_clock import utc_now
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import RequestDenied
from operators.controller import loop as looking
from operators.manifests.names import INSTANCE, REVISION, ROLE
from operators.observed import registrations
from operators.observed.registrations import REGISTRATION, WORKER
from tests.support.kube.clients import inhabitants
from tests.support.kube.operator import QUICK, a_deployment, an_operator
from tests.support.waiting import until

OWNER = "fleet-operator"


def lease(asked):
    return asked.api.get(asked.path("leases", "fleet-operator", "coordination.k8s.io/v1"))


@pytest.fixture
def owner(asked):
    """Create the operator's own Deployment, which has no pods here, and return it."""
    labels = {"app.kubernetes.io/component": "operator"}
    spec = {
        "replicas": 0,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "operator:1"}]}},
    }
    return asked.api.post(asked.path("deployments", "", "apps/v1"), {"metadata": {"name": OWNER}, "spec": spec}).expect(
        201
    )


async def test_lease_is_removed_with_the_operators_deployment(asked, owner):
    async with an_operator(asked, owner=OWNER) as operator:
        await until(operator.leader.leads)
        [reference] = lease(asked).expect(200)["metadata"]["ownerReferences"]
        assert (reference["kind"], reference["uid"]) == ("Deployment", owner["metadata"]["uid"])

        asked.api.delete(asked.path("deployments", OWNER, "apps/v1"), propagationPolicy="Background").expect(200)

        await until(lambda: lease(asked).code == 404)
        await until(lambda: not operator.leader.leads())
        looks = len(owner_reads(asked))
        await until(lambda: len(owner_reads(asked)) >= looks + 3)  # it reads its Deployment, and makes nothing
        assert lease(asked).code == 404
    assert lease(asked).code == 404


def owner_reads(asked):
    return [
        each
        for each in asked.server.requests()
        if (each["verb"], each["resource"], each["namespace"]) == ("get", "deployments", asked.namespace)
        and each["agent"].startswith("fleet-operator")
    ]


async def test_older_operators_lease_gets_the_owner(asked, owner):
    async with an_operator(asked) as older:
        await until(older.leader.leads)
        assert "ownerReferences" not in lease(asked).expect(200)["metadata"]

    async with an_operator(asked, owner=OWNER) as operator:
        await until(operator.leader.leads)
        renewed = lease(asked).expect(200)["spec"]["renewTime"]
        await until(lambda: lease(asked).expect(200)["spec"]["renewTime"] != renewed)

        assert [each["uid"] for each in lease(asked).expect(200)["metadata"]["ownerReferences"]] == [
            owner["metadata"]["uid"]
        ]


class Forbidding:
    """Wraps a cluster that does not allow the operator to read Deployments."""

    def __init__(self, connected):
        self._cluster = connected

    def __getattr__(self, name):
        return getattr(self._cluster, name)

    async def get(self, kind, *arguments):
        if kind == kinds.DEPLOYMENT:
            raise RequestDenied("Forbidden", 'User "operator" cannot get resource "deployments"')
        return await self._cluster.get(kind, *arguments)


async def test_missing_right_to_read_owner_stops_nobody(asked, owner, caplog):
    async with an_operator(asked, owner=OWNER, wrap=Forbidding) as operator:
        await until(operator.leader.leads)
        renewed = lease(asked).expect(200)["spec"]["renewTime"]
        await until(lambda: lease(asked).expect(200)["spec"]["renewTime"] != renewed)

    assert caplog.messages.count("lease has no owner and will stay") == 1


@pytest.mark.parametrize("hours", [-1, 1], ids=["behind", "ahead"])
async def test_wrong_clock_does_not_affect_the_election(asked, hours):
    """The leader, which writes `renewTime`, has a wrong clock; the candidate that reads it has the right one."""

    def off():
        return utc_now() + timedelta(hours=hours)

    async with an_operator(asked, identity="second", wall=off) as leading:
        await until(leading.leader.leads)
        async with an_operator(asked, identity="first") as waiting:
            renewals, over = set(), time.monotonic() + QUICK["duration_seconds"] * 1.1

            def renewed():
                renewals.add(lease(asked).expect(200)["spec"]["renewTime"])
                return len(renewals) >= 15 and time.monotonic() > over

            await until(renewed)
            assert leading.leader.leads()
            assert not waiting.leader.leads()

            fault = asked.server.order_fault("hold", user="fleet-operator/second", resource="leases", times=-1)
            await until(waiting.leader.leads)
            assert not leading.leader.leads()
            asked.server.remove_fault(fault)


def a_workers_lease(asked, pod, hours):
    """Return a Lease of one second, of a worker whose clock is wrong by this time."""
    labels = {key: pod["metadata"]["labels"][key] for key in (INSTANCE, ROLE, REVISION)} | {REGISTRATION: WORKER}
    renewed = (utc_now() + timedelta(hours=hours)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    spec = {"holderIdentity": pod["metadata"]["name"], "leaseDurationSeconds": 1, "renewTime": renewed}
    return {"metadata": {"name": "its-own", "labels": labels}, "spec": spec}


@pytest.mark.parametrize("hours", [-1, 1], ids=["behind", "ahead"])
async def test_workers_wrong_clock_does_not_affect_registration(asked, nodes, monkeypatch, hours):
    for module in (registrations, looking):
        monkeypatch.setattr(module, "SKEW_SECONDS", 0)
    nodes.registers = False
    leases = asked.path("leases", "", "coordination.k8s.io/v1")

    def renew():
        patch = {"spec": a_workers_lease(asked, pod, hours)["spec"]}
        asked.api.patch(f"{leases}/its-own", "merge", patch).expect(200)
        return asked.ready()

    async with an_operator(asked):
        asked.apply(a_deployment({"name": "all", "type": "aggregated"})).expect(201)
        await until(lambda: asked.condition("Ready").get("reason") == "RegistrationUnknown" and asked.workers())
        pod = next(each for name, each in asked.children("pods", "v1").items() if "-all-" in name)
        asked.api.post(leases, a_workers_lease(asked, pod, hours)).expect(201)

        await until(renew)
        await until(lambda: asked.condition("Ready")["reason"] == "NotRegistered")  # nobody renews it
    async with an_operator(asked) as later:
        await until(lambda: later.leader.leads() and later.ready() and not later.waiting())
        await until(lambda: asked.condition("Ready")["reason"] == "NotRegistered")
        await until(renew)


def left(asked):
    return inhabitants(asked.api, asked.namespace)


async def test_deployments_leave_nothing_before_or_after_the_operator(asked, owner):
    external = {"name": "all", "type": "aggregated", "scaling": {"mode": "External"}}
    async with an_operator(asked, owner=OWNER):
        for name in ("early", "late"):
            asked.apply(a_deployment(external, name=name)).expect(201)
        await until(lambda: asked.ready("early") and asked.ready("late"))
        asked.api.delete(asked.path("disaggdeployments", "early")).expect(200)
        await until(lambda: not [each for each in left(asked) if "/early" in each])
        kept = {each.partition("/")[0] for each in left(asked) if "/late" in each}
        assert kept >= {"pods", "deployments", "services", "configmaps", "rolescalers", "leases", "networkpolicies"}
    asked.api.delete(asked.path("deployments", OWNER, "apps/v1"), propagationPolicy="Background").expect(200)
    await until(lambda: lease(asked).code == 404)
    assert asked.children("pods", "v1")  # serving continues

    asked.api.delete(asked.path("disaggdeployments", "late")).expect(200)  # and no operator of ours runs

    await until(lambda: not left(asked))
