"""EndpointSlices that Fleet writes for Services without a selector, with one endpoint each.

A slice is owned by the Lease of its endpoint, so Kubernetes removes it with the Lease.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any

from fleet.net.kubernetes.own_pod import OwnPod
from kvstore.net.addresses import host_port

Manifest = dict[str, Any]

GROUP, VERSION, PLURAL, KIND = "discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"
SERVICE = "kubernetes.io/service-name"
MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
MANAGER = "fleet-serving.io"


def endpoint_slice(
    address: str,
    lease: Mapping[str, Any],
    *,
    service: str,
    port: str,
    pod: OwnPod | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Return the manifest of an EndpointSlice, to be applied.

    Args:
        address: ip:port of the endpoint.
        lease: Name, namespace and uid of the Lease that owns the slice. The slice gets the same name.
        service: The Service of the endpoint.
        port: The name of the port.
        pod: The pod in which the endpoint's process runs; None: it does not run in a pod.
        labels: Labels of the slice besides those that name the Service and the manager.
        annotations: Annotations of the slice.

    Raises:
        ValueError: The address is malformed.
    """
    host, number = host_port(address)
    version = ipaddress.ip_address(host).version
    endpoint: Manifest = {
        "addresses": [host],
        "conditions": {"ready": True, "serving": True, "terminating": False},
    }
    if pod is not None:
        endpoint["targetRef"] = {
            "kind": "Pod",
            "namespace": lease["namespace"],
            "name": pod.name,
            "uid": pod.uid,
        }
    owner = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "name": lease["name"], "uid": lease["uid"]}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {
            "name": lease["name"],
            "namespace": lease["namespace"],
            "labels": {**(labels or {}), SERVICE: service, MANAGED_BY: MANAGER},
            "annotations": dict(annotations or {}),
            "ownerReferences": [owner],
        },
        "addressType": f"IPv{version}",
        "endpoints": [endpoint],
        "ports": [{"name": port, "port": number, "protocol": "TCP"}],
    }
