"""Stored objects and their changes.

Rules:

1. One number counts every change of any object; an object's resourceVersion is the number of its last change.
2. A stored object is never changed in place, because recorded changes refer to it.
3. The last few thousand changes of each kind are kept for watchers. A request for older changes fails (`Expired`).
"""

import asyncio
import base64
import bisect
import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

import msgspec

from tests.support.kube.api import errors
from tests.support.kube.api.kinds.resources import Place
from tests.support.kube.api.values import Object

Key = tuple[str, str]
"""Namespace and name of an object; the namespace is empty for kinds whose scope is the cluster."""

KEPT_CHANGES = 8192
FIRST_REVISION = 1000
"""Revision of an empty store. A request for the changes after an earlier revision, such as 1, fails, as it does on a
server that has run for a while."""
OPEN_LISTS = 256
"""Number of chunked lists whose remaining items are kept. The oldest list is dropped first; its reader has to start again."""


class StoredChange(msgspec.Struct, frozen=True, eq=False):
    revision: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    item: Object
    before: Object | None


class Rest(msgspec.Struct, frozen=True):
    """Holds the items of a chunked list that were not sent yet, as they were at the revision of the first chunk."""

    revision: int
    items: list[Object]


class Storage:
    def __init__(self) -> None:
        self.revision = FIRST_REVISION
        self._objects: dict[Place, dict[Key, Object]] = {}
        self._changes: dict[Place, list[StoredChange]] = {}
        self._oldest: dict[Place, int] = {}
        self._compacted = FIRST_REVISION
        self._rests: OrderedDict[str, Rest] = OrderedDict()
        self._tokens = itertools.count(1)
        self._waiting: set[asyncio.Event] = set()

    def get(self, place: Place, key: Key) -> Object | None:
        return self._objects.get(place, {}).get(key)

    def items(self, place: Place, namespace: str = "") -> list[Object]:
        """Return objects in the order of namespace and name; an empty `namespace` means all namespaces."""
        kept = self._objects.get(place, {})
        return [
            each
            for key, each in sorted(kept.items(), key=operator.itemgetter(0))
            if not namespace or key[0] == namespace
        ]

    def everything(self) -> Iterator[tuple[Place, Key, Object]]:
        for place, kept in list(self._objects.items()):
            for key, each in list(kept.items()):
                yield place, key, each

    def put(self, place: Place, key: Key, item: Object) -> Object:
        """Store a new or changed object, and set its resourceVersion."""
        self.revision += 1
        item["metadata"]["resourceVersion"] = str(self.revision)
        kept = self._objects.setdefault(place, {})
        before = kept.get(key)
        kept[key] = item
        self._record(place, StoredChange(self.revision, "ADDED" if before is None else "MODIFIED", item, before))
        return item

    def remove(self, place: Place, key: Key) -> Object:
        """Remove an object; return its last state with the revision of the removal, as watchers get it."""
        before = self._objects[place].pop(key)
        self.revision += 1
        last = before | {"metadata": before["metadata"] | {"resourceVersion": str(self.revision)}}
        self._record(place, StoredChange(self.revision, "DELETED", last, before))
        return last

    def _record(self, place: Place, change: StoredChange) -> None:
        changes = self._changes.setdefault(place, [])
        changes.append(change)
        if len(changes) > KEPT_CHANGES:
            dropped = len(changes) - KEPT_CHANGES // 2
            self._oldest[place] = changes[dropped - 1].revision
            del changes[:dropped]
        self.wake()

    def changes_since(self, place: Place, revision: int) -> list[StoredChange]:
        """Return the changes after a revision.

        Raises:
            ApiError: The changes are no longer kept (`Expired`).
        """
        oldest = max(self._oldest.get(place, 0), self._compacted)
        if revision < oldest:
            raise errors.expired(revision, oldest)
        changes = self._changes.get(place, [])
        return changes[bisect.bisect_right(changes, revision, key=operator.attrgetter("revision")) :]

    def compact(self) -> None:
        """Forget all changes, as a real server does after some minutes."""
        self._compacted = self.revision
        self._changes.clear()
        self._rests.clear()

    def chunk(self, items: list[Object], limit: int, revision: int) -> tuple[list[Object], str]:
        """Return the first `limit` items (0: all), and a token for the remaining items; the token is empty if none remain."""
        if not limit or len(items) <= limit:
            return items, ""
        token = base64.urlsafe_b64encode(f"rest-{next(self._tokens)}".encode()).decode()
        self._rests[token] = Rest(revision, items[limit:])
        while len(self._rests) > OPEN_LISTS:
            self._rests.popitem(last=False)
        return items[:limit], token

    def rest(self, token: str) -> Rest:
        """Return the remaining items of a list.

        Raises:
            ApiError: The items are no longer kept.
        """
        if (found := self._rests.get(token)) is None:
            text = "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter."
            raise errors.ApiError("Expired", text)
        return found

    def waiter(self) -> asyncio.Event:
        """Return an event that every change sets, until the caller passes it to `forget`."""
        event = asyncio.Event()
        self._waiting.add(event)
        return event

    def wake(self) -> None:
        for each in self._waiting:
            each.set()

    def forget(self, waiter: asyncio.Event) -> None:
        self._waiting.discard(waiter)
