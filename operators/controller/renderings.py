"""Renderings: remembers what was made from the specification of each deployment, until the specification changes.

Most reconciles happen because pods or a number of replicas have changed. They need the same manifests as before, and
making these manifests again would be a large part of the time of a reconcile.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import structs

from fleet.net.kubernetes.kinds import OptionalKinds
from operators.manifests.names import DesiredDeployment
from operators.manifests.objects import Manifest, with_digest
from operators.manifests.pods import Images
from operators.manifests.shared import shared
from operators.manifests.workloads import revision

MOST_SHARED = 64
"""The maximum number of deployments whose shared objects are remembered. Beyond it, the deployment that was reconciled the longest ago
is forgotten. The manifests of a deployment with four roles take about 48 kB of memory."""

DEFAULT_REPLICAS = 1


class Renderings:
    """Remembers the revision of each deployment's workers, and the shared objects of the deployments reconciled last."""

    def __init__(self, images: Images) -> None:
        """Create the object without any remembered results; `images` are the default images of routers and workers."""
        self._images = images
        self._revisions: dict[tuple[str, str], tuple[bytes, str]] = {}
        self._shared: dict[tuple[str, str], tuple[tuple[bytes, OptionalKinds, int], list[Manifest]]] = {}

    def revision(self, desired: DesiredDeployment) -> str:
        """Return the revision of a deployment's workers (`operators.manifests.workloads.revision`)."""
        known, found = self._revisions.get((desired.namespace, desired.name), (None, ""))
        source = _without_replicas(desired)
        if known != (digest := _digest(source)):
            found = revision(source, self._images)
            self._revisions[desired.namespace, desired.name] = (digest, found)
        return found

    def shared(self, desired: DesiredDeployment, served: OptionalKinds, routers: int) -> Sequence[Manifest]:
        """Return the manifests of a deployment's shared objects, with their digests. The caller must not change them."""
        key, source = (desired.namespace, desired.name), _without_replicas(desired)
        known, found = self._shared.pop(key, (None, []))
        made_from = (_digest(source), served, routers)
        if known != made_from:
            found = [with_digest(each) for each in shared(source, self._images, served, routers=routers)]
        self._shared[key] = (made_from, found)
        while len(self._shared) > MOST_SHARED:
            del self._shared[next(iter(self._shared))]
        return found

    def forget(self, namespace: str, name: str) -> None:
        """Forget everything that was made from the specification of a deployment, because the deployment was deleted."""
        self._revisions.pop((namespace, name), None)
        self._shared.pop((namespace, name), None)

    def check(self) -> None:
        assert len(self._shared) <= MOST_SHARED


def _without_replicas(desired: DesiredDeployment) -> DesiredDeployment:
    """Return the deployment with the same fixed number of replicas in each role.

    No remembered result depends on the numbers of replicas in the specification. So a changed number must not change the
    digest by which results are found again.
    """
    roles = tuple(structs.replace(role, replicas=DEFAULT_REPLICAS) for role in desired.spec.roles)
    return structs.replace(desired, spec=structs.replace(desired.spec, roles=roles))


def _digest(source: DesiredDeployment) -> bytes:
    """Return a digest of the deployment as JSON, which distinguishes `true`, 1 and 1.0 in a `podTemplate`.

    The API server distinguishes these values, too. In Python they are equal.
    """
    return hashlib.sha256(msgspec.json.encode(source)).digest()
