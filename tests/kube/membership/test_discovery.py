"""Kubernetes as a directory of workers: Leases, and the EndpointSlices of a Service."""

import asyncio
import base64
import contextlib
from datetime import UTC, datetime

import msgspec
import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.core.clock import SECOND
from fleet.core.discovery import KubernetesDiscovery
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName, WorkerId
from fleet.core.system_clock import SystemClock
from fleet.membership.discovery import kubernetes as discovery_kubernetes
from fleet.membership.discovery.open import open_directory
from fleet.membership.ports import DirectoryUnreachable, RegistryUnreachable
from fleet.membership.server import RegistryServer
from fleet.membership.settings import MembershipSettings
from fleet.net.kubernetes.own_pod import OwnPod, own_pod
from operators.observed import registrations
from tests.contract.membership import discovery_contract as discovery_promises
from tests.contract.membership.discovery_contract import *  # noqa: F403 - they run here
from tests.contract.membership.discovery_contract import ADDRESS, ELSEWHERE, NEW, OLD, OTHER, WORKER, a_router
from tests.support.certificates import Authority
from tests.support.kube.api.running import RunningApiServer, an_api_server
from tests.support.kube.charts import by_name, documents, helm_3_render
from tests.support.kube.clients import Api
from tests.support.kvstore.builders import ManualClock
from tests.support.servers.severable_proxy import SeverableProxy
from tests.support.waiting import eventually, until, until_answered
from tests.support.workers.worker_processes import a_worker_process
from workers.settings import SimulatedSettings, WorkerSettings

LEASE_SECONDS = 9
NOW = datetime(2026, 11, 22, tzinfo=UTC)
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
PODS = "/api/v1/namespaces/default/pods"


class KubernetesWorld:
    lease = LEASE_SECONDS * SECOND

    def __init__(self, server, api, folder, service="") -> None:
        self.server, self.api, self.service = server, api, service
        self.clock = ManualClock()  # of all watchers of the directory
        self.way = SeverableProxy(int(server.url.rpartition(":")[2]))
        self.folder = folder

    def open(self, **fields):
        return self._open(self.server, **fields)

    def open_far(self):
        return self._open(RunningApiServer(f"http://127.0.0.1:{self.way.port}"))

    def _open(self, server, **fields):
        config = server.kubeconfig(self.folder)
        path = config.rename(self.folder / server.url.rpartition(":")[2])
        given = {"cluster": "tiny", "namespace": "default", "lease_seconds": LEASE_SECONDS, "service": self.service}
        settings = KubernetesDiscovery(kubeconfig=str(path), **(given | fields))
        return discovery_kubernetes.KubernetesDirectory(settings, self.clock)

    async def cut(self) -> None:
        await self.way.close()

    async def mend(self) -> None:
        await self.way.open()

    async def lose(self, worker_id) -> None:
        self.api.delete(f"{LEASES}/{worker_id}").expect(200)

    async def half_a_lease(self, *clocks) -> None:
        for clock in (self.clock, *clocks):
            clock.move(self.lease // 2)

    async def shows(self, addresses) -> None:
        async def are_equal() -> bool:
            return await asyncio.to_thread(self.endpoints) == addresses

        if self.service:
            await until_answered(are_equal)

    def endpoints(self) -> set[str]:
        """Return the addresses to which the Service sends its clients."""
        slices = self.api.get(SLICES, labelSelector=f"kubernetes.io/service-name={self.service}").expect(200)["items"]
        return {
            f"{address}:{port['port']}"
            for each in slices
            for endpoint in each["endpoints"]
            for address in endpoint["addresses"]
            for port in each["ports"]
        }


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


def pytest_generate_tests(metafunc):
    """Run the tests of the contract suite with and without EndpointSlices, and the other tests once."""
    if "a_world" in metafunc.fixturenames:
        everywhere = metafunc.function.__module__ == discovery_promises.__name__
        metafunc.parametrize("a_world", ["leases", "slices"] if everywhere else ["leases"], indirect=True)


@pytest.fixture
async def a_world(request, server, api, tmp_path):
    world = KubernetesWorld(server, api, tmp_path, service="workers" if request.param == "slices" else "")
    await world.way.open()
    yield world
    await world.way.close()


async def test_lease_names_its_holder_and_its_duration(a_world, api):
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


async def test_renewed_lease_has_the_number_of_warm_blocks(server, api, tmp_path):
    settings = KubernetesDiscovery(kubeconfig=str(server.kubeconfig(tmp_path)), cluster="tiny", namespace="default")
    warm, said = iter((7, 12)), []
    async with open_directory(settings, lambda: next(warm)) as worker:
        for _ in range(2):
            await worker.register(WORKER, OLD, ADDRESS)
            metadata = api.get(f"{LEASES}/{WORKER}").expect(200)["metadata"]
            lease = registrations.WorkerLease(
                holder=WORKER, renewed=NOW, duration_seconds=9, annotations=metadata["annotations"]
            )
            said.append(registrations.registered((lease,), None, NOW)[WORKER].warm_blocks)  # as the operator reads it

    assert said == [7, 12]


async def test_a_watch_that_expired_begins_anew(a_world, server):
    async with a_router(a_world) as router, a_world.open() as worker:
        server.order_fault("expire", resource="leases", events=0)
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        server.order_fault("cut", verb="watch", resource="leases", events=1)
        await worker.register(OTHER, OLD, ELSEWHERE)
        await worker.register(WorkerId("decode-2"), OLD, ELSEWHERE)

        await router.has(decode_0=ADDRESS, decode_1=ELSEWHERE, decode_2=ELSEWHERE)


async def test_lost_or_conflicting_renewal_is_repeated(a_world, api, server):
    async with a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        server.order_fault("drop", verb="update", resource="leases")
        await worker.register(WORKER, OLD, ADDRESS)  # at the repetition it refers to an outdated version

        api.patch(f"{LEASES}/{WORKER}", "merge", {"metadata": {"labels": {"somebody": "else"}}}).expect(200)
        await worker.register(WORKER, OLD, ADDRESS)
        api.patch(f"{LEASES}/{WORKER}", "merge", {"metadata": {"labels": {"somebody": "again"}}}).expect(200)
        await worker.deregister(WORKER, OLD)
        assert not api.get(LEASES).expect(200)["items"]


async def test_worker_of_another_cluster_is_not_found(a_world, api):
    labels = {"app.kubernetes.io/instance": "tiny", "fleet-serving.io/registration": "worker"}
    api.post(LEASES, {"metadata": {"name": "strange", "labels": labels}}).expect(201)
    async with a_world.open(cluster="other") as other, a_world.open() as worker, a_router(a_world) as router:
        await other.register(OTHER, OLD, ELSEWHERE)
        await worker.register(WORKER, OLD, ADDRESS)

        await router.has(decode_0=ADDRESS)


async def test_foreign_lease_of_the_same_name_is_left_alone(a_world, api):
    made = api.post(LEASES, {"metadata": {"name": WORKER}, "spec": {"holderIdentity": "me"}}).expect(201)
    async with a_world.open() as worker:
        with pytest.raises(RegistryUnreachable, match="not of the cluster 'tiny'"):
            await worker.register(WORKER, OLD, ADDRESS)

    assert api.get(f"{LEASES}/{WORKER}").expect(200) == made


async def test_service_without_selector_gets_workers_as_endpoints(a_world, api):
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


async def test_replaced_worker_leaves_its_successors_endpoint(a_world, api):
    async with a_world.open(service="decode") as old, a_world.open(service="decode") as new:
        await old.register(WORKER, OLD, ADDRESS)
        await new.register(WORKER, NEW, ELSEWHERE)
        await old.deregister(WORKER, OLD)

        assert [each["metadata"]["name"] for each in api.get(SLICES).expect(200)["items"]] == [WORKER]


@pytest.mark.parametrize(("code", "unreachable"), [(410, False), (429, True), (500, True)])
def test_only_an_expired_watch_restarts_at_once(code, unreachable):
    line = {"type": "ERROR", "object": {"kind": "Status", "code": code, "reason": "TooManyRequests"}}
    with pytest.raises(DirectoryUnreachable, match=str(code)) if unreachable else contextlib.nullcontext():
        assert discovery_kubernetes.parse_event(msgspec.json.encode(line)) is None


def a_pod(api) -> dict:
    container = {"name": "main", "image": "worker"}
    return api.post(PODS, {"metadata": {"name": "decode-0"}, "spec": {"containers": [container]}}).expect(201)


async def test_objects_of_a_pod_are_removed_with_it(a_world, api):
    pod = a_pod(api)
    async with (
        a_world.open(service="decode", pod="decode-0", pod_uid=pod["metadata"]["uid"]) as worker,
        a_router(a_world) as router,
    ):
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)

        api.delete(f"{PODS}/decode-0", gracePeriodSeconds=0).expect(200)

        await router.has()
        assert not api.get(SLICES).expect(200)["items"]


async def test_missing_right_is_reported(a_world, tmp_path, server):
    server.order_fault("status", verb="create", resource="leases", code=403)
    async with a_world.open() as worker:
        with pytest.raises(RegistryUnreachable, match=r"403.*verbs"):
            await worker.register(WORKER, OLD, ADDRESS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kubeconfig": "/nowhere"}, r"^discovery\.kubeconfig: /nowhere: No such file; name the file"),
        ({"kubeconfig": ""}, r"^discovery\.kubeconfig: is required outside of a pod"),
        ({"namespace": ""}, r"^discovery\.namespace: is needed"),
    ],
)
async def test_unknown_api_server_refuses_the_settings(server, tmp_path, fields, message):
    given = {"cluster": "tiny", "namespace": "default", "kubeconfig": str(server.kubeconfig(tmp_path))} | fields

    with pytest.raises(ConfigurationRefused, match=message):
        async with open_directory(KubernetesDiscovery(**given)):
            pass


async def held(server, number):
    """Wait until this fault holds a request."""

    async def has_struck() -> bool:
        return (await asyncio.to_thread(server.faults))[str(number)]["struck"]

    await until_answered(has_struck)


async def test_lease_renewed_late_is_not_removed(a_world, api, server):
    async with a_router(a_world) as router, a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        number = server.order_fault("hold", verb="delete", resource="leases")
        for _ in range(2):
            await a_world.half_a_lease()
        await held(server, number)
        await worker.register(WORKER, OLD, ADDRESS)  # while the request that removes it is under way
        renewed = api.get(f"{LEASES}/{WORKER}").expect(200)
        server.forget_requests()
        server.remove_fault(number)
        await worker.register(OTHER, OLD, ELSEWHERE)

        await router.has(decode_0=ADDRESS, decode_1=ELSEWHERE)
        assert api.get(f"{LEASES}/{WORKER}").expect(200)["metadata"]["uid"] == renewed["metadata"]["uid"]


async def test_router_without_delete_right_reports_it_once(a_world, api, server, caplog):
    server.order_fault("status", verb="delete", resource="leases", code=403, times=-1)
    async with a_router(a_world) as router, a_world.open() as worker:
        for name in (WORKER, OTHER):
            await worker.register(name, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS, decode_1=ADDRESS)
        for _ in range(2):
            await a_world.half_a_lease()
        await until(lambda: "leases of dead workers stay" in caplog.text)
        await worker.register(WorkerId("decode-2"), OLD, ELSEWHERE)

        await router.has(decode_0=ADDRESS, decode_1=ADDRESS, decode_2=ELSEWHERE)
        assert caplog.text.count("leases of dead workers stay") == 1


async def test_late_deregistration_leaves_the_successors_endpoint(a_world, api, server):
    number = server.order_fault("hold", verb="delete", resource="endpointslices")
    async with (
        a_world.open(service="decode") as old,
        a_world.open(service="decode") as new,
        asyncio.TaskGroup() as tasks,
    ):
        await old.register(WORKER, OLD, ADDRESS)
        tasks.create_task(old.deregister(WORKER, OLD))
        await held(server, number)
        await new.register(WORKER, NEW, ELSEWHERE)
        server.remove_fault(number)
    [there] = api.get(SLICES).expect(200)["items"]

    assert [each["addresses"] for each in there["endpoints"]] == [["10.0.0.2"]]


async def test_router_removes_leftovers_of_a_killed_worker(a_world, api, server, tmp_path):
    given = {
        "cluster": "tiny",
        "namespace": "default",
        "kubeconfig": str(server.kubeconfig(tmp_path)),
        "lease_seconds": 2,
    }
    settings = WorkerSettings(
        worker_id=WORKER,
        engine="simulated",
        model=ModelName("tiny"),
        listen="127.0.0.1:0",
        advertise=ADDRESS,
        discovery=KubernetesDiscovery(**given, service="decode"),
        simulated=SimulatedSettings(kv_blocks=64),
    )
    async with a_worker_process(tmp_path, settings) as worker:
        await asyncio.to_thread(eventually, lambda: api.get(SLICES).expect(200)["items"])
        worker.kill()
        await worker.ended()
        assert api.get(LEASES).expect(200)["items"], "which nobody has withdrawn"

        async with open_directory(KubernetesDiscovery(**given)) as directory, asyncio.TaskGroup() as tasks:
            following = tasks.create_task(RegistryServer(MembershipSettings(), SystemClock()).follow(directory))
            await asyncio.to_thread(eventually, lambda: not api.get(LEASES).expect(200)["items"])
            await asyncio.to_thread(eventually, lambda: not api.get(SLICES).expect(200)["items"])
            following.cancel()


def a_token(**claims) -> bytes:
    encoded = base64.urlsafe_b64encode(msgspec.json.encode(claims)).rstrip(b"=")
    return b"e30." + encoded + b".c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("token", "pod"),
    [
        (
            a_token(**{"kubernetes.io": {"namespace": "a", "pod": {"name": "decode-0", "uid": "u-1"}}}),
            OwnPod("decode-0", "u-1"),
        ),
        (a_token(**{"kubernetes.io": {"namespace": "a"}}), None),
        (a_token(sub="system:serviceaccount:a:b"), None),
        (b"system:serviceaccount:a:b", None),
        (b"a.%%%.c", None),
        (b"a.\xff\xfe.c", None),
        (b"", None),
    ],
)
def test_pod_is_identified_by_its_token(tmp_path, token, pod):
    (tmp_path / "token").write_bytes(token)

    assert own_pod(tmp_path) == pod
    assert own_pod(tmp_path / "nowhere") is None


async def test_objects_written_in_a_pod_are_owned_by_it(a_world, api, monkeypatch):
    outside = a_world.open().settings
    connect = discovery_kubernetes.connect
    uid = a_pod(api)["metadata"]["uid"]
    monkeypatch.setattr(discovery_kubernetes, "own_pod", lambda: OwnPod("decode-0", uid))
    monkeypatch.setattr(discovery_kubernetes, "connect", lambda _: connect(outside))
    inside = msgspec.structs.replace(outside, kubeconfig="")
    for settings, owners in ((inside, [uid]), (outside, [])):
        async with discovery_kubernetes.KubernetesDirectory(settings) as worker:
            await worker.register(WORKER, OLD, ADDRESS)
        lease = api.get(f"{LEASES}/{WORKER}").expect(200)
        assert [each["uid"] for each in lease["metadata"].get("ownerReferences", ())] == owners


async def test_charts_roles_allow_exactly_the_needed_requests(tmp_path):
    values = {"discovery": {"source": "Kubernetes", "cluster": "tiny"}}
    found = by_name(documents(helm_3_render(values)))
    authority = Authority(tmp_path, "authority")
    with (
        an_api_server(with_controllers=True, authority=authority) as server,
        Api(server.url, authority=server.authority) as api,
    ):
        api.post("/api/v1/namespaces", {"metadata": {"name": "serving"}}).expect(201)
        for kind in ("Role", "RoleBinding"):
            for name in ("fleet-routers", "fleet-workers"):
                path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/serving/{kind.lower()}s"
                api.post(path, found[kind, name]).expect(201)

        def directory(account: str, clock: ManualClock) -> discovery_kubernetes.KubernetesDirectory:
            config = server.kubeconfig(tmp_path, token=f"system:serviceaccount:serving:{account}")
            given = {
                "cluster": "tiny",
                "namespace": "serving",
                "kubeconfig": str(config),
                "lease_seconds": LEASE_SECONDS,
            }
            return discovery_kubernetes.KubernetesDirectory(KubernetesDiscovery(**given, service="workers"), clock)

        clock = ManualClock()
        async with (
            directory("fleet-workers", clock) as worker,
            directory("fleet-routers", clock) as router,
            asyncio.TaskGroup() as tasks,
        ):
            following = tasks.create_task(RegistryServer(MembershipSettings(), clock).follow(router))
            for name in (WORKER, OTHER):
                await worker.register(name, OLD, ADDRESS)
            await worker.register(WORKER, OLD, ADDRESS)
            await worker.deregister(WORKER, OLD)
            path = LEASES.replace("default", "serving")
            await asyncio.to_thread(eventually, lambda: any(each["verb"] == "watch" for each in server.requests()))

            def all_gone() -> bool:
                clock.move(LEASE_SECONDS * SECOND)
                return not api.get(path).expect(200)["items"]

            await asyncio.to_thread(eventually, all_gone)
            following.cancel()
        for account in ("fleet-routers", "fleet-workers"):
            asked = {
                (each["resource"], each["verb"])
                for each in server.requests()
                if each["user"] == f"system:serviceaccount:serving:{account}"
            }
            granted = {
                (resource, verb)
                for rule in found["Role", account]["rules"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
            # An apply of a missing object is a creation.
            assert asked | ({("endpointslices", "create")} & granted) == granted, account
