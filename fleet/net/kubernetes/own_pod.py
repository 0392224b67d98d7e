"""Own pod: reads name and uid of the pod of this process from its service account token, which exists only in pods."""

from base64 import urlsafe_b64decode
from pathlib import Path

import msgspec
from msgspec import Struct

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class OwnPod(Struct, frozen=True):
    """Name and uid of the pod in which this process runs."""

    name: str
    uid: str


class _Bound(Struct, frozen=True):
    pod: OwnPod | None = None


class _Claims(Struct, frozen=True):
    bound: _Bound = msgspec.field(name="kubernetes.io", default=_Bound())


def own_pod(account: Path = SERVICE_ACCOUNT) -> OwnPod | None:
    """Return the pod that the service account's token is bound to; None without such a token.

    Tokens of pods are bound to them since Kubernetes 1.22
    (https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/, bound service account tokens). The
    result grants no rights, so the token's signature is not checked.
    """
    try:
        _, claims, _ = (account / "token").read_bytes().split(b".")
        return msgspec.json.decode(urlsafe_b64decode(claims + b"=" * (-len(claims) % 4)), type=_Claims).bound.pod
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def own_namespace(account: Path = SERVICE_ACCOUNT) -> str:
    """Return the namespace of the pod; empty outside of a pod."""
    try:
        return (account / "namespace").read_text().strip()
    except OSError:
        return ""
