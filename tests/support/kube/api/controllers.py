"""Controllers of the API server for tests: garbage collection, and the removal of a deleted namespace's objects.

In a real cluster, the controller-manager does this, not the API server. This server does it only if `with_controllers`
is set. There are no controllers for Deployments, StatefulSets and Jobs here.
"""

from tests.support.kube.api.cluster import NAMESPACES, ObjectStore
from tests.support.kube.api.kinds.resources import Place
from tests.support.kube.api.storage import Key
from tests.support.kube.api.values import Object, clone, dig


def settle(cluster: ObjectStore) -> None:
    """Run all controllers until nothing is left to do."""
    while _collect(cluster) or _empty_namespaces(cluster):
        pass


def _collect(cluster: ObjectStore) -> bool:
    """Run one round of garbage collection, and return whether it changed anything."""
    everything = list(cluster.storage.everything())
    by_uid = {item["metadata"]["uid"]: (place, key, item) for place, key, item in everything}
    dependents: dict[str, list[tuple[Place, Key, Object]]] = {}
    revision = cluster.storage.revision
    for place, key, item in everything:
        owners = item["metadata"].get("ownerReferences") or []
        for owner in owners:
            dependents.setdefault(owner["uid"], []).append((place, key, item))
        missing = [each for each in owners if each["uid"] not in by_uid]
        if missing and len(missing) == len(owners):
            _delete(cluster, place, key, "Background")
        elif missing:
            _drop_owners(cluster, place, key, {each["uid"] for each in missing})
    for uid, (place, key, item) in by_uid.items():
        if not item["metadata"].get("deletionTimestamp"):
            continue
        finalizers = item["metadata"].get("finalizers") or ()
        if "orphan" in finalizers:
            for their_place, their_key, _ in dependents.get(uid, ()):
                _drop_owners(cluster, their_place, their_key, {uid})
            cluster.release(cluster.catalogue.at(place), key, "orphan")
        elif "foregroundDeletion" in finalizers:
            blocking = [each for each in dependents.get(uid, ()) if _blocks(each[2], uid)]
            for their_place, their_key, theirs in dependents.get(uid, ()):
                if not theirs["metadata"].get("deletionTimestamp"):
                    _delete(cluster, their_place, their_key, "Foreground" if _blocks(theirs, uid) else "Background")
            if not blocking:
                cluster.release(cluster.catalogue.at(place), key, "foregroundDeletion")
    return cluster.storage.revision != revision


def _empty_namespaces(cluster: ObjectStore) -> bool:
    revision = cluster.storage.revision
    for namespace in cluster.storage.items(NAMESPACES):
        name = namespace["metadata"]["name"]
        if not namespace["metadata"].get("deletionTimestamp") or not dig(namespace, "spec", "finalizers"):
            continue
        for place, key, _ in list(cluster.storage.everything()):
            if key[0] == name:
                _delete(cluster, place, key, "Background")
        if not any(key[0] == name for _, key, _ in cluster.storage.everything()):
            cluster.release(cluster.catalogue.at(NAMESPACES), ("", name), "kubernetes")
    return cluster.storage.revision != revision


def _blocks(item: Object, uid: str) -> bool:
    return any(
        each["uid"] == uid and each.get("blockOwnerDeletion") for each in item["metadata"].get("ownerReferences", ())
    )


def _delete(cluster: ObjectStore, place: Place, key: Key, policy: str) -> None:
    item = cluster.storage.get(place, key)
    if item is not None and not item["metadata"].get("deletionTimestamp"):
        cluster.delete(cluster.catalogue.at(place), *key, {"propagationPolicy": policy})


def _drop_owners(cluster: ObjectStore, place: Place, key: Key, uids: set[str]) -> None:
    item = cluster.storage.get(place, key)
    if item is None:
        return
    item = clone(item)
    item["metadata"]["ownerReferences"] = [
        each for each in item["metadata"].get("ownerReferences", ()) if each["uid"] not in uids
    ]
    cluster.storage.put(place, key, item)
