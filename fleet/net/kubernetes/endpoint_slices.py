"""EndpointSlices that Fleet writes itself, for Services without a selector: one endpoint each.

A slice belongs to the Lease of whoever it names. So it ends with that, whoever removes it and whatever for.
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
    """To be applied.

    Args:
        address: ip:port of the endpoint.
        lease: Whose name it has, and to which it belongs: metadata as the API gave it, with name, namespace and uid.
        service: Whose endpoint it is.
        port: That port's name.
        pod: Behind the endpoint, if it is one.
        labels: Besides those that a slice has.
        annotations: Any.

    Raises:
        ValueError: The address is none of that kind.
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
