"""Reconcile keys: what the controller handles in one piece. Pure."""

from collections.abc import Iterator

from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import ApiKind
from fleet.net.kubernetes.views import CustomObject, NamedObject
from operators.observed.observe import InformerCaches, deployment_of


class ReconcileKey(Struct, frozen=True, order=True):
    """A deployment together with all objects that concern it, or a ServingRequest."""

    kind: str
    namespace: str
    name: str


def deployment_key(namespace: str, deployment: str) -> ReconcileKey:
    return ReconcileKey(kinds.DISAGG_DEPLOYMENT.name, namespace, deployment)


def affected_keys(kind: ApiKind, view: NamedObject, store: InformerCaches) -> Iterator[ReconcileKey]:
    """By a change of an object, as it was before or as it is after."""
    metadata = view.metadata
    if kind == kinds.SERVING_REQUEST:
        yield ReconcileKey(kind.name, metadata.namespace, metadata.name)
        return
    if kind == kinds.DISAGG_DEPLOYMENT:
        yield deployment_key(metadata.namespace, metadata.name)
        if store.any(kinds.SERVING_REQUEST).get(metadata.namespace, metadata.name) is not None:
            yield ReconcileKey(kinds.SERVING_REQUEST.name, metadata.namespace, metadata.name)
        return
    names = {deployment_of(view)} - {""}
    names |= {each.name for each in metadata.owner_references if each.kind == kinds.DISAGG_DEPLOYMENT.name}
    if not names:  # somebody else's: it may have taken, or given up, a name of ours
        everybody = store.of(kinds.DISAGG_DEPLOYMENT, CustomObject)
        names = {each.metadata.name for each in everybody if _rivals(each, view)}
    yield from (deployment_key(metadata.namespace, name) for name in sorted(names))


def all_keys(store: InformerCaches) -> Iterator[ReconcileKey]:
    """There is, and what is about something that is not there."""
    for kind in kinds.CUSTOM_KINDS:
        for each in store.of(kind, CustomObject):
            yield from affected_keys(kind, each, store)


def _rivals(deployment: CustomObject, view: NamedObject) -> bool:
    ours, theirs = deployment.metadata, view.metadata
    return ours.namespace == theirs.namespace and theirs.name.startswith(ours.name)
