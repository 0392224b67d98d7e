"""Shared objects: builds the child objects that exist only once in a deployment, and not once for each revision."""

import hashlib

import msgspec

from fleet.net.kubernetes.kinds import OptionalKinds
from operators.manifests.names import CONTROL, GRPC, HTTP, PICKER, DesiredDeployment, base_name
from operators.manifests.objects import Manifest
from operators.manifests.pods import Images
from operators.manifests.policies import disruption_budget, to_router, to_workers
from operators.manifests.services import inference_pool, pod_monitor, pod_names, service
from operators.manifests.settings import config_map, router_settings
from operators.manifests.workloads import SERVED, router_deployment


def shared(
    deployment: DesiredDeployment, images: Images, served: OptionalKinds = SERVED, *, routers: int | None = None
) -> list[Manifest]:
    """Return the manifests of the routers with their Services, and of the shared objects of all roles.

    The shared objects are a disruption budget for each role, a Service that names the pods of each role of workers, and the
    network policies. If the API server has these kinds, there is also a PodMonitor, and an InferencePool if the
    specification asks for it.

    Args:
        deployment: The desired deployment.
        images: Default images for routers and workers.
        served: The optional kinds that the API server has.
        routers: Number of router replicas, or None for the number in the specification.
    """
    router, spec = deployment.router, deployment.spec
    picks = spec.routing.inference_pool.create and served.inference_pools
    settings = router_settings(deployment) | ({"endpoint_picker": {"port": PICKER}} if picks else {})
    digest = hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:8]
    replicas = 0 if spec.suspend else router.replicas if routers is None else routers
    client_ports = {"http": HTTP, "grpc": GRPC} | ({"picker": PICKER} if picks else {})
    made = [
        config_map(deployment, router, settings),
        router_deployment(deployment, images, digest, client_ports, replicas),
        service(deployment, router, base_name(deployment, router), client_ports),
        service(deployment, router, f"{base_name(deployment, router)}-control", {"control": CONTROL}, unready=True),
    ]
    made += [pod_names(deployment, role) for role in deployment.workers]
    made += [disruption_budget(deployment, role) for role in (*deployment.workers, router)]
    made += [to_workers(deployment), to_router(deployment, client_ports)]
    if served.pod_monitors:
        made.append(pod_monitor(deployment))
    if picks:
        made.append(inference_pool(deployment))
    return made
