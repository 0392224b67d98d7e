"""Watchers: sends block changes to each client that watches the node, over a stream with a bounded queue.

A watcher first gets a cache dump and then each change. If a watcher is too slow, its stream is closed, because the
watcher would not notice a gap in the stream. The watcher then opens a new stream and gets a new dump.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from msgspec.structs import replace

from kvstore.messages import BlockChanges

NAMES_A_MESSAGE = 4096  # maximum number of block hashes in one message: 64 KiB


class WatcherTooSlow(Exception):
    """A change found the queue of the watcher full, so the watcher's stream ends."""


class Watchers:
    """Sends block changes to all open watches of a node."""

    def __init__(self, queue_messages: int):
        self._queue_messages = queue_messages
        self.streams: set[_WatcherStream] = set()

    async def watch(self, dump: Sequence[BlockChanges]) -> AsyncGenerator[BlockChanges, None]:
        """Yield the cache dump, then all changes until the caller closes the generator.

        Raise WatcherTooSlow if the consumer is too slow.
        """
        stream = _WatcherStream(self._queue_messages)
        self.streams.add(stream)
        try:
            for changes in dump:
                for part in _cut(changes):
                    yield part
            while True:
                yield await stream.next()
        finally:
            self.streams.discard(stream)

    def tell(self, changes: Sequence[BlockChanges]) -> None:
        """Send changes to all watchers without waiting."""
        for change in changes:
            for part in _cut(change):
                for stream in self.streams:
                    stream.put(part)


class _WatcherStream:
    def __init__(self, queue_messages: int):
        self._queue: asyncio.Queue[BlockChanges] = asyncio.Queue(queue_messages)
        self._cut = False

    def put(self, changes: BlockChanges) -> None:
        if self._queue.full():
            self._cut = True
        else:
            self._queue.put_nowait(changes)

    async def next(self) -> BlockChanges:
        if self._cut:
            raise WatcherTooSlow
        return await self._queue.get()


def _cut(changes: BlockChanges) -> list[BlockChanges]:
    """Divide changes into messages of limited size.

    There is always at least one message, because an empty message tells the watcher that the namespace has no blocks.
    """
    stored, removed = changes.stored, changes.removed
    if len(stored) + len(removed) <= NAMES_A_MESSAGE:
        return [changes]
    parts = [
        replace(changes, stored=stored[i : i + NAMES_A_MESSAGE], removed=())
        for i in range(0, len(stored), NAMES_A_MESSAGE)
    ]
    parts += [
        replace(changes, stored=(), removed=removed[i : i + NAMES_A_MESSAGE])
        for i in range(0, len(removed), NAMES_A_MESSAGE)
    ]
    return parts
