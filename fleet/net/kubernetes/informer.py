"""Keeps one cache as the API server is: a list, then a watch for as long as that lasts, and again.

Rules:

1. A watch that ends, breaks off or falls silent goes on from the version that was told last, bookmarks included. Only where the server does not
   remember that version any more is everything listed again.
2. After a failure a pause, doubled each time up to LONGEST, or as long as the server says; a watch that told anything makes it short again.
3. What differs from what was told before is news; what a first list tells is not. Whoever reckons with ages can tell by it (`heard`).
4. Nothing that fails here ends the operator, and nothing is lost by it: until the cache has been filled once, nobody decides by it.
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


class Informer(Generic[View]):
    """Of one kind in one namespace."""

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
        heard: Callable[[View, View | None, bool], View] | None = None,
    ) -> None:
        """`changed` is told what differs, before and after; `namespace` empty: all of them.

        `heard` makes of what was told what is kept, from that, what is known of it, and whether it is news; None: it is kept as it is.
        """
        self.filled = asyncio.Event()
        self.restarts = 0
        """Lists and watches after the first."""

        self._cluster = cluster
        self._kind = kind
        self._view = view
        self._cache = cache
        self._changed = changed
        self._namespace = namespace
        self._selector = selector
        self._heard = heard
        self._version = ""
        self._pause = SHORTEST_SECONDS

    async def run(self) -> Never:
        """Until cancelled."""
        while True:
            pause = 0.0
            try:
                if not self._version:
                    await self._list()
                if not await self._watch():
                    pause = self._next_pause()
            except VersionExpired:
                log.info("too old, listing again", extra={"kind": self._kind.name})
                self._version = ""
                pause = self._next_pause()
            except ApiServerBusy as error:
                pause = max(self._next_pause(), error.after_seconds or 0.0)
            except KubernetesError as error:
                # What is missing or forbidden may come, or be allowed, later.
                pause = self._next_pause()
                if pause == SHORTEST_SECONDS:
                    log.warning("not listening", extra={"kind": self._kind.name, "cause": str(error)})
            self.restarts += 1
            await asyncio.sleep(pause)

    async def _list(self) -> None:
        listed = await self._cluster.list(self._kind, self._view, self._namespace, self._selector)
        self._tell(self._cache.fill(map(self._listed, listed.items), listed.version, self._namespace))
        self._version = listed.version
        self.filled.set()

    async def _watch(self) -> bool:
        """Whether the watch told anything."""
        told_any = False
        stream = self._cluster.watch(self._kind, self._view, self._namespace, self._version, self._selector)
        async with aclosing(stream) as events:
            async for told in events:
                told_any, self._pause = True, SHORTEST_SECONDS
                self._version = told.version
                if told.item is not None:
                    self._tell(
                        self._cache.end(told.item) if told.gone else self._cache.put(self._kept(told.item, news=True))
                    )
        return told_any

    def _listed(self, item: View) -> View:
        known = self._cache.get(item.metadata.namespace, item.metadata.name)
        if known is not None and known.metadata.resource_version == item.metadata.resource_version:
            return known
        return self._kept(item, news=known is not None)

    def _kept(self, item: View, *, news: bool) -> View:
        if self._heard is None:
            return item
        return self._heard(item, self._cache.get(item.metadata.namespace, item.metadata.name), news)

    def _tell(self, changes: Sequence[View]) -> None:
        if changes:
            self._changed(self._kind, changes)

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_SECONDS)
        return pause
