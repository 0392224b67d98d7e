"""Outages of the API server: the operator reports them by /readyz, and not in the status of an object."""

import httpx
import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from prometheus_client import CollectorRegistry

from fleet.core.clock import SECOND, Nanos
from fleet.net.kubernetes import client, informer
from fleet.net.kubernetes.client import open_api_client
from fleet.net.kubernetes.ports import ApiServerUnreachable
from kvstore.security.metrics_access import OPEN_METRICS
from operators.chart.crds import KINDS, definition
from operators.health_server import open_health_server
from operators.status import rate_limiter
from tests.support.kube.api.running import an_api_server
from tests.support.kube.clients import Api
from tests.support.kube.nodes import Nodes
from tests.support.kube.operator import AskedRouters, a_deployment, an_operator, install
from tests.support.waiting import until

ROLE = {"name": "all", "type": "aggregated"}


@pytest.fixture
def own(tmp_path):
    """Run an API server for one test, which may remove kinds from it."""
    nodes = Nodes()
    with an_api_server(with_controllers=True, beside=nodes.run) as server, Api(server.url) as api:
        install(server)
        yield AskedRouters(server, api, "default", tmp_path)


async def readyz(address):
    async with httpx.AsyncClient(trust_env=False) as asking:
        answer = await asking.get(f"http://{address}/readyz")
        return answer.status_code, answer.text


async def test_readyz_fails_without_kinds_or_server(own, monkeypatch):
    monkeypatch.setattr(client, "WATCH_SECONDS", 1)  # then the server ends a watch
    monkeypatch.setattr(informer, "LONGEST_SECONDS", 0.5)
    [made] = [definition(kind) for kind in KINDS if kind.name == "ServingPlan"]
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    async with (
        an_operator(own) as operator,
        open_health_server(
            "127.0.0.1", 0, operator.unread, operator.lost, CollectorRegistry(), OPEN_METRICS
        ) as address,
    ):
        await until(lambda: not operator.lost())
        assert await readyz(address) == (200, "ok\n")

        own.api.delete(f"{crds}/{made['metadata']['name']}").expect(200)
        await until(operator.lost)
        assert await readyz(address) == (503, "cannot be followed at the API server now: ServingPlan\n")
        own.api.post(crds, made).expect(201)
        await until(lambda: not operator.lost())

        away = own.server.order_fault("status", user="fleet-operator", code=500, times=-1)
        await until(lambda: len(operator.lost()) > 5)
        assert (await readyz(address))[0] == 503
        own.server.remove_fault(away)
        await until(lambda: not operator.lost())
        assert await readyz(address) == (200, "ok\n")


async def test_brief_refusals_after_a_restart_reach_no_status(asked, monkeypatch):
    """After a restart, an API server refuses all requests for some seconds, because it has not read the roles yet."""
    monkeypatch.setattr(rate_limiter, "LONG", Nanos(60 * SECOND))  # for slow machines
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        fault = asked.server.order_fault(
            "forbid", verb="patch", resource="deployments", namespace=asked.namespace, times=6
        )

        asked.apply(a_deployment(ROLE | {"replicas": 2})).expect(200)
        await until(asked.ready)

        assert asked.server.faults()[str(fault)]["struck"] == 6
    told = [each["note"] for each in asked.children("events", "events.k8s.io/v1").values()]
    assert not [each for each in told if "cannot patch" in each]


def refused(server):
    """Return the kinds of objects of which a request was refused."""
    return {each["resource"] for each in server.requests() if each["code"] == 403}


async def test_operator_recovers_from_refusals_of_all_requests(asked, monkeypatch):
    """A restarted API server ends all watches, and refuses all requests until it has read the roles."""
    monkeypatch.setattr(client, "WATCH_SECONDS", 1)
    monkeypatch.setattr(informer, "LONGEST_SECONDS", 0.5)
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        before = asked.status()["conditions"]
        asked.server.forget_requests()

        fault = asked.server.order_fault("forbid", user="fleet-operator", times=-1)
        await until(lambda: {"pods", "disaggdeployments", "leases"} <= refused(asked.server))
        await until(lambda: len(operator.lost()) > 5)
        assert asked.status()["conditions"] == before
        asked.apply(a_deployment(ROLE | {"replicas": 2})).expect(200)
        asked.server.remove_fault(fault)

        await until(lambda: asked.ready() and not operator.lost())
        assert asked.replicas() == {"all": 2}
    told = [each["note"] for each in asked.children("events", "events.k8s.io/v1").values()]
    assert not [each for each in told if "cannot" in each]


async def test_lasting_lack_of_a_right_is_reported(asked):
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(ROLE)).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        fault = asked.server.order_fault(
            "forbid", verb="patch", resource="deployments", namespace=asked.namespace, times=-1
        )

        asked.apply(a_deployment(ROLE | {"replicas": 2})).expect(200)
        said = await until(lambda: (each := asked.condition("Ready")).get("reason") == "Forbidden" and each)

        assert 'cannot patch resource "deployments"' in said["message"]
        asked.server.remove_fault(fault)
        await until(asked.ready)


async def test_start_has_no_warning_events(asked):
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(ROLE | {"replicas": 3})).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())

    events = asked.children("events", "events.k8s.io/v1").values()
    assert [each["reason"] for each in events if each["type"] == "Warning"] == []
    assert [each for each in events if each["reason"] == "RolesNotReady"]


async def test_name_that_does_not_resolve_is_named(tmp_path):
    config = tmp_path / "kubeconfig"
    config.write_text(
        """
apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: "http://api.example.invalid:6443"}}]
users: [{name: a, user: {}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
current-context: a
"""
    )
    async with open_api_client(str(config), "test") as cluster:
        with pytest.raises(ApiServerUnreachable, match=r"the name api\.example\.invalid does not resolve"):
            await cluster.served()
