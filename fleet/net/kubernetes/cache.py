"""Object cache: keeps the newest known version of each object of one kind on the API server, without I/O of its own.

Rules:

1. The answer to a write is stored at once, so that no later decision uses the object as it was before the write. A
   watch event with an older version changes nothing.
2. An object that this process deleted is removed at once. Watch events that report this object, until its deletion
   event arrives, change nothing.
3. Only a difference in a stored field is a change. A renewed Lease, or a new resourceVersion alone, is not a change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic

from fleet.net.kubernetes.views import View

Place = tuple[str, str]
"""Namespace and name of an object."""


class Cache(Generic[View]):
    def __init__(self, deployment_of: Callable[[View], str]) -> None:
        """Create an empty cache.

        `deployment_of` returns the name of the deployment that an object belongs to (empty: none).
        """
        self._deployment_of = deployment_of
        self._objects: dict[Place, View] = {}
        self._by_deployment: dict[Place, dict[str, View]] = {}
        self._removed: dict[Place, str] = {}  # uids of objects that were removed by rule 2, until their deletion event

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[View]:
        return iter(list(self._objects.values()))

    def get(self, namespace: str, name: str) -> View | None:
        return self._objects.get((namespace, name))

    def of(self, namespace: str, deployment: str) -> Mapping[str, View]:
        """Return a copy of a deployment's objects, by name."""
        return dict(self._by_deployment.get((namespace, deployment), {}))

    def put(self, item: View) -> list[View]:
        """Store the answer to a write or an event of a watch.

        Return the object before and after the change if a stored field differs. The list has one item for a new object, and
        none if nothing has changed.
        """
        place = _place(item)
        if self._removed.get(place) == item.metadata.uid:
            return []
        before = self._objects.get(place)
        if before is not None and item.metadata.order < before.metadata.order:
            return []
        self._keep(place, item)
        if before is not None and before.essence() == item.essence():
            return []
        return [item] if before is None else [before, item]

    def end(self, item: View) -> list[View]:
        """Remove an object because a watch reported its deletion.

        Return a list with the removed object; empty if the object is unknown, or was created again meanwhile.
        """
        place = _place(item)
        if self._removed.get(place) == item.metadata.uid:
            del self._removed[place]
        kept = self._objects.get(place)
        if kept is None or kept.metadata.order > item.metadata.order:
            return []
        self._drop(place)
        return [kept]

    def remove(self, namespace: str, name: str) -> None:
        """Remove an object because this process has deleted it (rule 2)."""
        place = (namespace, name)
        if (kept := self._objects.get(place)) is not None:
            self._removed[place] = kept.metadata.uid
            self._drop(place)

    def fill(self, items: Iterable[View], version: str, namespace: str = "") -> list[View]:
        """Replace the objects of a namespace by a list with the given version; an empty namespace means all namespaces.

        Objects that were written after the list was made are kept. Return the removed objects, and the changed ones before and after the
        change.
        """
        order = int(version) if version.isdecimal() else 0
        self._removed = {place: uid for place, uid in self._removed.items() if namespace not in {"", place[0]}}
        listed = {_place(each): each for each in items}
        changed = []
        for place, kept in list(self._objects.items()):
            if namespace in {"", place[0]} and place not in listed and kept.metadata.order <= order:
                self._drop(place)
                changed.append(kept)
        for each in listed.values():
            changed += self.put(each)
        return changed

    def clear(self) -> list[View]:
        """Remove all objects, because the server no longer has their kind. Return the removed objects."""
        gone = list(self._objects.values())
        self._objects, self._by_deployment, self._removed = {}, {}, {}
        return gone

    def _keep(self, place: Place, item: View) -> None:
        if place in self._objects:
            self._drop(place)
        self._objects[place] = item
        self._by_deployment.setdefault((place[0], self._deployment_of(item)), {})[place[1]] = item

    def _drop(self, place: Place) -> None:
        item = self._objects.pop(place)
        deployment = (place[0], self._deployment_of(item))
        named = self._by_deployment[deployment]
        del named[place[1]]
        if not named:
            del self._by_deployment[deployment]


def _place(item: View) -> Place:
    return item.metadata.namespace, item.metadata.name
