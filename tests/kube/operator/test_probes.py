"""Probes: replicas are ready only after they have answered a request; when, how often and to which pods one is sent."""

import asyncio

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.core.clock import SECOND, Nanos
from operators.manifests.names import CONTROL
from operators.observed.registrations import WorkerRegistration
from operators.probes.evidence import ProbeCompletion, ProbeFailure
from operators.settings import ProbeSettings
from operators.status import rate_limiter as pace
from tests.support.kube.nodes import address
from tests.support.kube.operator import a_deployment, an_operator
from tests.support.waiting import until

DOWN = ProbeFailure(500, "internal: the engine has failed")
FULL = ProbeFailure(429, "queue_full", busy=True)


class Clients:
    """Answers probes by `said`, which has an answer for each deployment; for None, it waits until `release` is set."""

    def __init__(self):
        self.said = {}
        self.release = asyncio.Event()
        self.asked = []
        self.at_once = 0
        self.most_at_once = 0

    async def ask(self, probe):
        self.asked.append(probe)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if (said := self.said.get(probe.deployment, ProbeCompletion(True))) is None:
                await self.release.wait()
                return ProbeCompletion(True)
            return said
        finally:
            self.at_once -= 1

    def workers(self):
        return [each.worker for each in self.asked]


def decoding(asked):
    return [name for name in asked.workers() if "-decode-" in name]


async def test_deployment_is_ready_after_all_probes_answered(asked):
    clients = Clients()
    clients.said["dd"] = None
    async with an_operator(asked, clients=clients) as operator:
        asked.apply(a_deployment()).expect(201)
        await until(lambda: clients.asked and not operator.waiting())
        assert not asked.ready()
        clients.release.set()
        await until(asked.ready)

        assert sorted(clients.workers()) == decoding(asked)
        assert {(each.namespace, each.service, each.model, each.pair) for each in clients.asked} == {
            (asked.namespace, "dd-router", "m", True)
        }
        assert asked.condition("KVPathReady")["status"] == "True"
        for _ in range(3):
            operator.enqueue_all(afresh=True)
            await until(lambda: not operator.waiting())
        assert len(clients.asked) == 2

    again = Clients()
    asked.server.forget_requests()
    async with an_operator(asked, clients=again) as operator:
        await until(lambda: operator.leader.leads() and operator.ready() and not operator.waiting())
        assert asked.ready()
    assert again.asked == [], "what was shown stands in the status"
    assert asked.writes() == []


async def test_deployment_with_failing_engine_is_not_ready(asked):
    clients = Clients()
    clients.said["dd"] = DOWN
    async with an_operator(asked, clients=clients, probe=ProbeSettings(longest_pause_seconds=0.6)) as operator:
        asked.apply(a_deployment()).expect(201)
        found = await until(lambda: (each := asked.condition("Ready")).get("reason") == "ServedProbeFailed" and each)
        assert found["status"] == "False"
        assert found["message"] == f"{clients.workers()[0]}: 500 internal: the engine has failed"
        assert found["observedGeneration"] == 1
        sent = len(clients.asked)
        await until(lambda: len(clients.asked) > sent + 1)
        assert not asked.ready()
        assert not operator.waiting(), "nobody waits for it"

        clients.said.clear()
        await until(asked.ready)

    events = asked.children("events", "events.k8s.io/v1").values()
    assert [each["note"] for each in events if each["reason"] == "ServedProbeFailed"] == [
        f"Ready is False: {found['message']}"
    ]


async def test_probes_use_tls_once_routers_with_tls_are_ready(asked):
    clients = Clients()
    async with an_operator(asked, clients=clients):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        assert {each.tls for each in clients.asked} == {False}
        clients.asked.clear()

        asked.apply(a_deployment(routing={"tlsSecret": "tls"})).expect(200)
        await until(lambda: asked.status()["observedGeneration"] == 2 and asked.ready())
        assert {each.tls for each in clients.asked} == {True}


async def test_routers_that_demand_a_key_leave_ready_unknown(asked):
    clients = Clients()
    clients.said["dd"] = ProbeFailure(401, "its routers want an API key", wants_key=True)
    async with an_operator(asked, clients=clients):
        asked.apply(a_deployment()).expect(201)
        found = await until(lambda: (each := asked.condition("Ready")).get("reason") == "ServedProbeNeedsKey" and each)
    assert found["status"] == "Unknown"
    assert f"for {asked.namespace}/dd: probe.keys" in found["message"]


async def test_saturated_deployment_stays_ready_over_changes(asked):
    clients, quick = Clients(), ProbeSettings(longest_pause_seconds=0.2)

    def saturated():
        found = asked.condition("Ready")
        return asked.ready() and found["reason"] == "Saturated" and "429 queue_full" in found["message"]

    async with an_operator(asked, clients=clients, probe=quick):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        clients.said["dd"] = FULL
        asked.apply(a_deployment(routing={"policy": "round_robin"})).expect(200)
        await until(saturated)
        [router] = [name for name in asked.children("pods", "v1") if "-router-" in name]
        assert clients.asked[-1].router_address == address(router)

    again = Clients()
    again.said["dd"] = FULL
    asked.server.forget_requests()
    async with an_operator(asked, clients=again, probe=quick) as operator:
        await until(lambda: len(again.asked) >= 3 and not operator.waiting())
        assert saturated()
        assert asked.writes() == [], "and says so without a word in between"
        again.said.clear()
        await until(lambda: asked.ready() and asked.condition("Ready")["reason"] == "AllRolesReady")


async def test_only_new_pods_are_probed(asked):
    clients = Clients()
    roles = ({"name": "prefill", "type": "prefill"}, {"name": "decode", "type": "decode", "replicas": 2})
    async with an_operator(asked, clients=clients):
        asked.apply(a_deployment(*roles)).expect(201)
        await until(asked.ready)
        before = set(clients.workers())

        clients.asked.clear()
        asked.apply(a_deployment(roles[0], roles[1] | {"replicas": 3})).expect(200)
        await until(asked.ready)
        assert clients.workers() == [name for name in decoding(asked) if name not in before]

        clients.asked.clear()
        asked.apply(a_deployment(roles[0], roles[1] | {"replicas": 3}, routing={"policy": "round_robin"})).expect(200)
        await until(asked.ready)
        assert len(clients.asked) == 1, "there are other routers: one worker of the role says whether these serve"


async def test_recreated_stateful_pods_are_probed_again(asked):
    clients = Clients()
    wide = {"name": "wide", "type": "aggregated", "nodesPerReplica": 2}
    wide |= {"gpus": {"perReplica": 2}, "parallelism": {"tensor": 2}}

    def pods():
        found = asked.children("pods", "v1").items()
        return {name: pod["metadata"]["uid"] for name, pod in found if "-wide-" in name}

    async with an_operator(asked, clients=clients):
        asked.apply(a_deployment(wide)).expect(201)
        await until(asked.ready)
        before, asked_before = pods(), sorted(clients.workers())
        clients.asked.clear()
        clients.said["dd"] = DOWN

        for name in before:
            asked.api.delete(asked.path("pods", name, "v1"))
        await until(lambda: asked.condition("Ready").get("reason") == "ServedProbeFailed")
        assert pods().keys() == before.keys()
        clients.said.clear()
        await until(asked.ready)
        assert sorted(set(clients.workers())) == asked_before


async def test_silent_deployment_does_not_delay_others(asked):
    clients = Clients()
    names = [f"slow-{at}" for at in range(3)]
    clients.said |= dict.fromkeys(names)
    async with an_operator(asked, clients=clients, at_once=1, probe=ProbeSettings(at_once=4)):
        for name in (*names, "quick"):
            asked.apply(a_deployment(name=name)).expect(201)
        await until(lambda: asked.ready("quick"))
        assert not any(asked.ready(name) for name in names)
        clients.release.set()
        await until(lambda: all(asked.ready(name) for name in names))
    assert clients.most_at_once <= 4


async def test_change_with_probes_writes_the_status_twice(asked, monkeypatch):
    monkeypatch.setattr(pace, "SHORT", Nanos(SECOND))  # as in production
    monkeypatch.setattr(pace, "LONG", Nanos(60 * SECOND))  # test machines are slow
    async with an_operator(asked, clients=Clients()):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        made = asked.writes()
        asked.server.forget_requests()
        asked.apply(a_deployment(image="another:2")).expect(200)
        await until(asked.ready)
        changed = asked.writes()

    for writes in (made, changed):
        assert sum(resource == "disaggdeployments/status" for _, resource, _ in writes) <= 2


async def test_worker_unknown_to_one_router_is_named(asked, nodes):
    nodes.registers = False
    lost = []

    class Routers:
        async def workers(self, where, secret):
            deaf = lost and where == f"{address(lost[0])}:{CONTROL}"
            return tuple(WorkerRegistration(pod=pod) for pod in asked.workers() if not (deaf and pod == lost[1]))

    roles = (
        {"name": "all", "type": "aggregated", "replicas": 2},
        {"name": "router", "type": "router", "replicas": 2},
    )
    async with an_operator(asked, routers=Routers(), ask_routers_seconds=0.05):
        asked.apply(a_deployment(*roles)).expect(201)
        await until(asked.ready)

        [router, _] = sorted(name for name in asked.children("pods", "v1") if "-router-" in name)
        lost[:] = (router, asked.workers()[0])
        asked.apply(a_deployment(*roles, balance={"maxStep": 2})).expect(200)  # so that routers are asked soon
        found = await until(lambda: (each := asked.condition("RolesRegistered")).get("status") == "False" and each)

        assert found["message"] == f"all: 1 of 2 known to all routers; {lost[1]} is not known to {router}"
        assert asked.condition("Ready")["reason"] == "NotRegistered"
        assert asked.replicas() == {"all": 2}, "nobody is ended for it"
        lost.clear()
        await until(asked.ready)
