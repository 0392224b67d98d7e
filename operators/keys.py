"""Reconcile keys: the names of the objects that the controller reconciles. Pure."""

from msgspec import Struct

from fleet.net.kubernetes import kinds


class ReconcileKey(Struct, frozen=True, order=True):
    """Names the object of one reconcile: a DisaggDeployment with all its child objects, or a ServingRequest."""

    kind: str
    namespace: str
    name: str


def deployment_key(namespace: str, deployment: str) -> ReconcileKey:
    return ReconcileKey(kinds.DISAGG_DEPLOYMENT.name, namespace, deployment)
