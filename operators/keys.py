"""What is looked at in one piece, and whom a change concerns. Pure."""

from collections.abc import Iterator

from msgspec import Struct

from operators import kinds
from operators.kinds import Kind
from operators.observe import Store, deployment_of
from operators.views import Custom, Named


class Key(Struct, frozen=True, order=True):
    """A deployment with everything that is about it, or a request for one."""

    kind: str
    namespace: str
    name: str


def key_of(namespace: str, deployment: str) -> Key:
    return Key(kinds.DISAGG_DEPLOYMENT.name, namespace, deployment)


def concerned(kind: Kind, view: Named, store: Store) -> Iterator[Key]:
    """By a change of an object, as it was before or as it is after."""
    metadata = view.metadata
    if kind == kinds.SERVING_REQUEST:
        yield Key(kind.name, metadata.namespace, metadata.name)
        return
    if kind == kinds.DISAGG_DEPLOYMENT:
        yield key_of(metadata.namespace, metadata.name)
        if store.any(kinds.SERVING_REQUEST).get(metadata.namespace, metadata.name) is not None:
            yield Key(kinds.SERVING_REQUEST.name, metadata.namespace, metadata.name)
        return
    names = {deployment_of(view)} - {""}
    names |= {each.name for each in metadata.owner_references if each.kind == kinds.DISAGG_DEPLOYMENT.name}
    if not names:  # somebody else's: it may have taken, or given up, a name of ours
        everybody = store.of(kinds.DISAGG_DEPLOYMENT, Custom)
        names = {each.metadata.name for each in everybody if _rivals(each, view)}
    yield from (key_of(metadata.namespace, name) for name in sorted(names))


def everything(store: Store) -> Iterator[Key]:
    """There is, and what is about something that is not there."""
    for kind in kinds.CUSTOM:
        for each in store.of(kind, Custom):
            yield from concerned(kind, each, store)


def _rivals(deployment: Custom, view: Named) -> bool:
    ours, theirs = deployment.metadata, view.metadata
    return ours.namespace == theirs.namespace and theirs.name.startswith(ours.name)
