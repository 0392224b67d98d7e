"""Informer caches: copies of the API server's objects, and the reconcile keys that a changed object affects.

Pure.
"""

from collections.abc import Iterator, Mapping
from typing import cast

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.cache import Cache
from fleet.net.kubernetes.kinds import ApiKind
from fleet.net.kubernetes.views import VIEW_OF_KIND, CustomObject, NamedObject, View
from operators.keys import ReconcileKey, deployment_key
from operators.manifests.names import INSTANCE


class InformerCaches:
    """Holds one informer cache for each kind that the operator watches."""

    def __init__(self) -> None:
        self._caches: dict[ApiKind, Cache[NamedObject]] = {kind: Cache(deployment_of) for kind in VIEW_OF_KIND}

    def of(self, kind: ApiKind, view: type[View]) -> Cache[View]:
        assert VIEW_OF_KIND[kind] is view, f"{kind.name} is kept as {VIEW_OF_KIND[kind].__name__}"
        return cast(Cache[View], self._caches[kind])

    def any(self, kind: ApiKind) -> Cache[NamedObject]:
        return self._caches[kind]

    def sizes(self) -> Mapping[str, int]:
        """Return the number of cached objects of each kind, by the name of the kind."""
        return {kind.name: len(cache) for kind, cache in self._caches.items()}


def deployment_of(item: NamedObject) -> str:
    """Return the name of the deployment that an object belongs to; empty if it belongs to none."""
    if isinstance(item, CustomObject):
        target = item.spec.get("target")
        name = target.get("deployment") if isinstance(target, dict) else item.spec.get("deployment")
        return name if isinstance(name, str) else ""
    return item.metadata.labels.get(INSTANCE, "")


def affected_keys(kind: ApiKind, view: NamedObject, store: InformerCaches) -> Iterator[ReconcileKey]:
    """Yield the keys that have to be reconciled because an object has changed.

    `view` is the object as it was before the change, or as it is after the change. The caller calls this function for
    both, because a change may move the object from one deployment to another.
    """
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
    if not names:  # The object belongs to no deployment, but it may have taken or freed a name that a deployment needs.
        deployments = store.of(kinds.DISAGG_DEPLOYMENT, CustomObject)
        names = {each.metadata.name for each in deployments if _may_conflict(each, view)}
    yield from (deployment_key(metadata.namespace, name) for name in sorted(names))


def all_keys(store: InformerCaches) -> Iterator[ReconcileKey]:
    """Yield the keys of all DisaggDeployments and ServingRequests, and of the deployments that other custom objects name.

    A key may come several times.
    """
    for kind in kinds.CUSTOM_KINDS:
        for each in store.of(kind, CustomObject):
            yield from affected_keys(kind, each, store)


def _may_conflict(deployment: CustomObject, view: NamedObject) -> bool:
    ours, theirs = deployment.metadata, view.metadata
    return ours.namespace == theirs.namespace and theirs.name.startswith(ours.name)
