"""Kubernetes as a directory of workers, over the API server for tests."""

import asyncio
import contextlib
import types

import msgspec
import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.adapters import discovery_kubernetes
from fleet.adapters.discovery import directory_of
from fleet.clock import SECOND
from fleet.control.ports import DirectoryUnreachable
from fleet.discovery import KubernetesDiscovery
from fleet.errors import ConfigurationRefused
from fleet.ids import WorkerId
from tests.contract.discovery_promises import *  # noqa: F403 - they run here
from tests.contract.discovery_promises import ADDRESS, ELSEWHERE, NEW, OLD, OTHER, WORKER, a_router
from tests.kube.clients import Api
from tests.kube.running import ApiServer, an_api_server
from tests.ways import Way
from workers.ports import RegistryUnreachable

LEASE_SECONDS = 9
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
PODS = "/api/v1/namespaces/default/pods"


class KubernetesWorld:
    lease = LEASE_SECONDS * SECOND

    def __init__(self, server, api, folder) -> None:
        self.server, self.api = server, api
        self.way = Way(int(server.url.rpartition(":")[2]))
        self.folder = folder

    def open(self, **fields):
        return self._open(self.server, **fields)

    def open_far(self):
        return self._open(ApiServer(f"http://127.0.0.1:{self.way.port}"))

    def _open(self, server, **fields):
        config = server.kubeconfig(self.folder)
        path = config.rename(self.folder / server.url.rpartition(":")[2])
        given = {"cluster": "tiny", "namespace": "default", "lease_seconds": LEASE_SECONDS} | fields
        return directory_of(KubernetesDiscovery(kubeconfig=str(path), **given))

    async def cut(self) -> None:
        await self.way.close()

    async def mend(self) -> None:
        await self.way.open()

    async def lose(self, worker_id) -> None:
        self.api.delete(f"{LEASES}/{worker_id}").expect(200)

    async def end_leases(self, clock) -> None:
        clock.move(self.lease)


@pytest.fixture(scope="module")
def server():
    with an_api_server(with_controllers=True) as server:
        yield server


@pytest.fixture
def api(server):
    with Api(server.url) as api:
        yield api
        for path in (LEASES, SLICES, PODS):
            for each in api.get(path).expect(200)["items"]:
                api.delete(f"{path}/{each['metadata']['name']}", gracePeriodSeconds=0)
        for number in server.faults():
            server.remove_fault(int(number))


@pytest.fixture
async def a_world(server, api, tmp_path):
    world = KubernetesWorld(server, api, tmp_path)
    await world.way.open()
    yield world
    await world.way.close()


async def test_a_lease_says_who_holds_it_and_for_how_long(a_world, api):
    async with a_world.open(labels={"fleet-serving.io/role": "decode"}) as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await worker.register(WORKER, OLD, ADDRESS)
        first = api.get(f"{LEASES}/{WORKER}").expect(200)
    async with a_world.open() as successor:
        await successor.register(WORKER, NEW, ADDRESS)
        second = api.get(f"{LEASES}/{WORKER}").expect(200)

    assert first["metadata"]["labels"] == {
        "app.kubernetes.io/instance": "tiny",
        "fleet-serving.io/registration": "worker",
        "fleet-serving.io/role": "decode",
    }
    assert (first["spec"]["holderIdentity"], first["spec"]["leaseDurationSeconds"]) == (WORKER, LEASE_SECONDS)
    assert first["spec"]["acquireTime"] < first["spec"]["renewTime"]
    assert [each["spec"]["leaseTransitions"] for each in (first, second)] == [0, 1]


async def test_a_renewal_is_one_request(a_world, server):
    async with a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        server.forget_requests()
        await worker.register(WORKER, OLD, ADDRESS)

        assert [each["verb"] for each in server.requests()] == ["update"]


async def test_a_watch_that_expired_begins_anew(a_world, server):
    async with a_router(a_world.open()) as router, a_world.open() as worker:
        server.order_fault("expire", resource="leases", events=0)
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        server.order_fault("cut", verb="watch", resource="leases", events=1)
        await worker.register(OTHER, OLD, ELSEWHERE)
        await worker.register(WorkerId("decode-2"), OLD, ELSEWHERE)

        await router.has(decode_0=ADDRESS, decode_1=ELSEWHERE, decode_2=ELSEWHERE)


async def test_a_renewal_whose_answer_is_lost_or_that_others_come_before_is_made_again(a_world, api, server):
    async with a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        server.order_fault("drop", verb="update", resource="leases")
        await worker.register(WORKER, OLD, ADDRESS)  # asked again, it is based on a version that is not the latest

        api.patch(f"{LEASES}/{WORKER}", "merge", {"metadata": {"labels": {"somebody": "else"}}}).expect(200)
        await worker.register(WORKER, OLD, ADDRESS)
        api.patch(f"{LEASES}/{WORKER}", "merge", {"metadata": {"labels": {"somebody": "again"}}}).expect(200)
        await worker.deregister(WORKER, OLD)
        assert not api.get(LEASES).expect(200)["items"]


async def test_a_worker_of_another_cluster_or_without_a_record_is_not_seen(a_world, api):
    labels = {"app.kubernetes.io/instance": "tiny", "fleet-serving.io/registration": "worker"}
    api.post(LEASES, {"metadata": {"name": "strange", "labels": labels}}).expect(201)
    async with a_world.open(cluster="other") as other, a_world.open() as worker, a_router(a_world.open()) as router:
        await other.register(OTHER, OLD, ELSEWHERE)
        await worker.register(WORKER, OLD, ADDRESS)

        await router.has(decode_0=ADDRESS)


async def test_somebody_elses_lease_of_the_same_name_is_left_alone(a_world, api):
    made = api.post(LEASES, {"metadata": {"name": WORKER}, "spec": {"holderIdentity": "me"}}).expect(201)
    async with a_world.open() as worker:
        with pytest.raises(RegistryUnreachable, match="not of the cluster 'tiny'"):
            await worker.register(WORKER, OLD, ADDRESS)

    assert api.get(f"{LEASES}/{WORKER}").expect(200) == made


async def test_a_service_without_a_selector_gets_the_workers_as_endpoints(a_world, api):
    async with a_world.open(service="decode") as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        [made] = api.get(SLICES).expect(200)["items"]
        await worker.deregister(WORKER, OLD)

    assert made["metadata"]["labels"]["kubernetes.io/service-name"] == "decode"
    assert made["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == "fleet-serving.io"
    assert [each["addresses"] for each in made["endpoints"]] == [["10.0.0.1"]]
    assert [each["port"] for each in made["ports"]] == [50060]
    assert not api.get(SLICES).expect(200)["items"]


async def test_a_worker_is_registered_when_its_endpoint_is_written_too(a_world, api, server):
    server.order_fault("status", verb="patch", resource="endpointslices", code=500, times=2)
    async with a_world.open(service="decode") as worker:
        for _ in range(2):
            with pytest.raises(RegistryUnreachable, match="500"):
                await worker.register(WORKER, OLD, ADDRESS)
            assert not api.get(SLICES).expect(200)["items"]
        await worker.register(WORKER, OLD, ADDRESS)
        [made] = api.get(SLICES).expect(200)["items"]
        await worker.register(WORKER, OLD, ADDRESS)

    assert [each["addresses"] for each in made["endpoints"]] == [["10.0.0.1"]]
    assert api.get(SLICES).expect(200)["items"] == [made]


async def test_the_goodbye_of_who_was_replaced_leaves_its_successors_endpoint(a_world, api):
    async with a_world.open(service="decode") as old, a_world.open(service="decode") as new:
        await old.register(WORKER, OLD, ADDRESS)
        await new.register(WORKER, NEW, ELSEWHERE)
        await old.deregister(WORKER, OLD)

        assert [each["metadata"]["name"] for each in api.get(SLICES).expect(200)["items"]] == [WORKER]


@pytest.mark.parametrize(("code", "unreachable"), [(410, False), (429, True), (500, True)])
async def test_a_watch_that_does_not_go_on_is_begun_at_once_only_where_it_has_expired(code, unreachable):
    line = {"type": "ERROR", "object": {"kind": "Status", "code": code, "reason": "TooManyRequests"}}
    content = asyncio.StreamReader()
    content.feed_data(msgspec.json.encode(line) + b"\n")
    with pytest.raises(DirectoryUnreachable, match=str(code)) if unreachable else contextlib.nullcontext():
        assert await discovery_kubernetes._next(types.SimpleNamespace(content=content)) is None


async def test_what_a_pod_has_written_goes_with_it(a_world, api):
    container = {"name": "main", "image": "worker"}
    pod = api.post(PODS, {"metadata": {"name": "decode-0"}, "spec": {"containers": [container]}}).expect(201)
    async with (
        a_world.open(service="decode", pod="decode-0", pod_uid=pod["metadata"]["uid"]) as worker,
        a_router(a_world.open()) as router,
    ):
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)

        api.delete(f"{PODS}/decode-0", gracePeriodSeconds=0).expect(200)

        await router.has()
        assert not api.get(SLICES).expect(200)["items"]


async def test_who_may_not_is_told_so(a_world, tmp_path, server):
    server.order_fault("status", verb="create", resource="leases", code=403)
    async with a_world.open() as worker:
        with pytest.raises(RegistryUnreachable, match=r"403.*verbs"):
            await worker.register(WORKER, OLD, ADDRESS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kubeconfig": "/nowhere"}, r"^discovery\.kubeconfig: "),
        ({"kubeconfig": ""}, r"^discovery: .*set discovery\.kubeconfig"),
        ({"namespace": ""}, r"^discovery\.namespace: is needed"),
    ],
)
async def test_where_the_api_is_not_to_be_found_the_settings_are_refused(server, tmp_path, fields, message):
    given = {"cluster": "tiny", "namespace": "default", "kubeconfig": str(server.kubeconfig(tmp_path))} | fields

    with pytest.raises(ConfigurationRefused, match=message):
        async with directory_of(KubernetesDiscovery(**given)):
            pass
