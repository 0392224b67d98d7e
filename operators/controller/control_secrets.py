"""Control secrets: derives the secrets that callers of routers' control ports, such as workers, have to prove.

Rules:

1. The operator has one secret of its own, in a Secret in its own namespace. It creates this Secret if it is missing,
   and it reads no other Secret.
2. The secret of a deployment is an HMAC of the deployment's namespace and name, with the operator's secret as the key.
   So the operator knows the secret of each deployment without reading it from the cluster, and the pods of one
   deployment cannot compute the secret of another deployment.
3. The secret of a deployment is written into a Secret in the deployment's namespace. The name of this Secret contains a
   digest of the content. Such a Secret never changes: after a change of the operator's secret, each deployment gets a
   Secret with another name, and its pods are replaced.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import KubernetesApi, KubernetesError, NameTaken, ObjectMissing, RequestDenied
from fleet.net.kubernetes.views import NamedObject, SecretData
from operators.manifests.names import CONTROL_SECRET_KEY, DesiredDeployment
from operators.manifests.objects import Manifest, of_all

MASTER_BYTES = 32


class ControlSecrets:
    """Derives the control secret of each deployment from the operator's own secret."""

    def __init__(self, cluster: KubernetesApi, namespace: str, name: str, owner: str = "") -> None:
        """Create the object; the secret is read later by `load`.

        Args:
            cluster: API server with the operator's Secret.
            namespace: The operator's namespace.
            name: Name of the Secret, or an empty text if deployments have no control secrets.
            owner: Name of the Deployment to which the operator's pods belong. Kubernetes removes the Secret together with
                this Deployment. If the name is empty, the Secret has no owner, and Kubernetes never removes it.
        """
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._owner = owner
        self._master = b""

    async def load(self) -> None:
        """Read the operator's secret from the operator's Secret. Create the Secret if it is missing.

        Do nothing if the secret has been read already, or if no Secret is named.

        Raises:
            UnusableSecret: The operator has no right to read or to create the Secret, or the Secret has no usable content.
            KubernetesError: The Secret could not be read or created; a later call may succeed.
        """
        if self._master or not self._name:
            return
        try:
            await self._load()
        except RequestDenied as error:
            raise UnusableSecret(
                f"Secret {self._namespace}/{self._name}: {error}; the operator's Role has to allow get and create there"
            ) from error

    async def read(self) -> None:
        """Read the operator's secret again, without creating the Secret if it is missing.

        Raises:
            UnusableSecret: The Secret has no usable content.
            KubernetesError: The Secret does not exist, or cannot be read now.
        """
        found = await self._cluster.get(kinds.SECRET, SecretData, self._namespace, self._name)
        self._master = _read(found.data, f"{self._namespace}/{self._name}")

    async def _load(self) -> None:
        try:
            found = await self._cluster.get(kinds.SECRET, SecretData, self._namespace, self._name)
        except ObjectMissing:
            drawn = base64.b64encode(secrets.token_hex(MASTER_BYTES).encode()).decode()
            metadata = {"name": self._name, "namespace": self._namespace, **await self._owned()}
            made: Manifest = {
                "apiVersion": kinds.SECRET.api_version,
                "kind": kinds.SECRET.name,
                "metadata": metadata,
                "immutable": True,
                "data": {CONTROL_SECRET_KEY: drawn},
            }
            with suppress(NameTaken):  # another operator has created the Secret first
                await self._cluster.create(kinds.SECRET, SecretData, self._namespace, made)
            found = await self._cluster.get(kinds.SECRET, SecretData, self._namespace, self._name)
        self._master = _read(found.data, f"{self._namespace}/{self._name}")

    async def _owned(self) -> Manifest:
        """Return metadata with a reference to the owner; empty if no owner is named, or if the owner is missing or may not be read."""
        if not self._owner:
            return {}
        try:
            uid = (await self._cluster.get(kinds.DEPLOYMENT, NamedObject, self._namespace, self._owner)).metadata.uid
        except (RequestDenied, ObjectMissing):
            return {}
        owner = {"apiVersion": kinds.DEPLOYMENT.api_version, "kind": kinds.DEPLOYMENT.name}
        return {"ownerReferences": [owner | {"name": self._owner, "uid": uid}]}

    def of(self, namespace: str, name: str) -> bytes:
        """Return the control secret of a deployment.

        The result is empty if deployments have no control secrets, or if `load` has not read the operator's secret yet.
        """
        return derived_secret(self._master, namespace, name) if self._master else b""


def derived_secret(master: bytes, namespace: str, name: str) -> bytes:
    """Return the secret of a deployment, derived from the operator's secret (rule 2)."""
    return hmac.digest(master, f"{namespace}/{name}".encode(), hashlib.sha256).hex().encode()


class UnusableSecret(KubernetesError):
    """The operator's Secret cannot be used until somebody changes its content or the operator's rights."""


class ControlSecret(Struct, frozen=True):
    """Holds the control secret of one deployment, and makes the Secret for it."""

    content: bytes

    def name(self, deployment: str) -> str:
        """Return the name of the Secret with this control secret; empty if the deployment has none."""
        if not self.content:
            return ""
        return f"{deployment}-control-{hashlib.sha256(self.content).hexdigest()[:8]}"

    def manifest(self, deployment: DesiredDeployment) -> Manifest:
        """Return the manifest of the Secret that holds this control secret, in the namespace of the deployment."""
        name = self.name(deployment.name)
        made = of_all(deployment, kinds.SECRET.api_version, kinds.SECRET.name, name, {})
        del made["spec"]
        data = {CONTROL_SECRET_KEY: base64.b64encode(self.content).decode()}
        return made | {"immutable": True, "data": data}


def _read(data: Mapping[str, str], where: str) -> bytes:
    try:
        content = base64.b64decode(data[CONTROL_SECRET_KEY], validate=True).strip()
    except (KeyError, ValueError) as error:
        raise UnusableSecret(f"Secret {where}: has no key {CONTROL_SECRET_KEY}") from error
    if len(content) < MASTER_BYTES:
        raise UnusableSecret(
            f"Secret {where}: {CONTROL_SECRET_KEY} has {len(content)} bytes, of {MASTER_BYTES} at least"
        )
    return content
