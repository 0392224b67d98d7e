"""Pod Security Standards of Kubernetes 1.36: checks pods against the documented rules of the level "restricted"."""

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP = {"RuntimeDefault", "Localhost"}


def complaints(spec: dict[str, Any]) -> Iterator[str]:
    """Return a text for every rule that a pod's specification breaks."""
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", ()):
        if set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']}"
    of_pod = spec.get("securityContext", {})
    if of_pod.get("runAsUser") == 0:
        yield "runAsUser"
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            yield from (f"{container['name']}: {each}" for each in _of_container(container, of_pod))


def _of_container(container: dict[str, Any], of_pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if own.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "capabilities.drop"
    if set(own.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if not own.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
        yield "runAsNonRoot"
    if own.get("runAsUser") == 0:
        yield "runAsUser"
    if own.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type") not in SECCOMP:
        yield "seccompProfile"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
