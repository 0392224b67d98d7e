"""Informer: keeps one cache equal to the API server, by a list and then watches.

Rules:

1. A watch that ends, breaks or falls silent continues from the version of the last event or bookmark. Everything is
   listed again only if the server does not remember that version any more.
2. After a failure, or a watch without any event, there is a pause. It doubles each time up to `LONGEST_SECONDS`, and is
   longer if the server demands it. After a watch that received an event, the next pause is short again.
3. An object in an event of a watch is news. An object in a list is news only if the cache has another version of it. The
   callback `convert` receives whether an object is news, because the age of a Lease is counted from its last news.
4. A failure of an informer never ends the operator, and no change is lost. No decision uses the cache before it has been
   filled once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Generic, Never

from fleet.net.kubernetes.cache import Cache
from fleet.net.kubernetes.kinds import ApiKind
from fleet.net.kubernetes.ports import ApiServerBusy, KubernetesApi, KubernetesError, VersionExpired
from fleet.net.kubernetes.views import View

log = logging.getLogger(__name__)

SHORTEST_SECONDS = 0.1
LONGEST_SECONDS = 10.0
MOST_FAILURES = 4
"""Number of failures in a row from which on `Informer.lost` is true. Immediate failures reach it within a second."""


class Informer(Generic[View]):
    """Keeps the cache of the objects of one kind equal to the API server, for one namespace or for all."""

    def __init__(
        self,
        cluster: KubernetesApi,
        kind: ApiKind,
        view: type[View],
        cache: Cache[View],
        changed: Callable[[ApiKind, Sequence[View]], None],
        *,
        namespace: str,
        selector: str = "",
        convert: Callable[[View, View | None, bool], View] | None = None,
    ) -> None:
        """Create the informer; an empty `namespace` means all namespaces.

        `changed` is called with the kind and with the changed objects, before and after their changes.

        `convert` converts a received object to the object that is stored. Its arguments are the received object, the object
        stored so far (None if there is none), and whether the received object is news (rule 3). None: no conversion.
        """
        self.filled = asyncio.Event()
        self.restarts = 0
        """Number of times since the start that a watch has ended, or that a list or a watch has failed."""

        self._cluster = cluster
        self._kind = kind
        self._view = view
        self._cache = cache
        self._changed = changed
        self._namespace = namespace
        self._selector = selector
        self._convert = convert
        self._version = ""
        self._pause = SHORTEST_SECONDS
        self._failures = 0  # number of failed calls since the API server last answered a list or accepted a watch

    @property
    def lost(self) -> bool:
        """True if nothing was read yet, or if the last `MOST_FAILURES` calls to the API server have failed."""
        return not self.filled.is_set() or self._failures >= MOST_FAILURES

    async def run(self) -> Never:
        """Keep the cache equal to the API server until cancelled."""
        while True:
            pause = 0.0
            try:
                if not self._version:
                    await self._list()
                if not await self._watch():
                    pause = self._next_pause()
            except VersionExpired:
                log.info("watch version expired, listing again", extra={"kind": self._kind.name})
                self._version = ""
                pause = self._next_pause()
            except ApiServerBusy as error:
                self._failures += 1
                pause = max(self._next_pause(), error.after_seconds or 0.0)
            except KubernetesError as error:
                self._failures += 1
                # Later attempts may succeed: a missing kind may be installed, and a forbidden one allowed.
                pause = self._next_pause()
                if pause == SHORTEST_SECONDS:
                    log.warning("watch failed", extra={"kind": self._kind.name, "cause": str(error)})
            self.restarts += 1
            await asyncio.sleep(pause)

    async def _list(self) -> None:
        listed = await self._cluster.list(self._kind, self._view, self._namespace, self._selector)
        self._tell(self._cache.fill(map(self._listed, listed.items), listed.version, self._namespace))
        self._version = listed.version
        self._failures = 0
        self.filled.set()

    async def _watch(self) -> bool:
        """Watch until the stream ends; return whether any event was received."""
        received_any = False
        stream = self._cluster.watch(
            self._kind, self._view, self._namespace, self._version, self._selector, self._began
        )
        async with aclosing(stream) as events:
            async for event in events:
                received_any, self._pause = True, SHORTEST_SECONDS
                self._version = event.version
                if event.item is not None:
                    self._tell(
                        self._cache.end(event.item)
                        if event.gone
                        else self._cache.put(self._kept(event.item, news=True))
                    )
        return received_any

    def _began(self) -> None:
        self._failures = 0

    def _listed(self, item: View) -> View:
        known = self._cache.get(item.metadata.namespace, item.metadata.name)
        if known is not None and known.metadata.resource_version == item.metadata.resource_version:
            return known
        return self._kept(item, news=known is not None)

    def _kept(self, item: View, *, news: bool) -> View:
        if self._convert is None:
            return item
        return self._convert(item, self._cache.get(item.metadata.namespace, item.metadata.name), news)

    def _tell(self, changes: Sequence[View]) -> None:
        if changes:
            self._changed(self._kind, changes)

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_SECONDS)
        return pause
