"""Reconcile keys: the units of the controller's work. Pure."""

from msgspec import Struct

from fleet.net.kubernetes import kinds


class ReconcileKey(Struct, frozen=True, order=True):
    """A deployment together with all objects that concern it, or a ServingRequest."""

    kind: str
    namespace: str
    name: str


def deployment_key(namespace: str, deployment: str) -> ReconcileKey:
    return ReconcileKey(kinds.DISAGG_DEPLOYMENT.name, namespace, deployment)
