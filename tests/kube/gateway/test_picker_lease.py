"""Several endpoint pickers behind one InferencePool: gateways use only one of them at a time, the leader.

The pickers are processes of real routers, with the commands and roles of the chart.
"""

import asyncio
import json
import signal
import sys
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from fleet.core.clock import SECOND
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock, utc_now
from fleet.gateway.lease import open_candidate
from fleet.router.settings.endpoint_picker import EndpointPickerSettings, PickerLease
from tests.support.backends.openai_servers import OpenAiServer
from tests.support.certificates import Authority
from tests.support.gateway.envoy import a_completion, a_gateway
from tests.support.kube.api.running import RunningApiServer, an_api_server
from tests.support.kube.charts import by_name, documents, helm_3_render
from tests.support.kube.clients import Api
from tests.support.kvstore.builders import ManualClock
from tests.support.servers.severable_proxy import SeverableProxy
from tests.support.stopwatch import at_most
from tests.support.waiting import until_answered

SECONDS = 60
LEASE_SECONDS = 10  # on a busy machine a process may fail to renew it for seconds
ACCOUNT = "system:serviceaccount:serving:fleet-routers"
NAME = "fleet-routers-picker"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/serving/leases/{NAME}"
SLICE = f"/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices/{NAME}"
DEPLOYMENT = "/apis/apps/v1/namespaces/serving/deployments/fleet-routers"
PLURALS = {
    "ServiceAccount": "/api/v1/namespaces/serving/serviceaccounts",
    "Service": "/api/v1/namespaces/serving/services",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/serving/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/serving/rolebindings",
    "Deployment": "/apis/apps/v1/namespaces/serving/deployments",
}


class Installed:
    """Reads the objects of the installed chart; there is no kubelet."""

    def __init__(self, server, api, folder, url: str) -> None:
        lease = {"duration_seconds": LEASE_SECONDS}
        settings = {
            "endpoint_picker": {"lease": lease},
            "openai_workers": [{"worker_id": "gpu-0", "url": url, "model": "tiny"}],
        }
        self.objects = by_name(documents(helm_3_render({"routers": {"settings": settings}})))
        self.server, self.api, self.folder = server, api, folder
        self.config = folder / "settings.json"
        self.config.write_text(self.objects["ConfigMap", "fleet-routers"]["data"]["settings.json"])
        for (kind, name), each in self.objects.items():
            if kind in PLURALS and name.startswith("fleet-routers"):
                api.post(PLURALS[kind], each).expect(201)

    def command(self, name: str, address: str) -> list[str]:
        """Return the command of a router's pod, with free ports."""
        (container,) = self.objects["Deployment", "fleet-routers"]["spec"]["template"]["spec"]["containers"]
        words = [*container["command"][1:], *container["args"]]
        words = [word.replace("$(POD_NAME)", name).replace("$(POD_IP)", address) for word in words]
        words = [word.replace("/etc/fleet/settings/settings.json", str(self.config)) for word in words]
        free = [f"--set={door}_listen=127.0.0.1:0" for door in ("http", "grpc", "health")]
        free += ["--set=endpoint_picker.host=127.0.0.1", "--set=endpoint_picker.port=0"]
        config = self.server.kubeconfig(self.folder, namespace="serving", token=ACCOUNT)
        return [*words, *free, f"--set=endpoint_picker.lease.kubeconfig={config}"]

    async def leader(self) -> str:
        """Return the name of the pod to which gateways send their calls."""
        found = await asyncio.to_thread(self.api.get, SLICE)
        return found.body["endpoints"][0]["addresses"][0] if found.code == 200 else ""


class Picker:
    """Runs the process of one router with an endpoint picker."""

    def __init__(self, installed: Installed, name: str, address: str) -> None:
        self.installed, self.name, self.ip = installed, name, address

    async def start(self) -> "Picker":
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleet.cli.main", *self.installed.command(self.name, self.ip)),
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(SECONDS):
            self.address = json.loads(await self.process.stdout.readline())["endpoint_picker"]
        return self

    async def serving(self) -> bool:
        async with a_gateway(self.address) as gateway:
            answer = await HealthStub(gateway.channel).Check(health_pb2.HealthCheckRequest(service="readiness"))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def follows(self) -> bool:
        async with a_gateway(self.address) as gateway:
            asked = await gateway.request().ask(a_completion())
            return asked.status == 503 and asked.error["code"] == "draining"

    async def picks(self) -> list[str]:
        async with a_gateway(self.address) as gateway:
            return (await gateway.request().ask(a_completion())).endpoints

    async def end(self, number: int) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(SECONDS):
            return await self.process.wait()


@pytest.fixture
def server(tmp_path):
    with an_api_server(with_controllers=True, authority=Authority(tmp_path, "authority")) as server:
        yield server


@pytest.fixture
def api(server):
    with Api(server.url, authority=server.authority) as api:
        api.post("/api/v1/namespaces", {"metadata": {"name": "serving"}}).expect(201)
        yield api


async def test_second_picker_takes_over_from_a_killed_one(server, api, tmp_path):
    worker = OpenAiServer()
    await worker.start()
    installed = Installed(server, api, tmp_path, worker.url)
    first, second = Picker(installed, "one", "10.0.0.1"), Picker(installed, "two", "10.0.0.2")
    try:
        await first.start()
        await until_answered(first.serving)
        await second.start()
        await until_answered(second.follows)
        assert not await second.serving()
        assert await until_answered(installed.leader) == "10.0.0.1"

        await first.end(signal.SIGKILL)
        last = api.get(LEASE).expect(200)["spec"]
        assert last["holderIdentity"] == "one"
        with at_most(LEASE_SECONDS * 2):  # it had been renewed a moment before, and the others look as often
            await until_answered(second.serving)
        taken = datetime.fromisoformat(api.get(LEASE).expect(200)["spec"]["acquireTime"])
        assert taken - datetime.fromisoformat(last["renewTime"]) > timedelta(seconds=LEASE_SECONDS * 11 / 15)
        assert await second.picks() == [worker.url.removeprefix("http://")]
        await until_answered(lambda: _is(installed, "10.0.0.2"))

        assert await second.end(signal.SIGTERM) == 0
        assert api.get(LEASE).expect(200)["spec"]["holderIdentity"] == "", "it was given back"
        requests = [each for each in server.requests() if each["user"] == ACCOUNT]
        assert {each["code"] for each in requests} <= {200, 201, 404, 409, 0}
        assert {(each["resource"], each["verb"]) for each in requests} | {("endpointslices", "create")} == {
            (resource, verb)  # an apply of a missing object is a creation
            for rule in installed.objects["Role", NAME]["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

        api.delete(DEPLOYMENT, propagationPolicy="Background").expect(200)
        await until_answered(lambda: _gone(api, LEASE, SLICE))
    finally:
        for each in (first, second):
            if each.process.returncode is None:
                await each.end(signal.SIGKILL)
        await worker.stop()


async def _is(installed, address) -> bool:
    return await installed.leader() == address


async def _gone(api, *paths) -> bool:
    return all([(await asyncio.to_thread(api.get, path)).code == 404 for path in paths])


async def test_cut_off_picker_is_not_ready_but_refuses_nobody(tmp_path):
    with an_api_server() as server:
        way = SeverableProxy(int(server.url.rpartition(":")[2]))
        await way.open()

        def settings(identity: str, at: RunningApiServer) -> PickerLease:
            config = at.kubeconfig(tmp_path).rename(tmp_path / identity)
            given = {"name": "picker", "namespace": "default", "duration_seconds": LEASE_SECONDS}
            return PickerLease(identity=identity, kubeconfig=str(config), **given)

        async with (
            asyncio.timeout(100),
            open_candidate(
                settings("far", RunningApiServer(f"http://127.0.0.1:{way.port}")), SystemClock(), utc_now
            ) as far,
        ):
            await until_answered(lambda: _leads(far))
            async with open_candidate(settings("near", server), SystemClock(), utc_now) as near:
                await until_answered(lambda: _follows(near))
                await way.close()
                await until_answered(lambda: _leads(near))
                assert (far.leads(), far.follows()) == (False, False)
                await way.open()
                await until_answered(lambda: _follows(far))
                assert near.leads()
            asked = [each["verb"] for each in server.requests() if each["agent"] == "fleet-picker/near"]
            assert asked[-2:] == ["update", "get"] or asked[-2:] == ["get", "get"], "it gave it back, and waited"
            await until_answered(lambda: _leads(far))
        await way.close()


@pytest.mark.parametrize("answer", ["arrives", "is lost"])
async def test_removed_lease_is_created_again_soon(tmp_path, answer):
    with an_api_server(with_controllers=True) as server, Api(server.url) as api:
        api.post("/api/v1/namespaces", {"metadata": {"name": "serving"}}).expect(201)
        given = {"namespace": "serving", "kubeconfig": str(server.kubeconfig(tmp_path))}
        given["duration_seconds"] = LEASE_SECONDS
        lease = PickerLease(name=NAME, identity="one", service="picker", endpoint="10.0.0.1:9002", **given)

        async def owner() -> str:
            found = await asyncio.to_thread(api.get, SLICE)
            return found.body["metadata"]["ownerReferences"][0]["uid"] if found.code == 200 else ""

        async with open_candidate(lease, SystemClock(), utc_now):
            before = await until_answered(owner)
            if answer == "is lost":
                server.order_fault("drop", verb="create", resource="leases")
            api.delete(LEASE).expect(200)

            await until_answered(lambda: _differs(owner, before))


async def _differs(look, before) -> bool:
    return await look() not in ("", before)


async def _leads(candidate) -> bool:
    return candidate.leads()


async def _follows(candidate) -> bool:
    return candidate.follows()


async def test_processes_of_one_router_lead_together(tmp_path):
    """The processes exchange their reservations, and act as one picker with one identity."""
    clock = ManualClock()

    def written_by(year: int) -> datetime:
        return datetime(year, 1, 1, tzinfo=UTC) + timedelta(seconds=clock.now() / SECOND)

    with an_api_server() as server, Api(server.url) as api:
        config = str(server.kubeconfig(tmp_path))
        given = {"namespace": "default", "kubeconfig": config, "duration_seconds": LEASE_SECONDS}
        lease = PickerLease(name="picker", identity="one", **given)
        async with (
            open_candidate(lease, clock, lambda: written_by(2030)) as first,
            open_candidate(lease, clock, lambda: written_by(2031)) as second,
        ):
            await until_answered(lambda: _leads(first))
            await until_answered(lambda: _leads(second))
            for _ in range(4):
                clock.move(LEASE_SECONDS * SECOND * 3 // 10)  # twice this time is as long as one renewal holds
                assert (first.leads(), second.leads()) == (True, True)
                renewals = set()

                async def both_renewed(renewals=renewals) -> bool:
                    path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/picker"
                    spec = (await asyncio.to_thread(api.get, path)).expect(200)["spec"]
                    renewals.add(datetime.fromisoformat(spec["renewTime"]))
                    return renewals >= {written_by(2030), written_by(2031)}

                await until_answered(both_renewed)


async def test_unknown_api_server_refuses_the_settings(tmp_path):
    lease = PickerLease(name="picker", identity="one", kubeconfig="/nowhere")
    for given, message in (
        (lease, r"^endpoint_picker\.lease\.namespace: is needed"),
        (msgspec.structs.replace(lease, namespace="default"), r"^endpoint_picker\.lease\.kubeconfig: /nowhere"),
    ):
        with pytest.raises(ConfigurationRefused, match=message):
            async with open_candidate(given, SystemClock(), utc_now):
                pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lease": {"name": "a"}}, "identity"),
        ({"lease": {"name": "a", "identity": "b", "service": "c"}}, r"endpoint: '' must be ip:port"),
        ({"lease": {"name": "a", "identity": "b"}, "router_endpoint": "10.0.0.1:80"}, "leave out one of the two"),
        ({"lease": {"name": "a", "identity": "b", "duration_seconds": 1}}, ">= 2"),
    ],
)
def test_impossible_lease_settings_are_refused(settings, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(settings, EndpointPickerSettings)
