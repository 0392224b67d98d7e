"""The pod that this process runs in, as Kubernetes says it to the process itself. Outside of one there is none."""

from base64 import urlsafe_b64decode
from pathlib import Path

import msgspec
from msgspec import Struct

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class OwnPod(Struct, frozen=True):
    """Named as the API names it."""

    name: str
    uid: str


class _Bound(Struct, frozen=True):
    pod: OwnPod | None = None


class _Claims(Struct, frozen=True):
    bound: _Bound = msgspec.field(name="kubernetes.io", default=_Bound())


def own_pod(account: Path = SERVICE_ACCOUNT) -> OwnPod | None:
    """Whom the service account's token was made for; None: there is no token, or it is bound to no pod.

    Tokens of pods are bound to them since Kubernetes 1.22
    (https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/, bound service account tokens). Nothing is granted by
    what is read here, so nobody's signature is checked.
    """
    try:
        _, claims, _ = (account / "token").read_bytes().split(b".")
        return msgspec.json.decode(urlsafe_b64decode(claims + b"=" * (-len(claims) % 4)), type=_Claims).bound.pod
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def own_namespace(account: Path = SERVICE_ACCOUNT) -> str:
    """That of the pod; empty: this is none."""
    try:
        return (account / "namespace").read_text().strip()
    except OSError:
        return ""
