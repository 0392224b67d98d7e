"""Operator for tests: runs an operator in the test's process, and reads the objects that it writes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from prometheus_client import CollectorRegistry

from fleet.core.system_clock import SystemClock, utc_now
from fleet.net.kubernetes.client import open_api_client
from fleet.net.kubernetes.kinds import GROUP, VERSION
from fleet.net.kubernetes.leader import LeaseLeader, LeaseSettings
from operators.chart.crds import KINDS, definition
from operators.controller.control_secrets import ControlSecrets
from operators.controller.events import CONTROLLER
from operators.manifests.pods import Images
from operators.server import Operator
from operators.settings import OperatorSettings
from operators.telemetry import OperatorMetrics
from tests.support.kube.api.running import RunningApiServer
from tests.support.kube.clients import Api

WRITES = ("create", "update", "patch", "delete")
IMAGES = Images(router="router:1", worker_cpu="cpu:1", worker_cuda="cuda:1", worker_rocm="rocm:1")
# The Lease lasts long, because a busy machine renews it late.
QUICK = {
    "duration_seconds": 10,
    "renew_within_seconds": 7,
    "retry_seconds": 0.1,
}


def install(server: RunningApiServer) -> None:
    with Api(server.url, authority=server.authority) as api:
        for kind in KINDS:
            api.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition(kind)).expect(201)


@contextlib.asynccontextmanager
async def an_operator(
    asked: "AskedRouters",
    *,
    identity: str = "first",
    wrap: Callable = lambda cluster: cluster,
    routers=None,
    clients=None,
    owner: str = "",
    wall: Callable = utc_now,
    **settings,
) -> AsyncIterator[Operator]:
    """Run an operator while the context is open.

    At the end of the context, the operator shuts down. If the context raises, the operator is cancelled, as if killed.
    """
    lease = LeaseSettings(namespace=asked.namespace, owner=owner, **QUICK)
    made = OperatorSettings(
        images=IMAGES, identity=identity, lease=lease, **({"namespaces": (asked.namespace,)} | settings)
    )
    stop = asyncio.Event()
    async with open_api_client(asked.kubeconfig, f"fleet-operator/{identity}") as connected:
        cluster, clock = wrap(connected), SystemClock()
        leader = LeaseLeader(cluster, made.lease, asked.namespace, identity, clock, wall, controller=CONTROLLER)
        secrets = ControlSecrets(cluster, asked.namespace, made.control_secret, owner)
        operator = Operator(
            made, cluster, routers, leader, clock, wall, OperatorMetrics(CollectorRegistry()), clients, secrets=secrets
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(operator.run(stop))
            try:
                yield operator
            except BaseException:
                running.cancel()
                raise
            stop.set()


def a_deployment(*roles, name: str = "dd", **spec):
    roles = roles or (
        {"name": "prefill", "type": "prefill"},
        {"name": "decode", "type": "decode", "replicas": 2},
    )
    content = {"model": {"name": "m"}, "engine": "simulated", "roles": list(roles)} | spec
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DisaggDeployment",
        "metadata": {"name": name},
        "spec": content,
    }


class AskedRouters:
    """Sends a test's requests to the API server, in a namespace that no other test uses."""

    def __init__(self, server: RunningApiServer, api: Api, namespace: str, folder):
        self.server = server
        self.api = api
        self.namespace = namespace
        self.kubeconfig = str(server.kubeconfig(folder))

    def path(self, kind, name="", group=f"{GROUP}/{VERSION}"):
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        return f"{root}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def apply(self, manifest):
        name = manifest["metadata"]["name"]
        return self.api.apply(self.path("disaggdeployments", name), manifest, "somebody", force="true")

    def deployment(self, name="dd"):
        return self.api.get(self.path("disaggdeployments", name)).expect(200)

    def status(self, name="dd"):
        return self.deployment(name).get("status", {})

    def condition(self, kind, name="dd"):
        return next((each for each in self.status(name).get("conditions", ()) if each["type"] == kind), {})

    def ready(self, name="dd"):
        found = self.deployment(name)
        said = next((each for each in found.get("status", {}).get("conditions", ()) if each["type"] == "Ready"), {})
        return said.get("status") == "True" and said["observedGeneration"] == found["metadata"]["generation"]

    def children(self, kind="deployments", group="apps/v1"):
        return {
            each["metadata"]["name"]: each for each in self.api.get(self.path(kind, "", group)).expect(200)["items"]
        }

    def workers(self):
        """Return the names of pods that are not routers."""
        return sorted(name for name in self.children("pods", "v1") if "router" not in name)

    def replicas(self):
        """Return the number of worker replicas by role."""
        found = {}
        for each in self.children().values():
            labels = each["metadata"]["labels"]
            if "fleet-serving.io/revision" in labels:
                role = labels["fleet-serving.io/role"]
                found[role] = found.get(role, 0) + each["spec"]["replicas"]
        return found

    def writes(self, agent="fleet-operator"):
        """Return verb, resource and name of each write of an operator in this namespace, without Leases and Events."""
        return [
            (each["verb"], each["resource"], each["name"])
            for each in self.server.requests()
            if each["verb"] in WRITES
            and each["agent"].startswith(agent)
            and each["namespace"] == self.namespace
            and each["resource"] not in ("leases", "events")
        ]
