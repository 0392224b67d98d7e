"""Services: builds the Services of a deployment, the InferencePool for gateways, and the PodMonitor for Prometheus."""

from collections.abc import Mapping

from operators.api.disagg_deployment import RoleSpec
from operators.manifests.names import HTTP, PICKER, WORKER, DesiredDeployment, base_name, labels_of, selected
from operators.manifests.objects import Manifest, object_of, of_all


def service(
    deployment: DesiredDeployment, role: RoleSpec, name: str, ports: Mapping[str, int], *, unready: bool = False
) -> Manifest:
    """Return the Service of a role. If `unready` is true, the Service is headless and also resolves to pods that are not ready.

    Workers find routers by a Service with `unready`, because a router becomes ready only after workers have registered.
    """
    secured = {"http": {"appProtocol": "https"}} if deployment.spec.routing.tls_secret else {}
    spec: Manifest = {
        "selector": selected(deployment, role),
        "ports": [
            {"name": port, "port": number, "targetPort": port, "protocol": "TCP"} | secured.get(port, {})
            for port, number in ports.items()
        ],
    }
    if unready:
        spec |= {"publishNotReadyAddresses": True, "clusterIP": "None"}
    return object_of(deployment, "v1", "Service", name, labels_of(deployment, role), spec)


def pod_names(deployment: DesiredDeployment, role: RoleSpec) -> Manifest:
    """Return the headless Service that gives each pod of a role a DNS name.

    By these names, the pods of a worker group find each other before they are ready.
    """
    return service(deployment, role, base_name(deployment, role), {"worker": WORKER}, unready=True)


def inference_pool(deployment: DesiredDeployment) -> Manifest:
    """Return the InferencePool, by which gateways send requests to the routers.

    For each request, the gateway first asks the endpoint picker of a router. The picker names the HTTP port of its own
    router, which then chooses the worker.
    """
    router = deployment.router
    spec = {
        "selector": {"matchLabels": selected(deployment, router)},
        "targetPorts": [{"number": HTTP}],
        "endpointPickerRef": {
            "kind": "Service",
            "name": base_name(deployment, router),
            "port": {"number": PICKER},
            "failureMode": deployment.spec.routing.inference_pool.failure_mode.value,
        },
    }
    return of_all(deployment, "inference.networking.k8s.io/v1", "InferencePool", deployment.name, spec)


def pod_monitor(deployment: DesiredDeployment) -> Manifest:
    """Return the PodMonitor of the routers. The routers' metrics include the metrics of the workers."""
    endpoint: Manifest = {"port": "health", "path": "/metrics"}
    if deployment.spec.routing.tls_secret:
        # Prometheus reads pods by their addresses, which certificates do not contain.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    spec = {
        "selector": {"matchLabels": selected(deployment, deployment.router)},
        "podMetricsEndpoints": [endpoint],
    }
    return of_all(deployment, "monitoring.coreos.com/v1", "PodMonitor", f"{deployment.name}-router", spec)
